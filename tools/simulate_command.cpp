#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "commands.h"
#include "gyre/device.h"
#include "gyre/error.h"
#include "gyre/version.h"
#include "model_shapes.h"
#include "options.h"
#include "progress_output.h"
#include "simulate_report.h"
#include "step_preset.h"
#include "trace_file.h"

namespace gyre::tools {
namespace {

struct SimulateArguments {
  bench::SimulateOptions options;
  bench::TraceRecipe recipe;
  std::optional<uint32_t> threads;
  uint64_t memory_mib = 256;
  uint64_t requests = 0;  // 0: all
  std::string preset, trace, write_trace, write_mooncake, html, command;
  bool json = false, no_sharing = false;
};

// With a preset: as servers on such devices allow, and a trace that is made up fills this memory.
constexpr uint64_t kUsers = 2048, kStepTokens = 8192, kMadeUpMib = 8192, kMadeUpSystems = 20,
                   kMadeUpRequests = 1000;
constexpr uint32_t kMadeUpPerSecond = 20;

// For --help: a default with a preset, and the one without.
template <class T>
std::string either(const T& with, const T& without) {
  std::ostringstream text;
  text << with << "; without a preset " << without;
  return text.str();
}
std::string of_preset(uint64_t without) {
  return either<std::string>("the preset's", std::to_string(without));
}

bench::Trace whole_trace(const SimulateArguments& arguments) {
  if (arguments.trace.empty()) return bench::make_trace(arguments.recipe);
  std::ifstream file(arguments.trace);
  if (!file) {
    const std::string why = std::strerror(errno);
    throw Error(ErrorCode::io, "simulate: cannot read \"" + arguments.trace + "\": " + why);
  }
  return read_trace(file, arguments.trace);
}

bench::Trace trace_of(const SimulateArguments& arguments) {
  bench::Trace trace = whole_trace(arguments);
  if (arguments.requests != 0 && arguments.requests < trace.size())
    trace.resize(arguments.requests);
  if (trace.empty())
    throw Error(ErrorCode::invalid_argument, "simulate: the trace has no requests, raise --rate");
  return trace;
}

void write_traces(const SimulateArguments& arguments, const bench::Trace& trace) {
  if (!arguments.write_trace.empty() && !trace[0].blocks.empty())
    throw Error(ErrorCode::invalid_argument,
                "simulate: --write-trace cannot write prompts by blocks, use --write-mooncake");
  std::ostringstream own, mooncake;
  if (!arguments.write_trace.empty()) write_trace(own, trace);
  if (!arguments.write_mooncake.empty()) write_mooncake_trace(mooncake, trace);
  write_output("simulate", arguments.write_trace, own.str());
  write_output("simulate", arguments.write_mooncake, mooncake.str());
}

// A preset, unless the command line says what runs or how long it takes.
std::string preset_of(const CLI::App& command, const SimulateArguments& arguments) {
  if (command.count("--preset") != 0) return arguments.preset == "none" ? "" : arguments.preset;
  for (const char* const flag : {"--device", "--threads", "--kv-gbps", "--step-ms", "--token-us"})
    if (command.count(flag) != 0) return "";
  return bench::step_presets()[0].name;
}

// What a preset says, where the command line says nothing.
void apply_preset(const CLI::App& command, SimulateArguments& arguments) {
  arguments.preset = preset_of(command, arguments);
  if (arguments.preset.empty()) return;
  const bench::StepPreset& preset = bench::step_preset(arguments.preset);
  const bench::ModelShape& shape = bench::model_shape(preset.model);
  bench::SimulateOptions& options = arguments.options;
  const auto set = [&](const char* flag, auto& value, auto given) {
    if (command.count(flag) == 0) value = given;
  };
  set("--layers", options.layers, shape.layers);
  set("--heads", options.heads, shape.heads);
  set("--kv-heads", options.kv_heads, shape.kv_heads);
  set("--head-dim", options.head_dim, shape.head_dim);
  set("--step-ms", options.step_ms, preset.step_ms);
  set("--token-us", options.token_us, preset.token_us);
  std::vector<double> rates;
  for (const bench::FormatPair& formats : options.formats)
    rates.push_back(bench::kv_gbps(preset, formats));
  set("--kv-gbps", options.kv_gbps, rates);
  const bool is_made_up = arguments.trace.empty();
  set("--memory", arguments.memory_mib, is_made_up ? kMadeUpMib : preset.memory_mib);
  set("--users", options.users, kUsers);
  set("--step", options.step_tokens, kStepTokens);
  if (!is_made_up) return;
  set("--load", arguments.recipe.load, bench::TraceLoad::agent);
  set("--rate", arguments.recipe.per_second, double{kMadeUpPerSecond});
  set("--systems", arguments.recipe.systems, kMadeUpSystems);
  set("--requests", arguments.requests, kMadeUpRequests);
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
    json["users_held"] = r.held_users;
    json["full_part"] = r.full_part;
    json["users_most"] = r.max_users;
    json["users_mean"] = r.mean_users;
    json["pages_shared_most"] = r.max_shared;
    json["prompt_tokens"] = r.prompt_tokens;
    json["hit_tokens"] = r.hit_tokens;
    json["hit_rate"] = r.hit_rate();
    json["answer_tokens"] = r.answer_tokens;
    json["tokens_per_second"] = r.tokens_per_second();
    json["wait_p50_seconds"] = r.wait_p50;
    json["wait_p99_seconds"] = r.wait_p99;
    json["pause_p50_seconds"] = r.pause_p50;
    json["pause_p99_seconds"] = r.pause_p99;
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

void run_simulate(const CLI::App& command, SimulateArguments& arguments) {
  bench::SimulateOptions& options = arguments.options;
  apply_preset(command, arguments);
  if (options.kv_gbps == std::vector<double>{0}) options.kv_gbps.clear();
  options.share_prefixes = !arguments.no_sharing;
  options.memory = arguments.memory_mib << 20;
  options.threads = arguments.threads.value_or(0);
  bench::check(options);
  check_output("simulate", arguments.html);
  check_output("simulate", arguments.write_trace);
  check_output("simulate", arguments.write_mooncake);
  const bench::Trace trace = trace_of(arguments);
  write_traces(arguments, trace);
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
    for (const bench::SimulateResult& result : results)
      rows.push_back(simulate_cells(result, results[0]));
    print_table(std::cout, simulate_columns(), rows);
    std::cout << '\n' << simulate_meaning(options, trace) << '\n';
    if (!arguments.preset.empty())
      std::cout << arguments.preset << ": " << bench::step_preset(arguments.preset).source << '\n';
  }
  write_output("simulate", arguments.html,
               simulate_html(options, trace, results, machine_of(options),
                             {arguments.command, now(), std::string(version())}));
}

void add_trace_options(CLI::App& command, SimulateArguments& arguments) {
  CLI::Option* file =
      command
          .add_option("--trace", arguments.trace,
                      "Requests as JSON lines, Gyre's or Mooncake's (docs/serving.md)")
          ->check([](const std::string& path) {
            return path.empty() ? std::string("needs the path of a file") : std::string();
          });
  add_count(command, "--requests", arguments.requests, "Only the first N requests of the trace")
      ->default_str("all; of one that is made up for a preset " + std::to_string(kMadeUpRequests));
  const char* group = "A trace that is made up";
  bench::TraceRecipe& recipe = arguments.recipe;
  const auto set_load = [&recipe](const std::string& text) {
    if (text != "chat" && text != "agent")
      throw CLI::ValidationError("--load", "must be chat or agent, got \"" + text + "\"");
    recipe.load = text == "chat" ? bench::TraceLoad::chat : bench::TraceLoad::agent;
  };
  for (CLI::Option* option :
       {command
            .add_option_function<std::string>(
                "--load", set_load,
                "chat: few turns, pauses as of people; agent: many short turns behind a long "
                "prompt")
            ->type_name("chat|agent")
            ->default_str(either<std::string>("agent", "chat")),
        command.add_option("--trace-seconds", recipe.seconds, "How long conversations begin")
            ->check(CLI::Range(0.1, 86400.0))
            ->capture_default_str(),
        command.add_option("--rate", recipe.per_second, "Conversations that begin in a second")
            ->check(CLI::Range(0.001, 10000.0))
            ->default_str(either<double>(kMadeUpPerSecond, recipe.per_second)),
        add_count(command, "--systems", recipe.systems, "Different system prompts")
            ->default_str(either(kMadeUpSystems, recipe.systems)),
        add_count(command, "--system-tokens", recipe.system_tokens,
                  "Tokens of a system prompt; chat: 512, agent: 8192", {.min = 0}),
        add_count(command, "--seed", recipe.seed, "Another number, another trace", {.min = 0})
            ->capture_default_str()}) {
    option->group(group)->excludes(file);
  }
  command.add_option("--write-trace", arguments.write_trace, "Also write the trace to a file");
  command.add_option("--write-mooncake", arguments.write_mooncake,
                     "Also write the trace in Mooncake's format");
}

void add_time_options(CLI::App& command, SimulateArguments& arguments) {
  const char* group = "The time of a step";
  std::string names;
  for (const bench::StepPreset& preset : bench::step_presets())
    names += (names.empty() ? "" : ", ") + preset.name;
  bench::SimulateOptions& options = arguments.options;
  for (CLI::Option* option :
       {command
            .add_option("--preset", arguments.preset,
                        "A model on a device: shape, memory and times; " + names +
                            ". If not given: the first, or none if --device, --threads or a "
                            "time is given; none: the KV path runs")
            ->type_name("NAME|none"),
        command.add_option("--step-ms", options.step_ms,
                           "Milliseconds of a step beside its KV path, whatever it holds"),
        command.add_option("--token-us", options.token_us, "Microseconds for each token of a step"),
        command
            .add_option("--kv-gbps", options.kv_gbps,
                        "Attention reads the cache at this many GB/s (a list: for each of "
                        "--formats): nothing runs, and the pool takes no memory. 0: the KV "
                        "path runs")
            ->delimiter(',')}) {
    option->group(group);
  }
}

}  // namespace

void add_simulate_command(CLI::App& app, const std::string& command_line) {
  CLI::App* command = app.add_subcommand(
      "simulate",
      "How many conversations one pool of pages holds and how long they wait: replays a trace of\n"
      "requests with continuous batching and shared prompts, for each format with the same "
      "memory.\n"
      "A step takes --step-ms, --token-us and the time that --kv-gbps gives the KV path, or the\n"
      "KV path runs for real. A preset has the numbers of a model on a device.\n\n"
      "Examples:\n"
      "  gyre simulate                   requests that are made up, the first preset\n"
      "  gyre simulate --formats f16,tq8,tq8/tq4,tq4 --html report.html\n"
      "  gyre simulate --trace mooncake.jsonl --requests 1000 --memory 65536\n"
      "  gyre simulate --device cpu --step-ms 30 --trace bench/chat.trace.jsonl --memory 64");
  const auto arguments = std::make_shared<SimulateArguments>();
  arguments->command = command_line;
  bench::SimulateOptions& options = arguments->options;
  add_trace_options(*command, *arguments);
  add_time_options(*command, *arguments);
  add_count(*command, "--memory", arguments->memory_mib,
            "MiB of the pool, the same for each format", {.min = 1, .max = 1 << 24})
      ->default_str(of_preset(arguments->memory_mib) + "; with one, for a trace that is made up, " +
                    std::to_string(kMadeUpMib));
  add_formats(*command, options.formats, "Formats of K/V, a list")->default_str("f16,tq8/tq4");
  add_count(*command, "--page", options.page_tokens, "Tokens of a page")->capture_default_str();
  add_count(*command, "--users", options.users, "Users at once, at most")
      ->default_str(either(kUsers, options.users));
  add_count(*command, "--step", options.step_tokens, "Tokens of a step, at most")
      ->default_str(either(kStepTokens, options.step_tokens));
  add_count(*command, "--layers", options.layers, "Layers")->default_str(of_preset(options.layers));
  add_count(*command, "--heads", options.heads, "Query heads")
      ->default_str(of_preset(options.heads));
  add_count(*command, "--kv-heads", options.kv_heads, "KV heads")
      ->default_str(of_preset(options.kv_heads));
  add_count(*command, "--head-dim", options.head_dim, "Coordinates of a head")
      ->default_str(of_preset(options.head_dim));
  add_device(*command, options.device);
  add_threads(*command, arguments->threads);
  command->add_flag("--no-sharing", arguments->no_sharing,
                    "Without the prefix index: every request computes its whole prompt");
  command->add_flag("--json", arguments->json, "One JSON object per format instead of a table");
  command->add_option("--html", arguments->html, "Also write a self-contained page with charts");
  command->callback([command, arguments] { run_simulate(*command, *arguments); });
}

}  // namespace gyre::tools
