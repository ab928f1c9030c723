// Which sections a snapshot has and where they lie: follows from geometry and sequence alone, so
// that a reader can compare every number of a file with what it must be.
#include <algorithm>

#include "abi/kv_codec.h"
#include "abi/kv_state.h"
#include "cache/layers.h"
#include "cache/snapshot.h"
#include "runtime/require.h"

namespace gyre {
namespace {

static_assert(static_cast<uint32_t>(KvSegmentKind::body) == abi::kSegmentBody &&
              static_cast<uint32_t>(KvSegmentKind::sink_tokens) == abi::kSegmentSinks &&
              static_cast<uint32_t>(KvSegmentKind::tail) == abi::kSegmentTail);

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Slots from 0 on that hold all keys of a segment. A ring that has wrapped is stored as a whole.
uint64_t slots_in_use(const KvSnapshotInfo& info, uint64_t layer, KvSegmentKind kind) {
  const KvLayer& l = info.options.layers[layer];
  const KvSnapshotSlots& slots = info.slots[layer];
  const abi::KvPlaces places{l.sink_tokens, l.tail, slots.tail, slots.body};
  const abi::KvState state{info.length, info.length, info.tail_begin};
  const abi::KvKeys keys = abi::kv_segment_keys(static_cast<abi::KvSegment>(kind), places, state);
  switch (kind) {
    case KvSegmentKind::sink_tokens:
      return keys.end;
    case KvSegmentKind::tail:
      return std::min(keys.end, slots.tail);
    default:
      if (l.window != 0 && info.peak > slots.body) return slots.body;
      return keys.end - keys.begin;
  }
}

uint64_t bytes_of(const Dims& shape, uint64_t unit) {
  uint64_t bytes = unit;
  for (const uint64_t dim : shape) bytes *= dim;
  return bytes;
}

struct Segment {
  uint64_t layer;
  KvSegmentKind kind;
  KvRole role;
  KvFormat format;
  uint64_t slots;  // it has
};

// Appends the codes and, for compressed formats, the scales.
void plan_segment(KvSnapshotInfo& info, const Segment& s, uint64_t max_bytes) {
  const KvFormatInfo format = describe(s.format);
  const bool k = s.role == KvRole::k;
  const uint64_t used = round_up(slots_in_use(info, s.layer, s.kind), abi::kKvTile);
  const KvLayer& layer = info.options.layers[s.layer];
  const KvShape stored{s.format, s.role, layer.kv_heads, std::min(used, s.slots),
                       k ? layer.head_dim : layer.v_head_dim};
  const uint64_t unit = format.compressed ? 1 : format.bits / 8;
  const auto add = [&](KvPart part, uint64_t bytes) {
    const uint64_t offset = round_up(info.file_bytes, kSnapshotAlign);
    require(offset <= max_bytes && bytes <= max_bytes - offset, "the sections need more than ",
            max_bytes, " bytes");
    info.sections.push_back(
        {s.layer, s.kind, s.role, part, s.format, stored.capacity, offset, bytes, 0});
    info.file_bytes = offset + bytes;
  };
  add(KvPart::codes, bytes_of(kv_codes_shape(stored), unit));
  if (!format.compressed) return;
  const uint64_t scale_unit = format.scale == KvScaleKind::f32_norm ? sizeof(float) : 1;
  add(KvPart::scales, bytes_of(kv_scales_shape(stored), scale_unit));
}

uint64_t count_sections(const KvCacheOptions& options) {
  uint64_t count = 0;
  for (const KvLayer& layer : options.layers) {
    if (shares_kv(layer)) continue;
    count += describe(layer.k).compressed ? 2 : 1;
    count += describe(layer.v).compressed ? 2 : 1;
    count += (layer.sink_tokens != 0 ? 2 : 0) + (layer.tail != 0 ? 2 : 0);
  }
  return count;
}

}  // namespace

std::string_view name(KvSegmentKind kind) {
  constexpr std::string_view kNames[] = {"body", "sink_tokens", "tail"};
  const auto index = static_cast<size_t>(kind);
  return index < std::size(kNames) ? kNames[index] : "invalid";
}
std::string_view name(KvRole role) { return role == KvRole::k ? "K" : "V"; }
std::string_view name(KvPart part) { return part == KvPart::codes ? "codes" : "scales"; }

std::string section_text(const KvSnapshotSection& section) {
  return join("layer ", section.layer, " ", name(section.segment), " ", name(section.role), " ",
              name(section.part));
}

uint32_t snapshot_version(std::span<const KvLayer> layers) {
  const bool uniform = shape_of(layers[0]) == common_shape(layers);
  const bool any_flag = std::ranges::any_of(
      layers, [](const KvLayer& layer) { return shares_kv(layer) || layer.latent; });
  return uniform && !any_flag ? kSnapshotUniformVersion : kKvSnapshotVersion;
}

void plan_snapshot(KvSnapshotInfo& info, uint64_t max_bytes) {
  const std::vector<KvLayer>& layers = info.options.layers;
  info.sections.clear();
  info.header_bytes = kSnapshotFixedBytes + layers.size() * snapshot_layer_bytes(info.version) +
                      count_sections(info.options) * kSnapshotSectionBytes + kSealBytes;
  info.file_bytes = info.header_bytes;
  for (uint64_t i = 0; i < layers.size(); ++i) {
    if (shares_kv(layers[i])) continue;
    const auto add = [&](KvSegmentKind kind, KvFormat k, KvFormat v, uint64_t slots) {
      plan_segment(info, {i, kind, KvRole::k, k, slots}, max_bytes);
      plan_segment(info, {i, kind, KvRole::v, v, slots}, max_bytes);
    };
    add(KvSegmentKind::body, layers[i].k, layers[i].v, info.slots[i].body);
    constexpr KvFormat kKept = KvFormat::f16;
    if (layers[i].sink_tokens != 0)
      add(KvSegmentKind::sink_tokens, kKept, kKept, layers[i].sink_tokens);
    if (layers[i].tail != 0) add(KvSegmentKind::tail, kKept, kKept, info.slots[i].tail);
  }
}

}  // namespace gyre
