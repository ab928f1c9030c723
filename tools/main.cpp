#include <exception>
#include <iostream>

#include "commands.h"
#include "gyre/error.h"

int main(int argc, char** argv) {
  CLI::App app(
      "Gyre: the KV path of LLM inference.\n"
      "Start with `gyre devices` (what this machine offers), then `gyre bench` (how fast it is).",
      "gyre");
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Help for every command");
  gyre::tools::add_devices_command(app);
  gyre::tools::add_kernels_command(app);
  gyre::tools::add_bench_command(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const gyre::Error& error) {
    std::cerr << "gyre: " << error.what() << " (" << gyre::name(error.code()) << ")\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "gyre: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
