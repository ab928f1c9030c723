#pragma once
// Latent attention: the work that a call is cut into, and how a block uses its threads and its
// shared memory. Constants of a variant, for the host and the kernels alike.
//
// A block attends with 64 rows over a split of a sequence's keys. Four warpgroups: one for scores
// and weights, two for values (half of the latent's coordinates each), one brings the keys. A stage
// of keys is one operand for both products: rows of 16-bit floats, latent and rotary part.
#include "abi/attention.h"
#include "cuda/kernels/attention/common/formats.cuh"

namespace gyre::cuda {

constexpr uint32_t kLatentRows = 64, kLatentGroup = 128;  // rows of a block; threads of a warpgroup
constexpr uint32_t kLatentThreads = 4 * kLatentGroup;
constexpr uint32_t kLatentSlots = 2;  // stages in shared memory
constexpr uint32_t kLatentStateBytes = 3072;
constexpr uint32_t kLatentMaxSplits = 128;
// Sequences with more tokens are not cut: their rows fill the GPU.
constexpr uint32_t kLatentCutTokens = 16;

struct LatentLayout {
  uint32_t keys;     // of a stage; 0: no such variant
  uint32_t k_panel;  // bytes of a stage's part of 128 bytes a row
  uint32_t q_panel, v_panel;
  uint32_t slot_bytes;
  uint32_t q, slot, weights, state, total;  // offsets
};

constexpr bool latent_takes(uint32_t k_format, uint32_t v_format, uint32_t k_dim, uint32_t v_dim) {
  const auto takes = [](uint32_t format) {
    return is_float16_format(format) || abi::kv_is_native(format);
  };
  return takes(k_format) && takes(v_format) && (k_dim == 128 || k_dim == 256 || k_dim == 512) &&
         (v_dim == 16 || v_dim == 32 || v_dim == 64);
}

// `keys`: 64 on a Hopper, 32 on other GPUs.
constexpr LatentLayout latent_layout(uint32_t k_format, uint32_t v_format, uint32_t k_dim,
                                     uint32_t v_dim, uint32_t keys) {
  LatentLayout a = {};
  if (!latent_takes(k_format, v_format, k_dim, v_dim) || (keys != 64 && keys != 32)) return a;
  const uint32_t panels = k_dim / 64 + 1;
  a.keys = keys;
  a.k_panel = a.v_panel = keys * 128;
  a.q_panel = kLatentRows * 128;
  a.slot_bytes = panels * a.k_panel;
  a.q = 0;
  a.slot = a.q + panels * a.q_panel;
  a.weights = a.slot + kLatentSlots * a.slot_bytes;
  a.state = a.weights + kLatentRows * keys * 2;
  a.total = a.state + kLatentStateBytes;
  return a;
}

// Some rows of a sequence and one split of its keys. Keys are counted from the sequence's first.
struct LatentWork {
  uint32_t sequence;
  int32_t length;        // of the sequence
  uint32_t first_token;  // row of q of the sequence's first token
  uint32_t tokens;       // of the sequence
  uint32_t first_row;    // (token, head) of the sequence
  uint32_t rows_split;   // rows, and 2^16 times which split of theirs it is
  int32_t begin, end;    // keys that some row sees
  uint32_t tail_begin;   // RowMask's
  uint32_t unused;

  constexpr uint32_t rows() const { return rows_split & 0xFFFFu; }
  constexpr uint32_t split() const { return rows_split >> 16; }
};
// The rows of a work item, and the splits that they were cut into.
struct LatentTile {
  uint32_t first_token, first_row;
  uint32_t rows;    // 2^31 more: the sequence makes no sense, its rows become NaN
  uint32_t splits;  // that have keys of them
};
struct LatentCounts {
  uint32_t works, tiles;
  uint32_t unused[14];
};

// Values, reference, sum and largest logit of a row over a split, in whole chunks of 16 bytes.
constexpr uint32_t latent_state_floats(uint32_t k_dim) { return k_dim + 4; }

// Bytes of a call's scratch.
struct LatentScratch {
  uint64_t max_tiles, max_works;
  uint64_t tiles, works, factors, q, states, total;  // offsets; counts come first
};
constexpr LatentScratch latent_scratch(uint64_t rows, uint64_t sequences, uint64_t splits,
                                       uint32_t k_dim, uint32_t v_dim) {
  const auto rounded = [](uint64_t bytes) { return (bytes + 127) / 128 * 128; };
  LatentScratch s = {};
  s.max_tiles = rows / kLatentRows + sequences;
  s.max_works = s.max_tiles * splits;
  s.tiles = sizeof(LatentCounts);
  s.works = rounded(s.tiles + s.max_tiles * sizeof(LatentTile));
  s.factors = rounded(s.works + s.max_works * sizeof(LatentWork));
  s.q = rounded(s.factors + rows * 4);
  s.states = rounded(s.q + rows * (k_dim + v_dim) * 2);
  s.total = s.states + rows * splits * latent_state_floats(k_dim) * 4;
  return s;
}
inline LatentScratch latent_scratch(const abi::AttentionParams& p) {
  const uint64_t sequences = p.table.page_tokens != 0 ? p.table.sequences : 1;
  return latent_scratch(p.tokens * p.heads, sequences, p.splits, p.k.head_dim, p.v.head_dim);
}

// Keys of a split: by the sequence's length and the call's bounds, so that a row's bits do not
// depend on the sequences beside it.
constexpr uint64_t latent_split_keys(const abi::AttentionParams& p, uint64_t length, bool cut) {
  // For few keys, a split of 256 takes longer to start than to compute, and short sequences come
  // in batches.
  constexpr uint64_t kFew = 16384, kLongSplit = 512;
  uint64_t keys = p.fewest_split_keys;
  if (length <= kFew && keys < kLongSplit) keys = kLongSplit;
  while (keys * (cut ? p.splits : 1) < length) keys *= 2;
  return keys;
}

}  // namespace gyre::cuda
