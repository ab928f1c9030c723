#pragma once
// What a KvCache keeps in device memory, so that one recorded step serves a whole generation:
// kv_extend writes it, kv_append and attention read it.
#include "abi/kv_quantize.h"

namespace gyre::abi {

struct KvState {
  uint64_t start;     // keys before the step
  uint64_t length;    // keys, those of the step included
  uint64_t old_tail;  // oldest key the 16-bit tail held before the step
  uint64_t tail;      // and holds after it: keys [old_tail, tail) leave
};

struct KvExtendSpec {
  uint8_t unused[8];
};

struct KvExtendParams {
  KvState state;
  uint64_t positions;  // how many: start, start + 1, ...
};

// Where a key of a layer lies. The first `sinks` keys are in the sink buffer, those from
// max(state.tail, sinks) on in the tail if there is one, all others in the body.
using KvSegment = uint32_t;
constexpr KvSegment kSegmentBody = 0, kSegmentSinks = 1, kSegmentTail = 2;

struct KvPlaces {
  uint64_t sinks;
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

struct KvAppendSpec {
  uint8_t source_dtype;  // DType
  uint8_t k_format;      // KvFormat of the body
  uint8_t v_format;
  uint8_t unused[5];
};

// Strides in bytes. Sinks and tail are f16.
struct KvAppendStream {
  uint64_t source_token_stride;
  uint64_t source_head_stride;
  uint64_t sinks_head_stride;
  uint64_t tail_head_stride;
  KvCacheLayout body;
};

// A tail that is too short for old and new tokens side by side is written after the body, by a
// second command.
constexpr uint32_t kAppendBody = 1, kAppendNear = 2;

struct KvAppendParams {
  uint64_t tokens;
  uint64_t heads;
  KvPlaces places;
  KvAppendStream stream[2];
  uint32_t parts;  // kAppendBody, kAppendNear or both
  uint32_t unused;
};

struct BytesCopySpec {
  uint8_t unused[8];
};

struct BytesCopyParams {
  uint64_t bytes;
};

}  // namespace gyre::abi
