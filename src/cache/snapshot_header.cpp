// The header as bytes: little endian, field by field.
#include <cstring>

#include "cache/snapshot.h"
#include "cache/snapshot_fields.h"

namespace gyre {
namespace {

class Fields {
 public:
  void u8(uint8_t value) { bytes_.push_back(std::byte{value}); }
  void u32(uint64_t value) { number(value, 4); }
  void u64(uint64_t value) { number(value, 8); }
  void text(std::string_view value, size_t width) {
    for (size_t i = 0; i < width; ++i) {
      u8(i < value.size() ? static_cast<uint8_t>(value[i]) : uint8_t{0});
    }
  }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  void number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) u8(static_cast<uint8_t>(value >> (8 * i)));
  }
  std::vector<std::byte> bytes_;
};

void put_format(Fields& out, KvFormat format) {
  const KvFormatInfo info = describe(format);
  out.text(info.name, kSnapshotNameBytes);
  for (const uint32_t field : snapshot_format_fields(info)) out.u32(field);
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
  Fields out;
  out.text(kSnapshotMagic, kSnapshotMagicBytes);
  out.u32(info.version);
  out.u32(info.sections.size());
  for (const uint64_t value :
       {info.header_bytes, info.file_bytes, options.kv_heads, options.head_dim, options.v_head_dim,
        options.capacity, options.step_tokens, info.length, info.tail_begin, info.peak}) {
    out.u64(value);
  }
  out.u32(options.layers.size());
  out.u32(info.coding);
  for (size_t i = 0; i < options.layers.size(); ++i) {
    const KvLayer& layer = options.layers[i];
    put_format(out, layer.k);
    put_format(out, layer.v);
    for (const uint64_t value :
         {layer.window, layer.tail, layer.sinks, info.slots[i].body, info.slots[i].tail}) {
      out.u64(value);
    }
  }
  for (const KvSnapshotSection& section : info.sections) {
    out.u32(section.layer);
    out.u8(static_cast<uint8_t>(section.segment));
    out.u8(static_cast<uint8_t>(section.role));
    out.u8(static_cast<uint8_t>(section.part));
    out.u8(static_cast<uint8_t>(section.format));
    for (const uint64_t value : {section.slots, section.offset, section.bytes, section.checksum}) {
      out.u64(value);
    }
  }
  out.u64(checksum_of(out.bytes()));
  return std::move(out.bytes());
}

}  // namespace gyre
