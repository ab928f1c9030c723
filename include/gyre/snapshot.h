#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gyre/export.h"
#include "gyre/format.h"
#include "gyre/kv_cache.h"

namespace gyre {

// The newest version. KvCache::save() writes version 3 where all layers have the same heads and
// dims and a cache of their own, and none is latent; load() reads both.
constexpr uint32_t kKvSnapshotVersion = 4;

// Where a layer's keys lie: most in the body, the first in the sink tokens, the newest in the tail.
enum class KvSegmentKind : uint8_t { body, sink_tokens, tail };
enum class KvPart : uint8_t { codes, scales };

GYRE_API std::string_view name(KvSegmentKind kind);
GYRE_API std::string_view name(KvRole role);
GYRE_API std::string_view name(KvPart part);

// One tensor of the cache, as far as it is in use.
struct KvSnapshotSection {
  uint64_t layer = 0;
  KvSegmentKind segment = KvSegmentKind::body;
  KvRole role = KvRole::k;
  KvPart part = KvPart::codes;
  KvFormat format = KvFormat::f16;
  uint64_t slots = 0;  // stored
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t checksum = 0;
};

// Slots a layer had, stored or not.
struct KvSnapshotSlots {
  uint64_t body = 0;
  uint64_t tail = 0;
};

// What a snapshot says about itself. docs/snapshots.md draws the bytes.
struct KvSnapshotInfo {
  uint32_t version = kKvSnapshotVersion;
  // Describes the cache that was saved: layers with every number filled in, and above them the
  // numbers that all layers have, 0 where they differ.
  KvCacheOptions options{};
  std::vector<KvSnapshotSlots> slots{};  // of each layer; 0: it shares another's cache
  uint64_t length = 0;                   // keys
  uint64_t tail_begin = 0;               // keys from here on are also in the rings of the tails
  uint64_t peak = 0;         // longest since the cache was cleared: how far rings wrapped
  uint32_t calibration = 0;  // which calibration the rows were written with; 0: none
  std::vector<KvSnapshotSection> sections{};
  uint64_t header_bytes = 0;
  uint64_t file_bytes = 0;
};

// Reads the header alone, and refuses one with a single wrong bit.
GYRE_API KvSnapshotInfo inspect_snapshot(const std::string& path);
// Reads the whole file and refuses one with a single wrong bit. load() does, too.
GYRE_API void verify_snapshot(const std::string& path);

}  // namespace gyre
