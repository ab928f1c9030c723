#pragma once
// Snapshots made without a cache, and headers whose checksum is right whatever they say.

#include <cstring>

#include "cache/layers.h"
#include "cache/snapshot.h"
#include "gyre_test.h"

namespace gyre::test {

// Where header_bytes is a size the file has, the checksum there is made right.
inline void sign_header(std::vector<std::byte>& bytes) {
  constexpr size_t kHeaderBytesAt = 16;
  if (bytes.size() < kSnapshotFixedBytes) return;
  uint64_t header = 0;
  std::memcpy(&header, bytes.data() + kHeaderBytesAt, sizeof(header));
  if (header < sizeof(uint64_t) || header > bytes.size()) return;
  const uint64_t covered = header - sizeof(uint64_t);
  const uint64_t sum = checksum_of(std::span(bytes).first(covered));
  std::memcpy(bytes.data() + covered, &sum, sizeof(sum));
}

// A cache of two layers: sink tokens and tail, and a ring; of version 4 with one more that shares.
inline KvSnapshotInfo seed_info(uint32_t version = kSnapshotUniformVersion) {
  KvSnapshotInfo info;
  info.options = {.kv_heads = 1,
                  .head_dim = 16,
                  .v_head_dim = 16,
                  .capacity = 12,
                  .layers = {{.k = KvFormat::tq4, .v = KvFormat::tq2, .tail = 2, .sink_tokens = 1},
                             {.k = KvFormat::mlx_native4, .v = KvFormat::f16, .window = 3}},
                  .step_tokens = 4};
  info.slots = {{11, 6}, {6, 0}};
  if (version != kSnapshotUniformVersion) {
    info.options.layers.push_back({.kv_shared_layer_index = 0});
    info.slots.push_back({});
  }
  info.version = version;
  info.options.layers = resolve_layers("seed_info", info.options);
  info.length = 7;
  info.tail_begin = 5;
  info.peak = 9;
  return info;
}

inline std::vector<std::byte> seed_snapshot(uint32_t version = kSnapshotUniformVersion) {
  KvSnapshotInfo info = seed_info(version);
  plan_snapshot(info, 1u << 20);
  std::vector<std::byte> bytes(info.file_bytes);
  for (KvSnapshotSection& section : info.sections) {
    const auto part = std::span(bytes).subspan(section.offset, section.bytes);
    for (size_t i = 0; i < part.size(); ++i) part[i] = static_cast<std::byte>(37 * i + 5);
    section.checksum = checksum_of(part);
  }
  std::ranges::copy(snapshot_header(info), bytes.begin());
  return bytes;
}

}  // namespace gyre::test
