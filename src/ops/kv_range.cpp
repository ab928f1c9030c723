#include "ops/kv_range.h"

#include "runtime/require.h"

namespace gyre {

KvSlotRange checked_kv_range(const char* op, const char* source, uint64_t available,
                             uint64_t capacity, const KvRange& options) {
  require(options.cache <= CacheKind::ring, op, ": ", static_cast<uint32_t>(options.cache),
          " is not a kind of cache");
  require(options.source_begin <= available, op, ": source_begin must be at most the ", available,
          " tokens of ", source, ", got ", options.source_begin);
  const uint64_t remainder = available - options.source_begin;
  const uint64_t tokens = options.tokens.value_or(remainder);
  require(tokens <= remainder, op, ": ", source, " has ", remainder, " tokens from source_begin ",
          options.source_begin, ", asked for ", tokens);
  if (tokens == 0) return {};
  require(capacity != 0, op, ": the cache has capacity 0, cannot take ", tokens, " tokens");
  if (options.cache == CacheKind::linear) {
    require(options.position <= capacity && tokens <= capacity - options.position, op,
            ": a linear cache of ", capacity, " slots cannot take ", tokens, " tokens at position ",
            options.position);
  }
  const uint64_t dropped = tokens > capacity ? tokens - capacity : 0;
  // Divisions only where something can wrap: this is on the path of every decode step.
  uint64_t slot = options.position < capacity ? options.position : options.position % capacity;
  if (dropped != 0) slot = (slot + dropped % capacity) % capacity;
  return {options.source_begin + dropped, tokens - dropped, slot};
}

}  // namespace gyre
