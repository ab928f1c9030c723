#include <unistd.h>

#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench.h"
#include "commands.h"
#include "table.h"

namespace gyre::tools {
namespace {

struct BenchArguments {
  bench::Options options;
  bool json = false;
};

nlohmann::ordered_json to_json(const bench::Row& row) {
  nlohmann::ordered_json json;
  json["op"] = row.op;
  json["device"] = row.device;
  json["threads"] = row.threads;
  for (const auto& [key, value] : row.shape) {
    std::visit([&json, &k = key](const auto& v) { json[k] = v; }, value);
  }
  json["median_us"] = row.median_us;
  json["bytes"] = row.bytes;
  json["gbps"] = row.gbps;
  json["limit_gbps"] = row.limit_gbps;
  json["fraction"] = row.fraction;
  if (row.limit_us > 0) json["limit_us"] = row.limit_us;
  if (!row.against.empty()) {
    json["against"] = row.against;
    json["against_us"] = row.against_us;
    json["speedup"] = row.speedup;
  }
  return json;
}

std::string short_number(double value) {
  std::ostringstream text;
  text << std::setprecision(3) << value;
  return text.str();
}

std::string shape_text(const bench::Row& row) {
  std::string text;
  for (const auto& [key, value] : row.shape) {
    if (!text.empty()) text += ' ';
    if (key != "case") text += key + "=";
    std::visit(
        [&text](const auto& v) {
          if constexpr (std::is_same_v<std::decay_t<decltype(v)>, std::string>) {
            text += v;
          } else if constexpr (std::is_same_v<std::decay_t<decltype(v)>, double>) {
            text += short_number(v);
          } else {
            text += std::to_string(v);
          }
        },
        value);
  }
  return text;
}

// What the ratio refers to.
std::string limit_text(const bench::Row& row) {
  if (!row.against.empty()) return fixed(row.against_us, 2) + " us, " + row.against;
  if (row.bytes != 0) return fixed(row.limit_gbps, 1) + " GB/s";
  return row.limit_us > 0 ? fixed(row.limit_us, 1) + " us" : "-";
}

std::string ratio_text(const bench::Row& row) {
  if (row.speedup > 0) return fixed(row.speedup, 2) + "x";
  return row.fraction > 0 ? fixed(100 * row.fraction, 0) + " %" : "-";
}

void print_rows(const std::vector<bench::Row>& rows) {
  std::vector<std::vector<std::string>> cells;
  cells.reserve(rows.size());
  for (const bench::Row& row : rows) {
    cells.push_back({row.op, shape_text(row), fixed(row.median_us, 2),
                     row.bytes != 0 ? fixed(row.gbps, 1) : "-", ratio_text(row), limit_text(row)});
  }
  print_table(std::cout,
              {{"op"},
               {"case"},
               {"median us", Align::right},
               {"GB/s", Align::right},
               {"ratio", Align::right},
               {"to"}},
              cells);
  std::cout
      << "\n"
      << rows.front().threads << " threads on " << rows.front().device
      << ". GB/s counts bytes read and written. The ratio is to what stands beside it, taken in "
         "turns\n"
         "in the same run: % of what the machine moves or of a stated latency, x times as fast.\n";
}

void run_bench(const BenchArguments& arguments) {
  const bool live = isatty(STDERR_FILENO) != 0;
  size_t measured = 0;
  bench::Progress progress;
  progress.begin = [&](const std::string& row) {
    ++measured;
    if (live) {
      std::cerr << "\r\033[K[" << measured << "] " << row << std::flush;
    } else {
      std::cerr << '[' << measured << "] " << row << '\n';
    }
  };
  progress.done = [&](const bench::Row& row) {
    if (live) std::cerr << "\r\033[K" << std::flush;
    if (arguments.json) std::cout << to_json(row).dump() << std::endl;
  };
  const auto rows = bench::run(arguments.options, progress);
  if (!arguments.json) print_rows(rows);
}

}  // namespace

void add_bench_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "bench",
      "Measure, and compare with what the machine can do: every row is a median, taken in turns\n"
      "with its limit (memcpy of as many bytes, or a stated latency) in the same run.\n\n"
      "Examples:\n"
      "  gyre bench                            everything\n"
      "  gyre bench kv_copy --threads 2        one op, two threads\n"
      "  gyre bench kv_copy --json | jq .gbps  one JSON object per row");
  const auto arguments = std::make_shared<BenchArguments>();
  command->add_option("filter", arguments->options.filter,
                      "Only benchmarks whose name contains this");
  command->add_option("--device", arguments->options.device, "Device, as `gyre devices` names it")
      ->capture_default_str();
  command
      ->add_option("--threads", arguments->options.threads,
                   "CPU threads; 0 takes GYRE_THREADS or all cores")
      ->capture_default_str();
  command->add_option("--seconds", arguments->options.seconds_per_row, "Time spent on each row")
      ->check(CLI::Range(0.01, 60.0))
      ->capture_default_str();
  bench::AttentionChoice& attention = arguments->options.attention;
  const char* group = "For attention";
  command->add_option("--heads", attention.heads, "Query heads; 0 runs a list of common shapes")
      ->group(group)
      ->capture_default_str();
  command->add_option("--kv-heads", attention.kv_heads, "KV heads")
      ->group(group)
      ->capture_default_str();
  command->add_option("--head-dim", attention.head_dim, "Coordinates of a head")
      ->group(group)
      ->capture_default_str();
  command->add_option("--tokens", attention.tokens, "Query tokens; 1 is a decode step")
      ->group(group)
      ->capture_default_str();
  command->add_option("--context", attention.contexts, "Keys in the cache, a list")
      ->delimiter(',')
      ->group(group)
      ->capture_default_str();
  command->add_option("--k", attention.k, "Formats of K, a list that pairs up with --v")
      ->delimiter(',')
      ->group(group)
      ->capture_default_str();
  command->add_option("--v", attention.v, "Formats of V; rows are compared with the first pair")
      ->delimiter(',')
      ->group(group)
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "One JSON object per row instead of a table");
  command->callback([arguments] { run_bench(*arguments); });
}

}  // namespace gyre::tools
