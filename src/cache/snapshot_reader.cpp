// Reads a snapshot that may be anything: every number is compared with what it must be before it
// is used, and no size of the file decides how much memory is taken.
#include <algorithm>
#include <cstring>
#include <iomanip>

#include "cache/kv_cache_state.h"
#include "cache/snapshot.h"
#include "cache/snapshot_fields.h"
#include "runtime/require.h"

namespace gyre {
namespace {

template <class... Parts>
[[noreturn]] void damaged(const SnapshotSource& source, const Parts&... parts) {
  fail(ErrorCode::io, source.where(), ": ", parts...);
}

template <class... Parts>
void demand(bool holds, const SnapshotSource& source, const Parts&... parts) {
  if (!holds) damaged(source, parts...);
}

std::string hex(uint64_t value) { return join(std::hex, std::setw(16), std::setfill('0'), value); }

class Fields {
 public:
  Fields(const SnapshotSource& source, std::span<const std::byte> bytes)
      : source_(source), bytes_(bytes) {}

  uint8_t u8() { return static_cast<uint8_t>(take(1)[0]); }
  uint32_t u32() { return static_cast<uint32_t>(number(4)); }
  uint64_t u64() { return number(8); }
  std::string text(size_t width) {
    const std::span<const std::byte> raw = take(width);
    return {reinterpret_cast<const char*>(raw.data()), raw.size()};
  }
  const SnapshotSource& source() const { return source_; }

 private:
  std::span<const std::byte> take(size_t count) {
    demand(count <= bytes_.size() - at_, source_, "the header ends in the middle of a field");
    at_ += count;
    return bytes_.subspan(at_ - count, count);
  }
  uint64_t number(size_t count) {
    uint64_t value = 0;
    const std::span<const std::byte> raw = take(count);
    for (size_t i = 0; i < count; ++i) value |= static_cast<uint64_t>(raw[i]) << (8 * i);
    return value;
  }

  const SnapshotSource& source_;
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
};

std::string padded(std::string_view text, size_t width) {
  std::string wide(text);
  wide.resize(width, '\0');
  return wide;
}

struct Counts {
  uint32_t layers = 0;
  uint32_t sections = 0;
};

// The fixed part. Only magic and version have the same place in every version.
Counts read_fixed(Fields in, KvSnapshotInfo& info) {
  const SnapshotSource& source = in.source();
  demand(in.text(kSnapshotMagicBytes) == padded(kSnapshotMagic, kSnapshotMagicBytes), source,
         "does not begin with ", kSnapshotMagic, ", it is not a snapshot");
  info.version = in.u32();
  demand(info.version == kKvSnapshotVersion, source, "is a snapshot of version ", info.version,
         ", this library reads version ", kKvSnapshotVersion);
  Counts counts;
  counts.sections = in.u32();
  KvCacheOptions& options = info.options;
  for (uint64_t* const field : {&info.header_bytes, &info.file_bytes, &options.kv_heads,
                                &options.head_dim, &options.v_head_dim, &options.capacity,
                                &options.step_tokens, &info.length, &info.tail_begin, &info.peak}) {
    *field = in.u64();
  }
  counts.layers = in.u32();
  info.coding = in.u32();
  return counts;
}

// Before memory is taken for the rest of the header.
void check_counts(const SnapshotSource& source, const KvSnapshotInfo& info, const Counts& counts) {
  demand(info.file_bytes == source.size(), source, "has ", source.size(),
         " bytes, its header says ", info.file_bytes);
  demand(counts.layers != 0 && counts.layers <= kKvMostLayers, source, "from 1 to ", kKvMostLayers,
         " layers, the header says ", counts.layers);
  const uint64_t most = kSnapshotMostSectionsPerLayer * counts.layers;
  demand(counts.sections <= most, source, counts.layers, " layers have at most ", most,
         " sections, the header says ", counts.sections);
  const uint64_t bytes = kSnapshotFixedBytes + counts.layers * kSnapshotLayerBytes +
                         counts.sections * kSnapshotSectionBytes + sizeof(uint64_t);
  demand(info.header_bytes == bytes, source, "a header of ", counts.layers, " layers and ",
         counts.sections, " sections has ", bytes, " bytes, this one says ", info.header_bytes);
  demand(bytes <= source.size(), source, "has ", source.size(), " bytes, its header alone has ",
         bytes);
}

KvFormat read_format(Fields& in, const char* what, size_t layer) {
  constexpr const char* kNames[] = {"number",     "bits",        "compressed",  "packing",
                                    "scale kind", "scale block", "tile tokens", "signs version"};
  const std::string name = in.text(kSnapshotNameBytes);
  std::array<uint32_t, 8> fields{};
  for (uint32_t& field : fields) field = in.u32();
  for (const KvFormat format : kv_formats()) {
    const KvFormatInfo known = describe(format);
    if (padded(known.name, kSnapshotNameBytes) != name) continue;
    const std::array<uint32_t, 8> expected = snapshot_format_fields(known);
    for (size_t i = 0; i < fields.size(); ++i) {
      demand(fields[i] == expected[i], in.source(), what, " of layer ", layer, ": the ", kNames[i],
             " of ", known.name, " is ", expected[i], ", the header says ", fields[i]);
    }
    return format;
  }
  damaged(in.source(), what, " of layer ", layer, " has a format this library does not know, \"",
          name.substr(0, name.find('\0')), "\", number ", fields[0]);
}

void read_layer(Fields& in, KvSnapshotInfo& info) {
  KvLayer layer;
  KvSnapshotSlots slots;
  layer.k = read_format(in, "K", info.slots.size());
  layer.v = read_format(in, "V", info.slots.size());
  for (uint64_t* const field :
       {&layer.window, &layer.tail, &layer.sinks, &slots.body, &slots.tail}) {
    *field = in.u64();
  }
  info.options.layers.push_back(layer);
  info.slots.push_back(slots);
}

// check_cache_options() has seen that a layer is possible; here, whether its slots are.
void check_slots(const KvSnapshotInfo& info, size_t index) {
  const KvLayer& layer = info.options.layers[index];
  const KvSnapshotSlots& slots = info.slots[index];
  const uint64_t capacity = info.options.capacity;
  if (layer.window == 0) {
    require(slots.body == capacity - layer.sinks, "layer ", index, " has ", slots.body,
            " slots, it must have ", capacity - layer.sinks);
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

void check_row(const SnapshotSource& source, size_t index, const KvSnapshotSection& row,
               const KvSnapshotSection& must) {
  const auto same = [&](const char* what, uint64_t is, uint64_t expected) {
    demand(is == expected, source, "section ", index, " (", section_text(must), "): its ", what,
           " must be ", expected, ", the header says ", is);
  };
  same("layer", row.layer, must.layer);
  same("segment", static_cast<uint64_t>(row.segment), static_cast<uint64_t>(must.segment));
  same("role", static_cast<uint64_t>(row.role), static_cast<uint64_t>(must.role));
  same("part", static_cast<uint64_t>(row.part), static_cast<uint64_t>(must.part));
  same("format", static_cast<uint64_t>(row.format), static_cast<uint64_t>(must.format));
  same("slots", row.slots, must.slots);
  same("offset", row.offset, must.offset);
  same("size", row.bytes, must.bytes);
}

void read_sections(Fields& in, KvSnapshotInfo& info) {
  for (size_t i = 0; i < info.sections.size(); ++i) {
    KvSnapshotSection row;
    row.layer = in.u32();
    row.segment = static_cast<KvSegmentKind>(in.u8());
    row.role = static_cast<KvRole>(in.u8());
    row.part = static_cast<KvPart>(in.u8());
    row.format = static_cast<KvFormat>(in.u8());
    for (uint64_t* const field : {&row.slots, &row.offset, &row.bytes, &row.checksum}) {
      *field = in.u64();
    }
    check_row(in.source(), i, row, info.sections[i]);
    info.sections[i].checksum = row.checksum;
  }
}

// What the layers and the sequence imply, compared with what the header says.
void plan_from_header(const SnapshotSource& source, KvSnapshotInfo& info, const Counts& counts) {
  const KvSnapshotInfo said = info;
  try {
    const uint64_t tail_tokens = check_cache_options(info.options);
    for (size_t i = 0; i < info.slots.size(); ++i) check_slots(info, i);
    check_sequence(info, tail_tokens);
    plan_snapshot(info, source.size());
  } catch (const Error& error) {
    damaged(source, "the header contradicts itself: ", error.what());
  }
  demand(info.sections.size() == counts.sections, source, "must have ", info.sections.size(),
         " sections, the header says ", counts.sections);
  demand(info.file_bytes == said.file_bytes, source, "must have ", info.file_bytes,
         " bytes, the header says ", said.file_bytes);
}

void check_zeros(const SnapshotSource& source, uint64_t begin, uint64_t end) {
  std::array<std::byte, kSnapshotAlign> bytes{};
  const std::span<std::byte> gap = std::span(bytes).first(end - begin);
  source.read(begin, gap);
  demand(std::ranges::all_of(gap, [](std::byte b) { return b == std::byte{0}; }), source, "bytes ",
         begin, " to ", end - 1, " lie between sections and must be 0");
}

}  // namespace

void BytesSource::read(uint64_t offset, std::span<std::byte> to) const {
  demand(offset <= bytes_.size() && to.size() <= bytes_.size() - offset, *this, "has ",
         bytes_.size(), " bytes, asked for ", to.size(), " from ", offset);
  if (!to.empty()) std::memcpy(to.data(), bytes_.data() + offset, to.size());
}

KvSnapshotInfo read_snapshot_header(const SnapshotSource& source) {
  demand(source.size() >= kSnapshotFixedBytes, source, "has ", source.size(),
         " bytes, a snapshot begins with ", kSnapshotFixedBytes);
  std::vector<std::byte> bytes(kSnapshotFixedBytes);
  source.read(0, bytes);
  KvSnapshotInfo info;
  info.options.layers.clear();
  const Counts counts = read_fixed({source, bytes}, info);
  check_counts(source, info, counts);
  bytes.resize(info.header_bytes);
  source.read(kSnapshotFixedBytes, std::span(bytes).subspan(kSnapshotFixedBytes));
  const uint64_t covered = bytes.size() - sizeof(uint64_t);
  const uint64_t is = checksum_of(std::span(bytes).first(covered));
  const uint64_t expected = Fields(source, std::span(bytes).subspan(covered)).u64();
  demand(is == expected, source, "the header's checksum is ", hex(is), ", expected ",
         hex(expected));
  Fields in(source, std::span(bytes).first(covered).subspan(kSnapshotFixedBytes));
  for (uint32_t i = 0; i < counts.layers; ++i) read_layer(in, info);
  plan_from_header(source, info, counts);
  read_sections(in, info);
  return info;
}

void check_section(const SnapshotSource& source, const KvSnapshotInfo& info, size_t index,
                   uint64_t checksum) {
  const KvSnapshotSection& section = info.sections[index];
  demand(checksum == section.checksum, source, "section ", index, " (", section_text(section),
         "): the checksum is ", hex(checksum), ", expected ", hex(section.checksum));
}

void verify_snapshot(const SnapshotSource& source, const KvSnapshotInfo& info) {
  std::vector<std::byte> piece;
  uint64_t end = info.header_bytes;
  for (size_t i = 0; i < info.sections.size(); ++i) {
    const KvSnapshotSection& section = info.sections[i];
    check_zeros(source, end, section.offset);
    Checksum checksum;
    end = section.offset + section.bytes;
    for (uint64_t at = section.offset; at < end; at += piece.size()) {
      piece.resize(std::min(kSnapshotPieceBytes, end - at));
      source.read(at, piece);
      checksum.add(piece);
    }
    check_section(source, info, i, checksum.value());
  }
}

}  // namespace gyre
