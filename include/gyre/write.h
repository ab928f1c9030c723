#pragma once

#include <cstdint>
#include <optional>

namespace gyre {

// What happens at the end of a cache. linear: writing past the last slot is refused.
// ring: token at position p lives in slot p mod capacity.
enum class CacheKind : uint8_t { linear, ring };

// Which tokens go to which slots, for every op that writes K and V into a cache.
struct KvRange {
  uint64_t position = 0;  // of the first token written; on a ring any position, taken mod capacity
  CacheKind cache = CacheKind::linear;
  uint64_t source_begin = 0;         // first token of k and v to write
  std::optional<uint64_t> tokens{};  // how many; all from source_begin if not given
};

}  // namespace gyre
