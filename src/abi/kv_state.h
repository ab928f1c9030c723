#pragma once
// What a KvCache keeps in device memory, so that one recorded step serves a whole generation:
// kv_extend writes it, kv_append and attention read it. And where a key lies, given that.
#include "abi/types.h"

namespace gyre::abi {

struct KvState {
  uint64_t start;       // keys before the step
  uint64_t length;      // keys, those of the step included
  uint64_t tail_begin;  // oldest key that the rings of 16-bit tails hold, at most length
};

// Where a key of a layer lies. The first `sink_tokens` keys are in the sink buffer, all others in
// the body, and those from max(state.tail_begin, sink_tokens) on also in the tail's ring if there
// is one. Which of the two a query reads is its own affair: see tail_boundary.
using KvSegment = uint32_t;
GYRE_CONSTANT KvSegment kSegmentBody = 0, kSegmentSinks = 1, kSegmentTail = 2;

struct KvPlaces {
  uint64_t sink_tokens;
  uint64_t tail;           // newest tokens that a query sees in 16 bits
  uint64_t tail_capacity;  // slots of the tail's ring: tail and the longest step; 0: no tail
  uint64_t body_capacity;  // key k of the body lies in slot (k - sink_tokens) mod body_capacity
};

struct KvKeys {
  uint64_t begin, end;
};

inline uint64_t kv_least(uint64_t a, uint64_t b) { return a < b ? a : b; }
inline uint64_t kv_max(uint64_t a, uint64_t b) { return a > b ? a : b; }

// Keys that a segment holds.
inline KvKeys kv_segment_keys(KvSegment segment, const GYRE_PARAMS KvPlaces& places,
                              const GYRE_THREAD KvState& state) {
  const uint64_t sink_tokens = kv_least(places.sink_tokens, state.length);
  if (segment == kSegmentSinks) return {0, sink_tokens};
  if (segment == kSegmentBody) return {sink_tokens, state.length};
  return {kv_max(state.tail_begin, sink_tokens), state.length};
}

}  // namespace gyre::abi
