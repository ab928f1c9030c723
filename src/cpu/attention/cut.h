#pragma once
// How the CPU cuts the keys of a sequence into splits, when it decodes.

#include <algorithm>

#include "abi/attention_cut.h"
#include "abi/attention_plan.h"
#include "cpu/attention/isa/kernels.h"

namespace gyre::cpu {

// Fewer keys in a split, and the merge shows; 16 splits of 8 KV heads occupy many threads.
constexpr abi::AttentionCut kCut = {1024, 16};

// Splits that up to `keys` keys can be in. They begin anywhere, splits do not; keys that one split
// could hold are not cut at all.
constexpr uint64_t max_splits(uint64_t keys) {
  if (keys <= kCut.fewest_keys) return 1;
  return std::min((keys + kCut.fewest_keys - 1) / kCut.fewest_keys + 1, kCut.max_splits);
}

// Rows of a KV head that are computed as decoding does. Latent attention has no other KV heads that
// threads could work on, so keys are cut for all heads of a token, and for more tokens of few
// heads; a work tile must hold them.
constexpr uint64_t max_decode_rows(uint64_t group, bool latent) {
  constexpr uint64_t kLatentRows = 64;
  if (!latent) return abi::kDecodePhaseRows;
  return group <= kMaxRows ? std::max(kLatentRows, group) : 0;
}

// Those whose splits are kept until all are there. A prompt's keys are not cut.
constexpr uint64_t decode_rows(uint64_t max_query_length, uint64_t group, bool latent) {
  return std::min(max_query_length * group, max_decode_rows(group, latent));
}

// What the kernel keeps in scratch memory: a counter of splits for each sequence and KV head, then
// their states.
struct SplitScratch {
  uint64_t sequences, kv_heads, splits, rows, state_floats;

  constexpr uint64_t counter(uint64_t sequence, uint64_t head) const {
    return sequence * kv_heads + head;
  }
  constexpr uint64_t state(uint64_t sequence, uint64_t head, uint64_t split, uint64_t row) const {
    return counters() + ((counter(sequence, head) * splits + split) * rows + row) * state_floats;
  }
  constexpr uint64_t split_floats() const { return rows * state_floats; }
  constexpr uint64_t counters() const { return (sequences * kv_heads + 15) / 16 * 16; }
  constexpr uint64_t floats() const {
    return counters() + sequences * kv_heads * splits * split_floats();
  }
};

}  // namespace gyre::cpu
