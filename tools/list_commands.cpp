#include <iostream>
#include <memory>

#include "commands.h"
#include "gyre/gyre.h"
#include "table.h"

namespace gyre::tools {
namespace {

void list_devices() {
  std::vector<std::vector<std::string>> rows;
  for (const DeviceInfo& info : devices()) {
    rows.push_back({info.name, info.available ? "yes" : "no",
                    info.available ? std::to_string(info.compute_units) : "-",
                    info.available ? human_bytes(info.memory_bytes) : "-",
                    info.available ? info.description : info.reason});
  }
  print_table(
      std::cout,
      {{"device"}, {"available"}, {"units", Align::right}, {"memory", Align::right}, {"what"}},
      rows);
}

void list_kernels(const std::string& device_name) {
  const Device device = Device::open(device_name);
  std::vector<std::vector<std::string>> rows;
  for (const KernelDescription& kernel : device.kernels()) {
    rows.push_back({kernel.name, std::to_string(kernel.variants),
                    std::to_string(kernel.params_bytes), kernel.args});
  }
  print_table(
      std::cout,
      {{"kernel"}, {"variants", Align::right}, {"params bytes", Align::right}, {"arguments"}},
      rows);
}

}  // namespace

void add_devices_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "devices",
      "List every backend: its devices and their properties, or why it has none here.\n"
      "The first column is what Device::open and --device take.");
  command->callback(list_devices);
}

void add_kernels_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "kernels",
      "List the kernels a device runs: how many variants (dtype and format combinations),\n"
      "the size of the parameters, and the arguments with how they are accessed.");
  const auto device = std::make_shared<std::string>("cpu");
  command->add_option("--device", *device, "Device to ask, as `gyre devices` names it")
      ->capture_default_str();
  command->callback([device] { list_kernels(*device); });
}

}  // namespace gyre::tools
