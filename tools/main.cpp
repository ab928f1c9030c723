#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string_view>

#include "commands.h"
#include "did_you_mean.h"
#include "gyre/error.h"
#include "version.h"

namespace {

enum ExitStatus { kDone = 0, kFailed = 1, kWrongUsage = 2 };

constexpr const char* kExitStatus =
    "Counts take k (1024) and M (1024 k): --context 32k.\n\n"
    "Exit status: 0 done; 1 what was asked for failed (no such device, a file, memory); 2 wrong\n"
    "usage.";

void add_commands(CLI::App& app, const std::string& command_line) {
  gyre::tools::add_compare_command(app, command_line);
  gyre::tools::add_devices_command(app);
  gyre::tools::add_kernels_command(app);
  gyre::tools::add_bench_command(app);
  gyre::tools::add_prepare_command(app);
  gyre::tools::add_simulate_command(app, command_line);
  gyre::tools::add_inspect_command(app);
}

// CLI11 would only say that a command is missing.
void check_command_name(const CLI::App& app, std::string_view word) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(command->get_name());
  if (word.starts_with('-') || std::find(names.begin(), names.end(), word) != names.end()) return;
  gyre::bench::refuse_name("no command", word, names);
}

// The command that was begun, or the tool itself.
const CLI::App& begun(const CLI::App& app) {
  const auto commands = app.get_subcommands();
  return commands.empty() ? app : *commands.front();
}

std::string usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<std::string> left = app.remaining(true);
  if (dynamic_cast<const CLI::ExtrasError*>(&error) == nullptr || left.empty()) return error.what();
  const std::string& word = left.front();
  if (!word.starts_with('-')) return "unexpected argument \"" + word + "\"";
  std::vector<std::string> flags;
  for (const CLI::Option* option : begun(app).get_options()) {
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
  }
  const std::string flag = word.substr(0, word.find('='));
  return "no option \"" + flag + "\"" + gyre::bench::did_you_mean(flag, flags);
}

int refuse(const CLI::App& app, const std::string& message) {
  const CLI::App& command = begun(app);
  const std::string name = &command == &app ? "gyre" : "gyre " + command.get_name();
  std::fprintf(stderr, "gyre: %s\nSee `%s --help`.\n", message.c_str(), name.c_str());
  return kWrongUsage;
}

// Commands run while CLI11 parses, as its callbacks.
int run(CLI::App& app, int argc, char** argv) {
  try {
    if (argc > 1) check_command_name(app, argv[1]);
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return refuse(app, usage_error(app, error));
  } catch (const gyre::Error& error) {
    if (error.code() == gyre::ErrorCode::invalid_argument) return refuse(app, error.what());
    std::fprintf(stderr, "gyre: %s (%s)\n", error.what(), gyre::name(error.code()).data());
    return kFailed;
  }
  return kDone;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    CLI::App app(
        "Gyre: the KV path of LLM inference.\n"
        "Start with `gyre compare`: what each cache format costs and gives on this machine. `gyre\n"
        "devices` shows what the machine offers, `gyre bench` how fast each op is.",
        "gyre");
    app.require_subcommand(1);
    app.set_help_all_flag("--help-all", "Help for every command");
    app.set_version_flag("--version", gyre::tools::version_text(), "Version and build");
    app.footer(kExitStatus);
    std::string command_line = "gyre";
    for (int i = 1; i < argc; ++i) command_line += std::string(" ") + argv[i];
    add_commands(app, command_line);
    const int status = run(app, argc, argv);
    if (std::cout.flush()) return status;
    std::fprintf(stderr, "gyre: writing to standard output failed\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gyre: %s\n", error.what());
  }
  return kFailed;
}
