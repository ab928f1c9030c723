// The header of a snapshot, written and read. What is read may be anything: every number is
// compared with what it must be before it is used, and no size of the file decides how much memory
// is taken.
#include <algorithm>
#include <string_view>

#include "cache/kv_cache_state.h"
#include "cache/snapshot.h"

namespace gyre {
namespace {

constexpr FileKind kind_of(uint32_t version) {
  return {"GYREKV", version, "a snapshot", kSnapshotUniformVersion};
}
constexpr size_t kNameBytes = 16;

struct Counts {
  uint32_t layers = 0;
  uint32_t sections = 0;
};

// The name of a format in files. mlx_native4 is compat4 there, the name it had when files were
// first written.
std::string snapshot_format_name(const KvFormatInfo& info) {
  constexpr std::string_view kPrefix = "mlx_native", kOnDisk = "compat";
  if (!info.name.starts_with(kPrefix)) return std::string(info.name);
  return std::string(kOnDisk) + std::string(info.name.substr(kPrefix.size()));
}

void put_format(FieldWriter& out, KvFormat format) {
  const KvFormatInfo info = describe(format);
  out.text(snapshot_format_name(info), kNameBytes);
  for (const uint32_t field : snapshot_format_fields(info)) out.put(field);
}

// Before memory is taken for the rest of the header.
void check_counts(const Source& source, const KvSnapshotInfo& info, const Counts& counts) {
  check_file(info.file_bytes == source.size(), source.where(), "has ", source.size(),
             " bytes, its header says ", info.file_bytes);
  check_file(counts.layers != 0 && counts.layers <= kKvMaxLayers, source.where(), "from 1 to ",
             kKvMaxLayers, " layers, the header says ", counts.layers);
  const uint64_t limit = kSnapshotMaxSectionsPerLayer * counts.layers;
  check_file(counts.sections <= limit, source.where(), counts.layers, " layers have at most ",
             limit, " sections, the header says ", counts.sections);
  const uint64_t bytes = kSnapshotFixedBytes + counts.layers * snapshot_layer_bytes(info.version) +
                         counts.sections * kSnapshotSectionBytes + kSealBytes;
  check_file(info.header_bytes == bytes, source.where(), "a header of ", counts.layers,
             " layers and ", counts.sections, " sections has ", bytes, " bytes, this one says ",
             info.header_bytes);
  check_file(bytes <= source.size(), source.where(), "has ", source.size(),
             " bytes, its header alone has ", bytes);
}

KvFormat read_format(FieldReader& in, const char* what, size_t layer) {
  constexpr const char* kNames[] = {"number",     "bits",        "compressed",  "packing",
                                    "scale kind", "scale block", "tile tokens", "signs version"};
  const std::string name = in.text(kNameBytes);
  std::array<uint32_t, 8> fields{};
  for (uint32_t& field : fields) in.get(field);
  for (const KvFormat format : kv_formats()) {
    const KvFormatInfo known = describe(format);
    if (snapshot_format_name(known) != name) continue;
    const std::array<uint32_t, 8> expected = snapshot_format_fields(known);
    for (size_t i = 0; i < fields.size(); ++i) {
      check_file(fields[i] == expected[i], in.where(), what, " of layer ", layer, ": the ",
                 kNames[i], " of ", known.name, " is ", expected[i], ", the header says ",
                 fields[i]);
    }
    return format;
  }
  fail(ErrorCode::io, in.where(), ": ", what, " of layer ", layer,
       " has a format this library does not know, \"", name.c_str(), "\", number ", fields[0]);
}

void read_layer(FieldReader& in, KvSnapshotInfo& info) {
  KvLayer layer;
  KvSnapshotSlots slots;
  layer.k = read_format(in, "K", info.slots.size());
  layer.v = read_format(in, "V", info.slots.size());
  in.get(layer.window, layer.tail, layer.sink_tokens, slots.body, slots.tail);
  if (info.version != kSnapshotUniformVersion) {
    uint64_t owner = 0;
    in.get(layer.kv_heads, layer.head_dim, layer.v_head_dim, owner);
    layer.latent = (owner & kLatentBit) != 0;
    owner &= ~kLatentBit;
    if (owner != info.slots.size()) layer.kv_shared_layer_index = owner;
  }
  info.options.layers.push_back(layer);
  info.slots.push_back(slots);
}

// checked_cache_layers() has seen that a layer is possible; here, whether its slots are.
void check_slots(const KvSnapshotInfo& info, size_t index) {
  const KvLayer& layer = info.options.layers[index];
  const KvSnapshotSlots& slots = info.slots[index];
  const uint64_t capacity = info.options.capacity;
  if (shares_kv(layer)) {
    require(slots.body == 0 && slots.tail == 0, "layer ", index, " shares a cache, it has ",
            slots.body, " and ", slots.tail, " slots of its own");
    return;
  }
  if (layer.window == 0) {
    require(slots.body == capacity - layer.sink_tokens, "layer ", index, " has ", slots.body,
            " slots, it must have ", capacity - layer.sink_tokens);
  } else {
    require(slots.body >= std::min(layer.window, capacity) && slots.body <= capacity, "layer ",
            index, " has ", slots.body, " slots for a window of ", layer.window,
            " in a capacity of ", capacity);
  }
  const uint64_t tail_slots = cache_tail_slots(info.options, layer.tail);
  require(slots.tail == tail_slots, "layer ", index, " has a tail of ", layer.tail, " tokens in ",
          slots.tail, " slots, it must have ", tail_slots);
}

void check_sequence(const KvSnapshotInfo& info, uint64_t tail_tokens) {
  require(info.length <= info.peak && info.peak <= info.options.capacity, "length ", info.length,
          ", peak ", info.peak, " and capacity ", info.options.capacity, " must not decrease");
  const uint64_t slots = cache_tail_slots(info.options, tail_tokens);
  require(info.tail_begin <= info.length && info.length - info.tail_begin <= slots,
          "the tail's ring of ", slots, " slots holds keys from ", info.tail_begin, " to ",
          info.length);
}

void check_row(const std::string& where, size_t index, const KvSnapshotSection& row,
               const KvSnapshotSection& must) {
  const auto same = [&](const char* what, auto is, auto expected) {
    check_file(is == expected, where, "section ", index, " (", section_text(must), "): its ", what,
               " must be ", static_cast<uint64_t>(expected), ", the header says ",
               static_cast<uint64_t>(is));
  };
  same("layer", row.layer, must.layer);
  same("segment", row.segment, must.segment);
  same("role", row.role, must.role);
  same("part", row.part, must.part);
  same("format", row.format, must.format);
  same("slots", row.slots, must.slots);
  same("offset", row.offset, must.offset);
  same("size", row.bytes, must.bytes);
}

void read_sections(FieldReader& in, KvSnapshotInfo& info) {
  for (size_t i = 0; i < info.sections.size(); ++i) {
    KvSnapshotSection row;
    uint32_t layer = 0;
    in.get(layer, row.segment, row.role, row.part, row.format);
    in.get(row.slots, row.offset, row.bytes, row.checksum);
    row.layer = layer;
    check_row(in.where(), i, row, info.sections[i]);
    info.sections[i].checksum = row.checksum;
  }
}

// Fills in what version 3 leaves out. Version 4 leaves out nothing, and is for layers that differ.
void resolve_options(KvSnapshotInfo& info) {
  KvCacheOptions& options = info.options;
  std::vector<KvLayer> layers = checked_cache_layers(options);
  require(info.version == snapshot_version(layers), "its layers are written as version ",
          snapshot_version(layers));
  const LayerShape common = common_shape(layers);
  require((info.version == kSnapshotUniformVersion || layers == options.layers) &&
              common == LayerShape{options.kv_heads, options.head_dim, options.v_head_dim},
          "kv_heads, head_dim and v_head_dim are not those of the layers");
  options.layers = std::move(layers);
}

// What the layers and the sequence imply, compared with what the header says.
void plan_from_header(const Source& source, KvSnapshotInfo& info, const Counts& counts) {
  const KvSnapshotInfo said = info;
  try {
    resolve_options(info);
    for (size_t i = 0; i < info.slots.size(); ++i) check_slots(info, i);
    check_sequence(info, cache_tail_tokens(info.options.layers));
    plan_snapshot(info, source.size());
  } catch (const Error& error) {
    fail(ErrorCode::io, source.where(), ": the header contradicts itself: ", error.what());
  }
  check_file(info.sections.size() == counts.sections, source.where(), "must have ",
             info.sections.size(), " sections, the header says ", counts.sections);
  check_file(info.file_bytes == said.file_bytes, source.where(), "must have ", info.file_bytes,
             " bytes, the header says ", said.file_bytes);
}

void check_zeros(const Source& source, uint64_t begin, uint64_t end) {
  std::array<std::byte, kSnapshotAlign> bytes{};
  const std::span<std::byte> gap = std::span(bytes).first(end - begin);
  source.read(begin, gap);
  check_file(std::ranges::all_of(gap, [](std::byte b) { return b == std::byte{0}; }),
             source.where(), "bytes ", begin, " to ", end - 1,
             " lie between sections and must be 0");
}

}  // namespace

std::array<uint32_t, 8> snapshot_format_fields(const KvFormatInfo& info) {
  return {static_cast<uint32_t>(info.format),
          info.bits,
          info.compressed ? 1u : 0u,
          static_cast<uint32_t>(info.packing),
          static_cast<uint32_t>(info.scale),
          info.scale_block,
          info.tile_tokens,
          info.signs_version};
}

std::vector<std::byte> snapshot_header(const KvSnapshotInfo& info) {
  const KvCacheOptions& options = info.options;
  FieldWriter out(kind_of(info.version));
  out.put(static_cast<uint32_t>(info.sections.size()), info.header_bytes, info.file_bytes);
  out.put(options.kv_heads, options.head_dim, options.v_head_dim, options.capacity,
          options.step_tokens, info.length, info.tail_begin, info.peak);
  out.put(static_cast<uint32_t>(options.layers.size()), info.calibration);
  for (size_t i = 0; i < options.layers.size(); ++i) {
    const KvLayer& layer = options.layers[i];
    put_format(out, layer.k);
    put_format(out, layer.v);
    out.put(layer.window, layer.tail, layer.sink_tokens, info.slots[i].body, info.slots[i].tail);
    if (info.version != kSnapshotUniformVersion)
      out.put(layer.kv_heads, layer.head_dim, layer.v_head_dim, owner_field(options.layers, i));
  }
  for (const KvSnapshotSection& row : info.sections) {
    out.put(static_cast<uint32_t>(row.layer), row.segment, row.role, row.part, row.format);
    out.put(row.slots, row.offset, row.bytes, row.checksum);
  }
  return out.seal();
}

KvSnapshotInfo read_snapshot_header(const Source& source) {
  check_file(source.size() >= kSnapshotFixedBytes, source.where(), "has ", source.size(),
             " bytes, a snapshot begins with ", kSnapshotFixedBytes);
  KvSnapshotInfo info;
  info.options.layers.clear();
  Counts counts;
  std::vector<std::byte> bytes = source.read(0, kSnapshotFixedBytes);
  FieldReader first(source.where(), bytes);
  info.version = first.check_kind(kind_of(kKvSnapshotVersion));
  KvCacheOptions& options = info.options;
  first.get(counts.sections, info.header_bytes, info.file_bytes);
  first.get(options.kv_heads, options.head_dim, options.v_head_dim, options.capacity,
            options.step_tokens, info.length, info.tail_begin, info.peak);
  first.get(counts.layers, info.calibration);
  check_counts(source, info, counts);
  bytes.resize(info.header_bytes);
  source.read(kSnapshotFixedBytes, std::span(bytes).subspan(kSnapshotFixedBytes));
  check_seal(source.where(), "the header", bytes);
  FieldReader in(source.where(), std::span(bytes).subspan(kSnapshotFixedBytes));
  for (uint32_t i = 0; i < counts.layers; ++i) read_layer(in, info);
  plan_from_header(source, info, counts);
  read_sections(in, info);
  return info;
}

void check_section(const Source& source, const KvSnapshotInfo& info, size_t index,
                   uint64_t checksum) {
  const KvSnapshotSection& section = info.sections[index];
  check_checksum(source.where(), join("section ", index, " (", section_text(section), ")"),
                 checksum, section.checksum);
}

void verify_snapshot(const Source& source, const KvSnapshotInfo& info) {
  uint64_t end = info.header_bytes;
  for (size_t i = 0; i < info.sections.size(); ++i) {
    const KvSnapshotSection& section = info.sections[i];
    check_zeros(source, end, section.offset);
    end = section.offset + section.bytes;
    check_section(source, info, i, source.checksum(section.offset, end));
  }
}

}  // namespace gyre
