#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "gyre/snapshot.h"
#include "table.h"

namespace gyre::tools {
namespace {

struct InspectArguments {
  std::string path;
  bool json = false;
};

nlohmann::ordered_json to_json(const KvSnapshotInfo& info, uint64_t index) {
  const KvLayer& layer = info.options.layers[index];
  nlohmann::ordered_json json = {{"k", name(layer.k)},
                                 {"v", name(layer.v)},
                                 {"window", layer.window},
                                 {"tail", layer.tail},
                                 {"sink_tokens", layer.sink_tokens},
                                 {"kv_heads", layer.kv_heads},
                                 {"head_dim", layer.head_dim},
                                 {"v_head_dim", layer.v_head_dim},
                                 {"slots", info.slots[index].body},
                                 {"tail_slots", info.slots[index].tail}};
  if (layer.kv_shared_layer_index) json["kv_shared_layer_index"] = *layer.kv_shared_layer_index;
  return json;
}

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
  return text;
}

nlohmann::ordered_json to_json(const KvSnapshotSection& section) {
  return {{"layer", section.layer},           {"segment", name(section.segment)},
          {"role", name(section.role)},       {"part", name(section.part)},
          {"format", name(section.format)},   {"slots", section.slots},
          {"offset", section.offset},         {"bytes", section.bytes},
          {"checksum", hex(section.checksum)}};
}

void print_json(const KvSnapshotInfo& info) {
  const KvCacheOptions& options = info.options;
  nlohmann::ordered_json json;
  json["version"] = info.version;
  json["file_bytes"] = info.file_bytes;
  json["kv_heads"] = options.kv_heads;
  json["head_dim"] = options.head_dim;
  json["v_head_dim"] = options.v_head_dim;
  json["capacity"] = options.capacity;
  json["step_tokens"] = options.step_tokens;
  json["length"] = info.length;
  json["tail_begin"] = info.tail_begin;
  json["peak"] = info.peak;
  json["calibration"] = info.calibration;
  json["layers"] = nlohmann::ordered_json::array();
  for (uint64_t i = 0; i < options.layers.size(); ++i) json["layers"].push_back(to_json(info, i));
  json["sections"] = nlohmann::ordered_json::array();
  for (const KvSnapshotSection& section : info.sections)
    json["sections"].push_back(to_json(section));
  std::cout << json.dump() << '\n';
}

// A row per segment: its K and V have the same slots.
struct SegmentRow {
  KvSnapshotSection first;
  KvFormat v = KvFormat::f16;
  uint64_t bytes = 0;
};

std::vector<SegmentRow> segment_rows(const KvSnapshotInfo& info) {
  std::vector<SegmentRow> rows;
  for (const KvSnapshotSection& section : info.sections) {
    if (rows.empty() || rows.back().first.layer != section.layer ||
        rows.back().first.segment != section.segment) {
      rows.push_back({section});
    }
    rows.back().bytes += section.bytes;
    if (section.role == KvRole::v) rows.back().v = section.format;
  }
  return rows;
}

uint64_t slots_of(const KvSnapshotInfo& info, const KvSnapshotSection& section) {
  switch (section.segment) {
    case KvSegmentKind::sink_tokens:
      return info.options.layers[section.layer].sink_tokens;
    case KvSegmentKind::tail:
      return info.slots[section.layer].tail;
    default:
      return info.slots[section.layer].body;
  }
}

// "8 x 128", or "8 x 192/128" where V's rows are of another size.
std::string heads_text(const KvLayer& layer) {
  const std::string v =
      layer.v_head_dim != layer.head_dim ? "/" + std::to_string(layer.v_head_dim) : "";
  return std::to_string(layer.kv_heads) + " x " + std::to_string(layer.head_dim) + v;
}

void print_text(const KvSnapshotInfo& info) {
  const KvCacheOptions& options = info.options;
  std::vector<std::vector<std::string>> cells;
  uint64_t sum = 0;
  for (const SegmentRow& row : segment_rows(info)) {
    const uint64_t window = options.layers[row.first.layer].window;
    const bool ring = row.first.segment == KvSegmentKind::body && window != 0;
    cells.push_back(
        {std::to_string(row.first.layer),
         std::string(name(row.first.segment)) + (ring ? ", window " + std::to_string(window) : ""),
         heads_text(options.layers[row.first.layer]), std::string(name(row.first.format)),
         std::string(name(row.v)), std::to_string(slots_of(info, row.first)),
         std::to_string(row.first.slots), human_bytes(row.bytes)});
    sum += row.bytes;
  }
  print_table(std::cout,
              {{"layer", Align::right},
               {"part"},
               {"KV heads"},
               {"K"},
               {"V"},
               {"slots", Align::right},
               {"stored", Align::right},
               {"size", Align::right}},
              cells);
  std::cout << "\nversion " << info.version << ", " << options.layers.size() << " layers";
  const auto shares = [](const KvLayer& layer) { return layer.kv_shared_layer_index.has_value(); };
  if (const auto count = std::ranges::count_if(options.layers, shares); count != 0)
    std::cout << " (" << count << " without a cache of their own)";
  std::cout << ", capacity " << options.capacity << "\nlength " << info.length << ", tail from "
            << info.tail_begin << ", peak " << info.peak << ", "
            << (info.calibration != 0 ? "calibration " + std::to_string(info.calibration)
                                      : "no calibration")
            << "\n"
            << info.sections.size() << " sections with " << human_bytes(sum) << " in a file of "
            << human_bytes(info.file_bytes) << ", every checksum right\n";
}

}  // namespace

void add_inspect_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("inspect",
                         "Show what a snapshot of a KV cache holds, and check every byte of it.\n"
                         "The exit status is 1 if anything is wrong with the file.\n\n"
                         "Examples:\n"
                         "  gyre inspect cache.gyrekv\n"
                         "  gyre inspect cache.gyrekv --json | jq .length");
  const auto arguments = std::make_shared<InspectArguments>();
  command->add_option("file", arguments->path, "A file that KvCache::save() wrote")->required();
  command->add_flag("--json", arguments->json, "One JSON object instead of a table");
  command->callback([arguments] {
    verify_snapshot(arguments->path);
    const KvSnapshotInfo info = inspect_snapshot(arguments->path);
    arguments->json ? print_json(info) : print_text(info);
  });
}

}  // namespace gyre::tools
