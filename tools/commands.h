#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace gyre::tools {

// Each adds its subcommand, with help and examples, to `app`.
void add_devices_command(CLI::App& app);
void add_kernels_command(CLI::App& app);
void add_bench_command(CLI::App& app);
// `command_line` is what reports say they were made with.
void add_compare_command(CLI::App& app, const std::string& command_line);
// What one pool of pages serves.
void add_simulate_command(CLI::App& app, const std::string& command_line);
void add_inspect_command(CLI::App& app);
void add_prepare_command(CLI::App& app);

}  // namespace gyre::tools
