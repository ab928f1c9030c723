// What one task of attention works on: up to 64 queries of one KV head and a range of keys. Both
// ways through the keys, for few queries (attention_stream-inl.h) and for many
// (attention_tile-inl.h), share this.

#if defined(GYRE_CPU_ATTENTION_UNIT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_UNIT_INL_H
#undef GYRE_CPU_ATTENTION_UNIT_INL_H
#else
#define GYRE_CPU_ATTENTION_UNIT_INL_H
#endif

#include <algorithm>
#include <memory>

#include "abi/attention.h"
#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/softmax-inl.h"
#include "cpu/kernels/kv_decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

constexpr uint32_t kPaddedHeadDim = abi::kKvMaxHeadDim + 256;  // every scale block in units of 64

// Memory of a thread, kept from call to call: a megabyte is too much for the stacks some callers
// have.
struct AttentionScratch {
  alignas(64) float q[kAttentionRows * abi::kKvMaxHeadDim];
  alignas(64) float acc[kAttentionRows * abi::kKvMaxHeadDim];
  alignas(64) float tile[kAttentionBlock * abi::kKvMaxHeadDim];
  alignas(64) float logits[kAttentionRows * kAttentionBlock];
  alignas(64) int8_t operand[2 * kAttentionRows * kPaddedHeadDim];
  alignas(64) int8_t levels[kAttentionBlock * kPaddedHeadDim];
};

inline AttentionScratch& ThreadScratch() {
  static thread_local const auto kScratch = std::make_unique_for_overwrite<AttentionScratch>();
  return *kScratch;
}

// Keys [begin, end) of up to 64 consecutive slots, counted from a tile's first slot.
struct KeyBlock {
  uint64_t tile;  // of the first slot
  uint32_t begin, end;
  int64_t key;  // number of the key in lane 0; lanes before `begin` may not have one
  uint32_t tiles() const { return (end + abi::kKvTile - 1) / abi::kKvTile; }
  uint32_t lanes() const { return tiles() * abi::kKvTile; }
};

struct Cache {
  const abi::KvCacheLayout* layout;
  const uint8_t* codes;  // of the unit's head
  const uint8_t* scales;

  const uint8_t* tile(uint64_t index) const { return codes + index * layout->codes_tile_stride; }
  const uint8_t* tile_scales(uint64_t index) const {
    return scales + index * layout->scales_tile_stride;
  }
  uint64_t slot_stride() const { return layout->codes_tile_stride / abi::kKvTile; }
};

struct AttentionUnit {
  const abi::AttentionParams* params;
  Cache k, v;
  const float* slopes;  // null: none
  const uint8_t* tree;  // null: none
  uint64_t kv_head;
  uint64_t first_row;  // of the KV head's rows
  uint32_t rows;
  int64_t first_key, last_key;  // of the split
  AttentionScratch* scratch;

  // Per row. Keys [begin, end) are seen, unless the tree says no.
  int64_t begin[kAttentionRows], end[kAttentionRows];
  int64_t position[kAttentionRows];
  float slope[kAttentionRows];
  RowState state[kAttentionRows];

  uint64_t group() const { return params->heads / params->kv_heads; }
  uint64_t token(uint32_t row) const { return (first_row + row) / group(); }
  uint64_t head(uint32_t row) const { return kv_head * group() + (first_row + row) % group(); }
  uint32_t k_dim() const { return k.layout->head_dim; }
  uint32_t v_dim() const { return v.layout->head_dim; }
  bool plain() const { return params->soft_cap == 0 && slopes == nullptr; }

  void find_bounds() {
    const auto length = static_cast<int64_t>(params->length);
    const auto window = static_cast<int64_t>(std::min<uint64_t>(params->window, INT64_MAX / 2));
    for (uint32_t r = 0; r < rows; ++r) {
      position[r] = length - static_cast<int64_t>(params->tokens) + static_cast<int64_t>(token(r));
      begin[r] = window == 0 ? 0 : std::max<int64_t>(0, position[r] + 1 - window);
      end[r] = params->causal != 0 ? std::clamp<int64_t>(position[r] + 1, 0, length) : length;
      begin[r] = std::clamp(begin[r], first_key, last_key);
      end[r] = std::clamp(end[r], first_key, last_key);
      slope[r] = slopes == nullptr ? 0.0f : slopes[head(r)];
      state[r] = RowState();
    }
  }

  // Lanes of the block that a row's bounds leave; empty if begin >= end.
  Share seen(const KeyBlock& block, uint32_t row) const {
    const int64_t lo = std::max<int64_t>(begin[row] - block.key, block.begin);
    const int64_t hi = std::min<int64_t>(end[row] - block.key, block.end);
    return {static_cast<uint64_t>(lo), static_cast<uint64_t>(std::max(lo, hi))};
  }
  int64_t first_new() const {
    return static_cast<int64_t>(params->length) - static_cast<int64_t>(params->tokens);
  }
  bool tree_hides(const KeyBlock& block, uint32_t row, uint64_t lane) const {
    if (tree == nullptr) return false;
    const int64_t fresh = block.key + static_cast<int64_t>(lane) - first_new();
    return fresh >= 0 && tree[token(row) * params->tree_stride + static_cast<uint64_t>(fresh)] == 0;
  }
  bool touches_tree(const KeyBlock& block) const {
    return tree != nullptr && block.key + block.end > first_new();
  }

  // Calls take(block) for every block that some row sees a key of, oldest first.
  template <class Take>
  void for_blocks(const Take& take) const {
    const int64_t oldest = *std::min_element(begin, begin + rows);
    const int64_t newest = *std::max_element(end, end + rows);
    for (int64_t key = oldest; key < newest;) {
      const uint64_t slot = (params->ring_start + static_cast<uint64_t>(key)) % params->capacity;
      const auto skip = static_cast<uint32_t>(slot % abi::kKvTile);
      const uint64_t count = std::min({static_cast<uint64_t>(newest - key), params->capacity - slot,
                                       uint64_t{kAttentionBlock} - skip});
      take(KeyBlock{slot / abi::kKvTile, skip, skip + static_cast<uint32_t>(count), key - skip});
      key += static_cast<int64_t>(count);
    }
  }
};

// Rotated coordinates of the block's keys or values, lane by lane, in scratch.tile.
HWY_INLINE void DecodeBlock(const Cache& cache, const KeyBlock& block, float* tile) {
  const uint64_t n = cache.layout->head_dim;
  for (uint32_t t = 0; t < block.tiles(); ++t) {
    const uint32_t first = t * abi::kKvTile;
    const Share slots{std::max(block.begin, first) - first,
                      std::min(block.end, first + abi::kKvTile) - first};
    DecodeTile(*cache.layout, cache.tile(block.tile + t), cache.tile_scales(block.tile + t), slots,
               tile + first * n);
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
