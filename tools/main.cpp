#include <cstdio>
#include <exception>

#include "commands.h"
#include "gyre/error.h"

namespace {

int run(int argc, char** argv) {
  CLI::App app(
      "Gyre: the KV path of LLM inference.\n"
      "Start with `gyre compare`: what each cache format costs and gives on this machine. `gyre\n"
      "devices` shows what the machine offers, `gyre bench` how fast each op is.",
      "gyre");
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Help for every command");
  std::string command_line = "gyre";
  for (int i = 1; i < argc; ++i) command_line += std::string(" ") + argv[i];
  gyre::tools::add_compare_command(app, command_line);
  gyre::tools::add_devices_command(app);
  gyre::tools::add_kernels_command(app);
  gyre::tools::add_bench_command(app);
  gyre::tools::add_inspect_command(app);
  CLI11_PARSE(app, argc, argv);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const gyre::Error& error) {
    std::fprintf(stderr, "gyre: %s (%s)\n", error.what(), gyre::name(error.code()).data());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gyre: %s\n", error.what());
  }
  return 1;
}
