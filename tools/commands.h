#pragma once

#include <CLI/CLI.hpp>

namespace gyre::tools {

// Each adds its subcommand, with help and examples, to `app`.
void add_devices_command(CLI::App& app);
void add_kernels_command(CLI::App& app);
void add_bench_command(CLI::App& app);
void add_inspect_command(CLI::App& app);

}  // namespace gyre::tools
