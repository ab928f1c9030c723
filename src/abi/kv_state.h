#pragma once
// What a KvCache keeps in device memory, so that one recorded step serves a whole generation:
// kv_extend writes it, kv_append and attention read it. And where a key lies, given that.
#include "abi/types.h"

namespace gyre::abi {

struct KvState {
  uint64_t start;     // keys before the step
  uint64_t length;    // keys, those of the step included
  uint64_t old_tail;  // oldest key the 16-bit tail held before the step
  uint64_t tail;      // and holds after it: keys [old_tail, tail) leave
};

// Where a key of a layer lies. The first `sinks` keys are in the sink buffer, those from
// max(state.tail, sinks) on in the tail if there is one, all others in the body.
using KvSegment = uint32_t;
constexpr KvSegment kSegmentBody = 0, kSegmentSinks = 1, kSegmentTail = 2;

struct KvPlaces {
  uint64_t sinks;
  uint64_t tail;           // newest tokens that a query sees in 16 bits
  uint64_t tail_capacity;  // slots of the tail's ring; 0: no tail
  uint64_t body_capacity;  // key k of the body lies in slot (k - sinks) mod body_capacity
};

struct KvKeys {
  uint64_t begin, end;
};

inline uint64_t kv_least(uint64_t a, uint64_t b) { return a < b ? a : b; }
inline uint64_t kv_most(uint64_t a, uint64_t b) { return a > b ? a : b; }

inline KvKeys kv_segment_keys(KvSegment segment, const KvPlaces& places, const KvState& state) {
  const uint64_t sinks = kv_least(places.sinks, state.length);
  if (segment == kSegmentSinks) return {0, sinks};
  const uint64_t tail = places.tail_capacity != 0 ? kv_most(state.tail, sinks) : state.length;
  return segment == kSegmentBody ? KvKeys{sinks, tail} : KvKeys{tail, state.length};
}

// Keys that enter the body in a step.
inline KvKeys kv_entering_keys(const KvPlaces& places, const KvState& state) {
  const bool tail = places.tail_capacity != 0;
  const uint64_t end = tail ? state.tail : state.length;
  const uint64_t begin = kv_most(tail ? state.old_tail : state.start, places.sinks);
  return {begin, kv_most(begin, end)};
}

}  // namespace gyre::abi
