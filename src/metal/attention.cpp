// Plans and grids of the attention kernels.
#include <algorithm>

#include "abi/attention_plan.h"
#include "metal/kernels.h"
#include "metal/kernels/attention_layout.h"

namespace gyre::metal {
namespace {

constexpr uint32_t kFewestKeys = 256;    // in a split: two blocks of each simdgroup
constexpr uint64_t kWantedGroups = 256;  // fill the largest GPU; a plan is not made for one of them

constexpr uint64_t ceil_div(uint64_t a, uint64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

uint32_t limited(uint64_t count) {
  return static_cast<uint32_t>(std::min<uint64_t>(count, 0xFFFFFFFFu));
}

// Row tiles of a KV head that a batch has at most: every sequence may have one that is not full.
uint64_t paged_tiles(uint64_t tokens, uint64_t group, uint64_t sequences, uint64_t rows,
                     abi::AttentionPhase phase) {
  uint64_t all = tokens * group;
  if (phase == abi::AttentionPhase::decode) all = std::min(all, sequences * abi::kDecodePhaseRows);
  return all / rows + sequences;
}

// Group x is a tile of rows, y a split, z a KV head.
Launch launch_tiles(const abi::AttentionParams& p, uint32_t rows, uint32_t group_bytes) {
  const bool paged = p.table.page_tokens != 0;
  const uint64_t tiles = paged ? paged_tiles(p.tokens, p.group, p.table.sequences, rows, p.phase)
                               : ceil_div(p.tokens * p.group, rows);
  const bool splits = !paged || p.partial == abi::kAttentionPartial;
  return {{limited(tiles), limited(splits ? p.splits : 1), limited(p.kv_heads)},
          kAttentionThreads,
          group_bytes};
}

Launch launch_rows(const abi::AttentionParams& p, uint32_t rows) {
  const uint32_t k_dim = p.k.head_dim, v_dim = p.v.head_dim;
  return launch_tiles(p, rows,
                      attention_layout(k_dim, v_dim, rows, value_blocks(p.v.format, v_dim)).total);
}

// Splits that a decoding sequence's keys have at most, see attention_splits. A window may begin and
// end in the middle of one.
uint64_t max_sequence_splits(const abi::AttentionProblem& p) {
  if (p.phase != abi::AttentionPhase::decode) return 1;
  const uint64_t splits =
      p.keys < p.capacity ? p.keys / kSplitKeys + 2 : ceil_div(p.capacity, kSplitKeys);
  return std::clamp<uint64_t>(splits, 1, kMaxSplits);
}

// Splits where rows alone do not fill a GPU. A prompt's keys are not cut: a row's bits must not
// follow the chunk that it came in. Those of pages are cut in the kernel: nor the batch.
uint64_t splits_of(const abi::AttentionProblem& p, uint64_t rows, uint32_t tile_rows) {
  if (p.splits != 0) return p.splits;
  if (p.sequences != 0 || rows > abi::kDecodePhaseRows) return 1;
  const uint64_t groups = p.kv_heads * ceil_div(rows, tile_rows);
  const uint64_t max_splits = std::max<uint64_t>(ceil_div(p.keys, kFewestKeys), 1);
  return std::clamp<uint64_t>(kWantedGroups / std::max<uint64_t>(groups, 1), 1, max_splits);
}

bool takes_many_rows(const abi::AttentionProblem& p) {
  const auto takes = [](const abi::KvCacheLayout& half) {
    return half.head_dim % 8 == 0 && half.head_dim <= kMaxManyRowsDim &&
           !abi::kv_is_mlx_native(half.format);
  };
  return takes(p.k) && takes(p.v);
}

// Few rows with dims that the spec has room for.
bool takes_decode(const abi::AttentionProblem& p) {
  return p.k.head_dim == p.v.head_dim || (p.v.head_dim % 16 == 0 && p.v.head_dim / 16 <= 255);
}

}  // namespace

bool has_attention(uint64_t spec) { return spec_from_key<abi::AttentionSpec>(spec).latent == 0; }

Launch launch_attention(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  return launch_rows(p, attention_tile_rows(p.k.head_dim, p.v.head_dim));
}

Launch launch_attention_decode(const void* params, uint64_t spec) {
  return launch_rows(*static_cast<const abi::AttentionParams*>(params),
                     spec_from_key<abi::AttentionDecodeSpec>(spec).rows);
}

Launch launch_attention_many_rows(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  return launch_tiles(p, kManyRowsTile, many_rows_layout(p.k.head_dim, p.v.head_dim).total);
}

Launch launch_attention_merge(const void* params, uint64_t /*spec*/) {
  constexpr uint32_t kThreads = 128;
  const auto& p = *static_cast<const abi::AttentionMergeParams*>(params);
  return {{limited(p.tokens * p.heads), 1, 1}, kThreads, 0};
}

bool plan_attention(const void* problem, void* plan) {
  const auto& p = *static_cast<const abi::AttentionProblem*>(problem);
  const uint64_t group = p.heads / p.kv_heads;
  const uint64_t rows = (p.sequences != 0 ? p.max_query_length : p.tokens) * group;
  const uint32_t max_rows = attention_tile_rows(p.k.head_dim, p.v.head_dim);
  const auto tile_rows = static_cast<uint32_t>(std::clamp<uint64_t>(rows, 1, max_rows));
  if (p.latent != 0) return false;
  auto& made = *static_cast<abi::AttentionPlan*>(plan);
  made = abi::attention_any_shape_plan(p, splits_of(p, rows, tile_rows), kFewestKeys);
  if (p.sequences != 0 && max_sequence_splits(p) > 1) {
    const uint64_t group_rows = takes_decode(p) ? tile_rows : max_rows;
    made.splits = max_sequence_splits(p);
    made.reduce = abi::AttentionReduce::separate;
    made.scratch_floats = made.splits *
                          paged_tiles(p.tokens, group, p.sequences, group_rows, p.phase) *
                          p.kv_heads * group_rows * (uint64_t{p.v.head_dim} + 2);
  }
  const bool prompt =
      p.sequences != 0 ? p.phase == abi::AttentionPhase::prompt : rows > abi::kDecodePhaseRows;
  if (prompt && takes_many_rows(p)) {
    made.kernel = abi::AttentionKernel::attention_many_rows;
    made.spec =
        spec_key(abi::attention_rows_spec(p.k.format, p.v.format, p.k.head_dim, p.v.head_dim, 0));
  } else if (takes_decode(p)) {
    abi::AttentionDecodeSpec spec =
        abi::attention_decode_spec(p.k.format, p.v.format, p.k.head_dim, tile_rows, 1);
    spec.paged = p.sequences != 0 ? 1 : 0;
    if (p.k.head_dim != p.v.head_dim) spec.value_dim16 = static_cast<uint8_t>(p.v.head_dim / 16);
    made.kernel = abi::AttentionKernel::attention_decode;
    made.spec = spec_key(spec);
  }
  return true;
}

}  // namespace gyre::metal
