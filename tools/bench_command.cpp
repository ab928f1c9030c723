#include <unistd.h>

#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench.h"
#include "commands.h"
#include "options.h"
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
  for (const auto& [key, value] : row.shape)
    std::visit([&json, &k = key](const auto& v) { json[k] = v; }, value);
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

void add_attention_options(CLI::App& command, bench::AttentionChoice& attention) {
  const std::string group = "For attention; without any, a list of common shapes";
  add_count(command, "--heads", attention.heads, "Query heads; 32 if not given")->group(group);
  add_count(command, "--kv-heads", attention.kv_heads, "KV heads; 8 if not given")->group(group);
  add_count(command, "--head-dim", attention.head_dim, "Coordinates of a head; 128 if not given")
      ->group(group);
  add_count(command, "--tokens", attention.tokens,
            "Queries, the newest tokens of the context; 1 if not given: a decode step")
      ->group(group);
  add_contexts(command, attention.contexts, "Keys in the cache, a list; 1k,16k if not given")
      ->group(group);
  command
      .add_flag(
          "--latent", attention.latent,
          "Latent attention (MLA): 512 + 64 coordinates that all heads share; 16, 32, 64 and\n"
          "128 heads and 8k keys if not given, formats of the latent and the rotary part")
      ->group(group);
  add_formats(command, attention.formats,
              "Formats of K/V; the others are compared with the first. With any of the above and\n"
              "if not given: f16,tq8,tq4,tq3,tq8/tq4")
      ->group(group);
}

void add_serving_options(CLI::App& command, bench::ServingChoice& serving) {
  const std::string group =
      "For serving, beside --heads, --kv-heads, --head-dim, --context (lengths, repeated) and "
      "--formats";
  add_count(command, "--batch", serving.batch, "Sequences; 16 if not given")->group(group);
  add_count(command, "--page", serving.page_tokens, "Tokens of a page; 64 if not given")
      ->group(group);
  add_count(command, "--shared", serving.shared,
            "Tokens of a prompt that all sequences share; 0 if not given")
      ->group(group);
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
      "  gyre bench kv_copy --json | jq .gbps  one JSON object per row\n"
      "  gyre bench attention --heads 28 --kv-heads 4 --context 32k --formats f16,tq8/tq4\n"
      "  gyre bench attention --device cuda:0  a list of shapes and formats on the GPU\n"
      "  gyre bench serving --batch 64 --context 4k --page 16  a batch of sequences over pages");
  const auto arguments = std::make_shared<BenchArguments>();
  command->add_option("filter", arguments->options.filter,
                      "Only benchmarks whose name contains this");
  add_device(*command, arguments->options.device);
  add_threads(*command, arguments->options.threads);
  add_seconds(*command, arguments->options.seconds, "Time spent on each row; 0.4 if not given");
  add_attention_options(*command, arguments->options.attention);
  add_serving_options(*command, arguments->options.serving);
  command->add_flag("--json", arguments->json, "One JSON object per row instead of a table");
  command->callback([arguments] { run_bench(*arguments); });
}

}  // namespace gyre::tools
