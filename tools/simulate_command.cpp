#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "commands.h"
#include "gyre/device.h"
#include "gyre/error.h"
#include "gyre/version.h"
#include "options.h"
#include "progress_output.h"
#include "simulate_report.h"
#include "trace_file.h"

namespace gyre::tools {
namespace {

struct SimulateArguments {
  bench::SimulateOptions options;
  bench::TraceRecipe recipe;
  std::optional<uint32_t> threads;
  uint64_t memory_mib = 256;
  std::string trace, write_trace, html, command;
  bool json = false;
};

bench::Trace trace_of(const SimulateArguments& arguments) {
  if (arguments.trace.empty()) return bench::make_trace(arguments.recipe);
  std::ifstream file(arguments.trace);
  if (!file) throw Error(ErrorCode::io, "simulate: cannot read \"" + arguments.trace + "\"");
  return read_trace(file, arguments.trace);
}

void print_json(const std::vector<bench::SimulateResult>& results) {
  for (const bench::SimulateResult& r : results) {
    nlohmann::ordered_json json;
    json["format"] = r.formats.label();
    json["pages"] = r.pages;
    json["page_bytes"] = r.page_bytes;
    json["requests"] = r.requests;
    json["finished"] = r.finished;
    json["refused"] = r.refused;
    json["users_most"] = r.most_users;
    json["users_mean"] = r.mean_users;
    json["pages_shared_most"] = r.most_shared;
    json["prompt_tokens"] = r.prompt_tokens;
    json["hit_tokens"] = r.hit_tokens;
    json["hit_rate"] = r.hit_rate();
    json["answer_tokens"] = r.answer_tokens;
    json["tokens_per_second"] = r.tokens_per_second();
    json["wait_seconds"] = r.median_wait;
    json["steps"] = r.steps;
    json["evictions"] = r.evictions;
    json["preemptions"] = r.preemptions;
    json["busy_seconds"] = r.busy_seconds;
    json["seconds"] = r.seconds;
    std::cout << json.dump() << '\n';
  }
}

std::string machine_of(const bench::SimulateOptions& options) {
  for (const DeviceInfo& info : devices()) {
    if (info.name == options.device) return info.name + ": " + info.description;
  }
  return options.device;
}

void run_simulate(SimulateArguments& arguments) {
  bench::SimulateOptions& options = arguments.options;
  options.memory = arguments.memory_mib << 20;
  options.threads = arguments.threads.value_or(0);
  bench::check(options);
  check_output("simulate", arguments.html);
  check_output("simulate", arguments.write_trace);
  const bench::Trace trace = trace_of(arguments);
  if (!arguments.write_trace.empty()) {
    std::ostringstream text;
    write_trace(text, trace);
    write_output("simulate", arguments.write_trace, text.str());
  }
  std::vector<bench::SimulateResult> results;
  {
    ProgressBar bar;
    results = bench::simulate(options, trace,
                              [&](const std::string& what, double done) { bar.show(what, done); });
  }
  if (arguments.json) {
    print_json(results);
  } else {
    std::vector<std::vector<std::string>> rows;
    for (const bench::SimulateResult& result : results) rows.push_back(simulate_cells(result));
    print_table(std::cout, simulate_columns(), rows);
    std::cout << '\n' << simulate_meaning(options, trace) << '\n';
  }
  write_output("simulate", arguments.html,
               simulate_html(options, trace, results, machine_of(options),
                             {arguments.command, now(), std::string(version())}));
}

void add_trace_options(CLI::App& command, SimulateArguments& arguments) {
  CLI::Option* file =
      command.add_option("--trace", arguments.trace, "Requests as JSON lines (docs/serving.md)");
  const char* group = "A trace that is made up";
  bench::TraceRecipe& recipe = arguments.recipe;
  for (CLI::Option* option :
       {command.add_option("--trace-seconds", recipe.seconds, "How long conversations begin")
            ->check(CLI::Range(0.1, 86400.0))
            ->capture_default_str(),
        command.add_option("--rate", recipe.per_second, "Conversations that begin in a second")
            ->check(CLI::Range(0.001, 10000.0))
            ->capture_default_str(),
        add_count(command, "--systems", recipe.systems, "Different system prompts")
            ->capture_default_str(),
        add_count(command, "--system-tokens", recipe.system_tokens, "Tokens of a system prompt",
                  {.least = 0})
            ->capture_default_str(),
        add_count(command, "--seed", recipe.seed, "Another number, another trace", {.least = 0})
            ->capture_default_str()}) {
    option->group(group)->excludes(file);
  }
  command.add_option("--write-trace", arguments.write_trace, "Also write the trace to a file");
}

}  // namespace

void add_simulate_command(CLI::App& app, const std::string& command_line) {
  CLI::App* command = app.add_subcommand(
      "simulate",
      "How many conversations one pool of pages serves: replays a trace of requests with\n"
      "continuous batching and shared prompts, for each format with the same memory. The KV path\n"
      "runs for real, the rest of a model does not.\n\n"
      "Examples:\n"
      "  gyre simulate                                    a trace that is made up, on the CPU\n"
      "  gyre simulate --trace bench/chat.trace.jsonl     a small one from the repository\n"
      "  gyre simulate --memory 64 --formats f16,tq8/tq4,tq4 --html report.html");
  const auto arguments = std::make_shared<SimulateArguments>();
  arguments->command = command_line;
  bench::SimulateOptions& options = arguments->options;
  add_trace_options(*command, *arguments);
  add_count(*command, "--memory", arguments->memory_mib,
            "MiB of the pool, the same for each format", {.least = 1, .most = 1 << 24})
      ->capture_default_str();
  add_formats(*command, options.formats, "Formats of K/V, a list")->default_str("f16,tq8/tq4");
  add_count(*command, "--page", options.page_tokens, "Tokens of a page")->capture_default_str();
  add_count(*command, "--users", options.users, "Users at once, at most")->capture_default_str();
  add_count(*command, "--step", options.step_tokens, "Tokens of a step, at most")
      ->capture_default_str();
  add_count(*command, "--layers", options.layers, "Layers")->capture_default_str();
  add_count(*command, "--heads", options.heads, "Query heads")->capture_default_str();
  add_count(*command, "--kv-heads", options.kv_heads, "KV heads")->capture_default_str();
  add_count(*command, "--head-dim", options.head_dim, "Coordinates of a head")
      ->capture_default_str();
  add_device(*command, options.device);
  add_threads(*command, arguments->threads);
  command->add_flag("--json", arguments->json, "One JSON object per format instead of a table");
  command->add_option("--html", arguments->html, "Also write a self-contained page with charts");
  command->callback([arguments] { run_simulate(*arguments); });
}

}  // namespace gyre::tools
