#pragma once
// How a block of attention uses its threads and its shared memory, found alike by the host, which
// asks for the memory, and by the kernel, which is told nothing but how much it got.
#include "abi/attention.h"

namespace gyre::cuda {

struct AttentionPlan {
  uint32_t rows;    // of queries: 8 or 16
  uint32_t warps;   // 4, 8 or 16
  uint32_t chunk;   // keys at a time
  uint32_t stages;  // chunks in flight
  uint32_t parts;   // warps that share the scores of 16 keys
  uint32_t early;   // keys are asked for before the queries are ready
  uint32_t k_blocks, v_blocks;
  uint32_t k_pitch, v_pitch;  // bytes: a key; a value, or a tile of values
  uint32_t logits_pitch;      // floats
  uint32_t weights_pitch, weights_plane;
  uint32_t k_scales, v_codes, v_scales, stage_bytes;                // inside a stage
  uint32_t q, wide, logits, weights, factors, state, stage, total;  // offsets
};

constexpr uint32_t kPlanF32 = 0, kPlanF16 = 1, kPlanBf16 = 2;  // KvFormat
constexpr uint32_t kMostRows = 16, kMostChunk = 128, kStateBytes = 1664;

constexpr bool is_half_format(uint32_t format) { return format == kPlanF16 || format == kPlanBf16; }
constexpr bool is_staged(uint32_t format) {
  return abi::kv_is_native(format) || is_half_format(format);
}

constexpr uint32_t round_up(uint32_t x, uint32_t to) { return (x + to - 1) / to * to; }
// The next multiple of 16 that leaves `rest` modulo `of`: where rows begin decides bank conflicts.
constexpr uint32_t padded(uint32_t bytes, uint32_t of, uint32_t rest) {
  return round_up(bytes + of - rest, of) - of + rest;
}

constexpr uint32_t count_scale_blocks(uint32_t head_dim) {
  uint32_t count = 0;
  for (uint32_t size = 8; size <= abi::kKvMaxHeadDim; size *= 2) {
    if ((head_dim & size) != 0) count += size > abi::kKvScaleBlock ? size / abi::kKvScaleBlock : 1;
  }
  return count;
}

constexpr uint32_t query_bytes(uint32_t format, uint32_t head_dim, uint32_t rows) {
  if (abi::kv_is_native(format)) return round_up(head_dim, 32) / 32 * rows * 64;
  return is_half_format(format) ? round_up(head_dim, 32) / 16 * rows * 64 : head_dim * rows * 4;
}

// Everything that follows from rows, chunk and stages.
inline void fill_plan(const abi::KvCacheLayout& k, const abi::KvCacheLayout& v, AttentionPlan& a) {
  const bool k_native = abi::kv_is_native(k.format), v_native = abi::kv_is_native(v.format);
  a.parts = a.warps * 16 > a.chunk ? a.warps * 16 / a.chunk : 1;
  a.k_blocks = k_native ? count_scale_blocks(k.head_dim) : 0;
  a.v_blocks = v_native ? count_scale_blocks(v.head_dim) : 0;
  // Eight rows of 16 bytes, two of 64, eight coordinates of four tiles: 128 bytes, no bank twice.
  a.k_pitch = k_native ? padded(k.head_dim * abi::kv_bits(k.format) / 8, 32, 16)
                       : padded(round_up(k.head_dim, 32) * 2, 128, 64);
  a.v_pitch = v_native ? padded((v.head_dim + 8) * abi::kv_bits(v.format), 128, 32)
                       : padded(round_up(v.head_dim, 16) * 2, 32, 16);
  const uint32_t tiles = a.chunk / abi::kKvTile;
  a.k_scales = is_staged(k.format) ? a.chunk * a.k_pitch : 0;
  a.v_codes = a.k_scales + tiles * a.k_blocks * 16;
  a.v_scales = a.v_codes + (is_staged(v.format) ? (v_native ? tiles : a.chunk) * a.v_pitch : 0);
  a.stage_bytes = round_up(a.v_scales + tiles * a.v_blocks * 16, 128);
  a.logits_pitch = a.chunk + 4;
  a.weights_pitch = padded(a.chunk * 2, 128, 64);
  a.weights_plane = a.rows * a.weights_pitch;
  const uint32_t planes =
      v_native ? a.v_blocks : (v.format == kPlanBf16 ? 2u : (v.format == kPlanF16 ? 1u : 0u));
  const uint32_t wide =
      round_up((k.head_dim > v.head_dim ? k.head_dim : v.head_dim) * a.rows * 4, 128);
  a.early = wide <= 16384 ? 1 : 0;
  a.state = 0;
  a.factors = kStateBytes;
  a.q = a.factors + round_up((a.v_blocks != 0 ? a.v_blocks : 1) * a.rows * 8, 128);
  a.wide = a.q + round_up(query_bytes(k.format, k.head_dim, a.rows), 128);
  a.logits = a.early != 0 ? a.wide + wide : a.wide;
  a.weights = a.logits + round_up(a.parts * a.rows * a.logits_pitch * 4, 128);
  a.stage = a.weights + planes * a.weights_plane;
  // Large queries and outputs lie where the stages are: they come before and after them.
  if (a.early == 0) a.wide = a.stage;
  const uint32_t staged = a.stages * a.stage_bytes;
  a.total = a.stage + (a.early == 0 && wide > staged ? wide : staged);
}

// A list of candidates, best first. The host takes one that suits the GPU and asks for its `total`;
// the kernel takes the first that fits in there. That may be an earlier one, but never one with
// other rows or warps, which the grid depends on.
constexpr uint32_t kPlans = 16;

inline AttentionPlan attention_candidate(const abi::KvCacheLayout& k, const abi::KvCacheLayout& v,
                                         uint64_t rows, uint32_t index) {
  AttentionPlan a = {};
  const uint32_t i = index % (kPlans / 2);
  const uint32_t most = k.head_dim > v.head_dim ? k.head_dim : v.head_dim;
  a.warps = most <= 256 ? 4 : (most <= 512 ? 8 : 16);  // four tiles of V's coordinates to a warp
  a.rows = rows <= 8 || index >= kPlans / 2 ? 8 : 16;
  a.chunk = i < 1 ? 128 : (i < 3 ? 64 : (i < 6 ? 32 : 16));
  a.stages = i < 1 ? 2 : (i < 3 ? 4 - i : (i < 6 ? 6 - i : 8 - i));
  fill_plan(k, v, a);
  if (a.chunk == 16 && abi::kv_is_native(v.format)) a.total = 0xFFFFFFFFu;  // needs four tiles
  return a;
}

}  // namespace gyre::cuda
