#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "gyre/gyre.h"
#include "options.h"
#include "table.h"

namespace gyre::tools {
namespace {

void print_json(const DeviceInfo& info) {
  nlohmann::ordered_json json;
  json["name"] = info.name;
  json["available"] = info.available;
  if (info.available) {
    json["description"] = info.description;
    json["compute_units"] = info.compute_units;
    json["memory_bytes"] = info.memory_bytes;
  } else {
    json["reason"] = info.reason;
  }
  std::cout << json.dump() << '\n';
}

void list_devices(bool json) {
  if (json) {
    for (const DeviceInfo& info : devices()) print_json(info);
    return;
  }
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
      "The first column is what Device::open and --device take.\n\n"
      "Examples:\n"
      "  gyre devices\n"
      "  gyre devices --json | jq 'select(.available).name'");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "One JSON object per line instead of a table");
  command->callback([json] { list_devices(*json); });
}

void add_kernels_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "kernels",
      "List the kernels a device runs: how many variants (dtype and format combinations),\n"
      "the size of the parameters, and the arguments with how they are accessed.");
  const auto device = std::make_shared<std::string>("cpu");
  add_device(*command, *device);
  command->callback([device] { list_kernels(*device); });
}

}  // namespace gyre::tools
