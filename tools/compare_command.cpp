#include <unistd.h>

#include <ctime>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "compare.h"
#include "compare_table.h"
#include "gyre/version.h"
#include "model_options.h"
#include "options.h"
#include "progress_output.h"
#include "report_html.h"

namespace gyre::tools {
namespace {

constexpr const char* kDefaultPreset = "llama-3.1-8b";

struct CompareArguments {
  std::string preset;
  ModelNumbers numbers;
  bench::CompareOptions options;
  bool list = false, json = false;
  std::string html, svg, command;

  // The default, unless the model is given in numbers.
  std::string chosen_preset() const {
    const bool own = numbers.layers || numbers.heads || numbers.kv_heads || numbers.head_dim;
    return preset.empty() && !own ? kDefaultPreset : preset;
  }
};

void print_report(const bench::CompareReport& report) {
  std::vector<std::vector<std::string>> rows;
  std::string context;
  for (const bench::CompareEntry& entry : report.entries) {
    rows.push_back(compare_cells(entry));
    if (rows.back()[0] == context) {
      rows.back()[0].clear();  // once for each group of rows
    } else {
      context = rows.back()[0];
    }
  }
  for (const std::string& line : describe_model(report)) std::cout << line << '\n';
  std::cout << describe_machine(report) << "\n\n";
  print_table(std::cout, compare_columns(), rows);
  std::cout << '\n' << compare_meaning(report) << '\n';
}

void print_json(const bench::CompareReport& report) {
  for (const bench::CompareEntry& e : report.entries) {
    nlohmann::ordered_json json;
    json["model"] = report.shape.name;
    json["device"] = report.device;
    json["threads"] = report.threads;
    json["layers"] = report.shape.layers;
    json["heads"] = report.shape.heads;
    json["kv_heads"] = report.shape.kv_heads;
    json["head_dim"] = report.shape.head_dim;
    json["context"] = e.context;
    json["k"] = name(e.formats.k);
    json["v"] = name(e.formats.v);
    json["tail"] = e.formats.compressed() ? report.tail : 0;
    json["bits"] = e.bits;
    json["bytes_per_token"] = e.bytes_per_token;
    json["cache_bytes"] = e.cache_bytes;
    json["step_us"] = e.step_us;
    if (e.window_us > 0) json["window_step_us"] = e.window_us;
    json["model_step_us"] = e.model_us;
    json["tokens_per_second"] = e.tokens_per_second;
    json["speedup"] = e.speedup;
    json["read_gbps"] = e.read_gbps;
    json["limit_gbps"] = e.limit_gbps;
    json["fraction"] = e.fraction;
    json["nmse"] = e.nmse;
    std::cout << json.dump() << '\n';
  }
}

bench::CompareReport measure(const bench::CompareOptions& options) {
  ProgressBar bar;
  return bench::compare(options,
                        [&](const std::string& what, double done) { bar.show(what, done); });
}

void run_compare(const CompareArguments& arguments) {
  if (arguments.list) return list_models();
  bench::CompareOptions options = arguments.options;
  options.shape = chosen_model("compare", arguments.chosen_preset(), arguments.numbers);
  bench::check(options);
  check_output("compare", arguments.html);
  check_output("compare", arguments.svg);
  const bench::CompareReport report = measure(options);
  if (arguments.json) {
    print_json(report);
  } else {
    print_report(report);
  }
  write_output("compare", arguments.svg, time_chart(report));
  write_output("compare", arguments.html,
               report_html(report, {arguments.command, now(), std::string(version())}));
  if (!arguments.html.empty()) std::cerr << "The same with charts: " << arguments.html << '\n';
}

}  // namespace

void add_compare_command(CLI::App& app, const std::string& command_line) {
  CLI::App* command = app.add_subcommand(
      "compare",
      "What each cache format costs and gives for a model on this machine: memory, time of a\n"
      "decode step at growing context, tokens per second, part of the bandwidth, error.\n\n"
      "Examples:\n"
      "  gyre compare                                    " +
          std::string(kDefaultPreset) +
          "\n"
          "  gyre compare --list                             the models it knows\n"
          "  gyre compare qwen3-8b --html report.html        a page with charts as well\n"
          "  gyre compare --formats f16,tq8/tq4 --tail 128 --context 32k,128k\n"
          "  gyre compare --heads 32 --kv-heads 8 --head-dim 128 --layers 32 --context 8192");
  const auto arguments = std::make_shared<CompareArguments>();
  arguments->command = command_line;
  bench::CompareOptions& options = arguments->options;
  command->add_option("preset", arguments->preset, "A model that --list shows");
  CLI::Option* list = command->add_flag("--list", arguments->list, "Show the presets and stop");
  add_contexts(*command, options.contexts, "Tokens in the cache, a list")
      ->default_str("1024,4096,16384");
  add_formats(*command, options.formats, "Formats of K/V, a list; speeds are against the first")
      ->default_str("f16,tq8,tq6,tq4,tq3,tq8/tq4");
  add_count(*command, "--tail", options.tail, "Newest tokens that compressed formats keep in f16",
            {.min = 0})
      ->capture_default_str();
  add_device(*command, options.device);
  add_threads(*command, options.threads);
  add_seconds(*command, options.seconds, "Time spent on each format at each context")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "One JSON object per line instead of a table");
  command->add_option("--html", arguments->html, "Also write a self-contained page with charts");
  command->add_option("--svg", arguments->svg, "Also write the chart of times as an SVG file");
  add_model_numbers(*command, arguments->numbers);
  for (CLI::Option* other : command->get_options()) {
    if (other != list && other != command->get_help_ptr() && other != command->get_help_all_ptr())
      list->excludes(other);
  }
  command->callback([arguments] { run_compare(*arguments); });
}

}  // namespace gyre::tools
