#pragma once
// How the CPU cuts the keys of a sequence into pieces, when it decodes.

#include <algorithm>

#include "abi/attention_cut.h"
#include "abi/attention_plan.h"
#include "cpu/attention/isa/kernels.h"

namespace gyre::cpu {

// Fewer keys in a piece, and the merge shows; 16 pieces of 8 KV heads occupy many threads.
constexpr abi::AttentionCut kCut = {1024, 16};

// Pieces that up to `keys` keys can be in. They begin anywhere, pieces do not; keys that one piece
// could hold are not cut at all.
constexpr uint64_t most_pieces(uint64_t keys) {
  if (keys <= kCut.fewest_keys) return 1;
  return std::min((keys + kCut.fewest_keys - 1) / kCut.fewest_keys + 1, kCut.most_pieces);
}

// Rows of a KV head that are computed as decoding does. Latent attention has no other KV heads that
// threads could work on, so keys are cut for all heads of a token, and for more tokens of few
// heads; a work tile must hold them.
constexpr uint64_t most_decode_rows(uint64_t group, bool latent) {
  constexpr uint64_t kLatentRows = 64;
  if (!latent) return abi::kDecodePhaseRows;
  return group <= kMostRows ? std::max(kLatentRows, group) : 0;
}

// Those whose pieces are kept until all are there. A prompt's keys are not cut.
constexpr uint64_t decode_rows(uint64_t max_query_length, uint64_t group, bool latent) {
  return std::min(max_query_length * group, most_decode_rows(group, latent));
}

// What the kernel keeps in scratch memory: a counter of pieces for each sequence and KV head, then
// their states.
struct PieceScratch {
  uint64_t sequences, kv_heads, pieces, rows, state_floats;

  constexpr uint64_t counter(uint64_t sequence, uint64_t head) const {
    return sequence * kv_heads + head;
  }
  constexpr uint64_t state(uint64_t sequence, uint64_t head, uint64_t piece, uint64_t row) const {
    return counters() + ((counter(sequence, head) * pieces + piece) * rows + row) * state_floats;
  }
  constexpr uint64_t piece_floats() const { return rows * state_floats; }
  constexpr uint64_t counters() const { return (sequences * kv_heads + 15) / 16 * 16; }
  constexpr uint64_t floats() const {
    return counters() + sequences * kv_heads * pieces * piece_floats();
  }
};

}  // namespace gyre::cpu
