#pragma once
// Prefill attention: how a block uses its warps and its shared memory. The host asks for the bytes;
// the kernel, which is told only how many it got, computes the same layout.
#include "abi/attention.h"
#include "cuda/kernels/attention/common/formats.cuh"

namespace gyre::cuda {

struct PrefillLayout {
  uint32_t rows;           // of queries: 8 or 16
  uint32_t warps;          // 4, 8 or 16
  uint32_t stage_keys;     // keys at a time
  uint32_t stages;         // in flight
  uint32_t warps_per_key;  // that share the scores of 16 keys
  uint32_t early_keys;     // 1: K and V are loaded before the queries are ready
  uint32_t k_blocks, v_blocks;
  uint32_t k_pitch, v_pitch;  // bytes: a key; a value, or a tile of values
  uint32_t logits_pitch;      // floats
  uint32_t weights_pitch, weights_plane;
  uint32_t k_scales, v_codes, v_scales, stage_bytes;                   // inside a stage
  uint32_t q, staging, logits, weights, factors, state, stage, total;  // offsets
};

constexpr uint32_t kMaxRows = 16, kMaxStageKeys = 128, kPrefillStateBytes = 1664;

constexpr uint32_t query_bytes(uint32_t format, uint32_t head_dim, uint32_t rows) {
  if (abi::kv_is_native(format)) return round_up(head_dim, key_span(format)) / 32 * rows * 64;
  return is_float16_format(format) ? round_up(head_dim, 32) / 16 * rows * 64 : head_dim * rows * 4;
}

// Everything that follows from rows, stage_keys and stages.
inline void fill_layout(const abi::KvCacheLayout& k, const abi::KvCacheLayout& v,
                        PrefillLayout& a) {
  const bool k_native = abi::kv_is_native(k.format), v_native = abi::kv_is_native(v.format);
  a.warps_per_key = a.warps * 16 > a.stage_keys ? a.warps * 16 / a.stage_keys : 1;
  a.k_blocks = k_native ? count_scale_blocks(k.head_dim) : 0;
  a.v_blocks = v_native ? count_scale_blocks(v.head_dim) : 0;
  // Eight rows of 16 bytes, two of 64, eight coordinates of four tiles: 128 bytes, no bank twice.
  a.k_pitch = k_native ? padded(k.head_dim * abi::kv_bits(k.format) / 8, 32, 16)
                       : padded(round_up(k.head_dim, 32) * 2, 128, 64);
  a.v_pitch = v_native ? padded((v.head_dim + 8) * abi::kv_bits(v.format), 128, 32)
                       : padded(round_up(v.head_dim, 16) * 2, 32, 16);
  const uint32_t tiles = a.stage_keys / abi::kKvTile;
  a.k_scales = is_staged(k.format) ? a.stage_keys * a.k_pitch : 0;
  a.v_codes = a.k_scales + tiles * a.k_blocks * 16;
  a.v_scales =
      a.v_codes + (is_staged(v.format) ? (v_native ? tiles : a.stage_keys) * a.v_pitch : 0);
  a.stage_bytes = round_up(a.v_scales + tiles * a.v_blocks * 16, 128);
  a.logits_pitch = a.stage_keys + 4;
  a.weights_pitch = padded(a.stage_keys * 2, 128, 64);
  a.weights_plane = a.rows * a.weights_pitch;
  const uint32_t planes =
      v_native ? a.v_blocks : (v.format == kFormatBf16 ? 2u : (v.format == kFormatF16 ? 1u : 0u));
  const uint32_t staging =
      round_up((k.head_dim > v.head_dim ? k.head_dim : v.head_dim) * a.rows * 4, 128);
  a.early_keys = staging <= 16384 ? 1 : 0;
  a.state = 0;
  a.factors = kPrefillStateBytes;
  a.q = a.factors + round_up((a.v_blocks != 0 ? a.v_blocks : 1) * a.rows * 8, 128);
  a.staging = a.q + round_up(query_bytes(k.format, k.head_dim, a.rows), 128);
  a.logits = a.early_keys != 0 ? a.staging + staging : a.staging;
  a.weights = a.logits + round_up(a.warps_per_key * a.rows * a.logits_pitch * 4, 128);
  a.stage = a.weights + planes * a.weights_plane;
  // Large queries and outputs share memory with the stages: they come before and after them.
  if (a.early_keys == 0) a.staging = a.stage;
  const uint32_t staged = a.stages * a.stage_bytes;
  a.total = a.stage + (a.early_keys == 0 && staging > staged ? staging : staged);
}

// (token, query head) pairs of a KV head that a layout is for. Over pages always the same: a row's
// bits must not depend on how many come with it.
inline uint64_t prefill_rows(const abi::AttentionParams& p) {
  return p.table.page_tokens != 0 ? kMaxRows : p.tokens * p.group;
}

// Candidates, best first. The host takes one that suits the GPU and asks for its `total` bytes; the
// kernel takes the first that fits into them. That may be an earlier one, but never one with other
// rows or warps, which the grid depends on.
constexpr uint32_t kPrefillLayouts = 16;

inline PrefillLayout prefill_layout(const abi::KvCacheLayout& k, const abi::KvCacheLayout& v,
                                    uint64_t rows, uint32_t index) {
  PrefillLayout a = {};
  const uint32_t i = index % (kPrefillLayouts / 2);
  const uint32_t dim = k.head_dim > v.head_dim ? k.head_dim : v.head_dim;
  a.warps = dim <= 256 ? 4 : (dim <= 512 ? 8 : 16);  // four tiles of V's coordinates to a warp
  a.rows = rows <= 8 || index >= kPrefillLayouts / 2 ? 8 : 16;
  a.stage_keys = i < 1 ? 128 : (i < 3 ? 64 : (i < 6 ? 32 : 16));
  a.stages = i < 1 ? 2 : (i < 3 ? 4 - i : (i < 6 ? 6 - i : 8 - i));
  fill_layout(k, v, a);
  if (a.stage_keys == 16 && abi::kv_is_native(v.format))
    a.total = 0xFFFFFFFFu;  // an MMA over levels of V takes four tiles
  return a;
}

}  // namespace gyre::cuda
