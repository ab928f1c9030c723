// What attention works on at a time: a work tile is up to 64 rows of one KV head, of a prompt up to
// kMaxRows, and a range of keys. Both kernels, for few rows (decode-inl.h) and for many
// (prefill-inl.h), take one.

#if defined(GYRE_CPU_ATTENTION_PROBLEM_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_PROBLEM_INL_H
#undef GYRE_CPU_ATTENTION_PROBLEM_INL_H
#else
#define GYRE_CPU_ATTENTION_PROBLEM_INL_H
#endif

#include <algorithm>

#include "abi/attention.h"
#include "abi/attention_bounds.h"
#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/kv_walk-inl.h"
#include "cpu/attention/softmax-inl.h"
#include "cpu/kernel.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

constexpr uint32_t kMaxLatentDim = 512, kMaxRotaryDim = 128;

// Too much for the stacks some callers have: the executor's.
struct AttentionScratch {
  alignas(64) float q[kMaxRows * abi::kKvMaxHeadDim];
  alignas(64) float acc[kMaxRows * abi::kKvMaxHeadDim];
  alignas(64) float kv[kBlockKeys * abi::kKvMaxHeadDim];  // a block's keys or values, unpacked
  alignas(64) uint8_t values[kValueScratchBytes];         // a block's values as a kernel keeps them
  alignas(64) float logits[kLogits];
  alignas(64) int8_t operand[2 * kMaxRows * kPaddedHeadDim];
  alignas(64) int8_t levels[kBlockKeys * kPaddedHeadDim];

  // Latent attention has at most kMaxLatentDim coordinates of K and V; its rotary part lies behind
  // them.
  float* rotary_queries() { return q + kMaxRows * (abi::kKvMaxHeadDim - kMaxRotaryDim); }
  float* rotary_keys() { return kv + kBlockKeys * (abi::kKvMaxHeadDim - kMaxRotaryDim); }
  float* rotary_rows() { return kv + kBlockKeys * (abi::kKvMaxHeadDim - 2 * kMaxRotaryDim); }
  int8_t* value_tiles() { return levels + kBlockKeys * (kPaddedHeadDim - kMaxLatentDim); }
};

static_assert(sizeof(AttentionScratch) == kAttentionScratchBytes);

// K or V of one head. Addresses are numbers until there is something at them: without capacity
// there is no memory, dense formats have no scales, and null has no offsets.
struct HeadView {
  const abi::KvCacheLayout* layout;
  uint64_t codes, scales;

  HeadView() = default;
  HeadView(const abi::KvCacheLayout& cache, uint64_t codes_at, uint64_t scales_at, uint64_t head)
      : layout(&cache),
        codes(codes_at + head * cache.codes_head_stride),
        scales(scales_at + head * cache.scales_head_stride) {}

  const uint8_t* tile(const TilePlace& at) const {
    return pointer<const uint8_t>(codes + at.page + at.tile * layout->codes_tile_stride);
  }
  const uint8_t* tile_scales(const TilePlace& at) const {
    return pointer<const uint8_t>(scales + at.page + at.tile * layout->scales_tile_stride);
  }
  uint64_t slot_stride() const { return layout->codes_tile_stride / abi::kKvTile; }
};

struct WorkTile {
  const abi::AttentionParams* params;
  HeadView k, v;              // of latent attention both are the latent
  HeadView rotary;            // of latent attention
  const float* alibi_slopes;  // null: none
  const uint8_t* tree_mask;   // null: none
  const int32_t* table;       // the sequence's row of it; null: no pages
  uint64_t kv_head;
  uint64_t first_token;  // of the sequence, in q
  uint64_t first_row;    // among the sequence's rows of the KV head
  uint32_t rows;
  bool prompt;
  int64_t first_key, last_key;  // of the split
  AttentionScratch* scratch;

  // Per row: keys that it sees, unless the tree hides them, and its softmax so far.
  abi::RowMask<int64_t> mask;
  abi::RowBounds<int64_t> bounds[kMaxRows];
  int64_t position[kMaxRows];
  float slope[kMaxRows];
  SoftmaxState state[kMaxRows];

  uint64_t group() const { return params->heads / params->kv_heads; }
  uint64_t own_token(uint32_t row) const { return (first_row + row) / group(); }
  uint64_t token(uint32_t row) const { return first_token + own_token(row); }
  uint64_t head(uint32_t row) const { return kv_head * group() + (first_row + row) % group(); }
  uint32_t k_dim() const { return k.layout->head_dim; }
  uint32_t v_dim() const { return v.layout->head_dim; }
  uint32_t rotary_dim() const { return rotary.layout->head_dim; }
  bool latent() const { return params->latent != 0; }
  bool plain() const { return params->soft_cap == 0 && alibi_slopes == nullptr; }

  // Makes base-2 logits of a row's scores in `count` lanes, whose first key is `key`.
  void make_logits(uint32_t row, int64_t key, uint32_t count, float unit, float* logits) const {
    const DF d;
    const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
    const float cap = params->soft_cap;
    const auto factor = hn::Set(d, params->scale * unit), to_base2 = hn::Set(d, kLog2E);
    const auto caps = hn::Set(d, cap), slopes = hn::Set(d, slope[row]);
    for (uint32_t i = 0; i < count; i += lanes) {
      auto x = hn::Mul(hn::Load(d, logits + i), factor);
      if (cap > 0) x = SoftCap(x, caps);
      const auto distance = static_cast<float>(key + i - position[row]);
      x = hn::MulAdd(slopes, hn::Iota(d, distance), x);
      hn::Store(hn::Mul(x, to_base2), d, logits + i);
    }
  }

  void start_rows() {
    for (uint32_t r = 0; r < rows; ++r) {
      const auto at = static_cast<int64_t>(own_token(r));
      position[r] = abi::row_position(mask, at);
      bounds[r] = abi::row_bounds(mask, at, first_key, last_key);
      slope[r] = alibi_slopes == nullptr ? 0.0f : alibi_slopes[head(r)];
      state[r] = SoftmaxState();
    }
  }

  // Lanes of the block within a row's bounds.
  Share seen(const KeyBlock& block, uint32_t row) const {
    const int64_t lo = std::max<int64_t>(bounds[row].begin - block.key, block.begin);
    const int64_t hi = std::min<int64_t>(bounds[row].end - block.key, block.end);
    return {static_cast<uint64_t>(lo), static_cast<uint64_t>(std::max(lo, hi))};
  }
  bool tree_hides(const KeyBlock& block, uint32_t row, uint64_t lane) const {
    return tree_mask != nullptr && abi::tree_hides(tree_mask + own_token(row) * params->tree_stride,
                                                   mask, block.key + static_cast<int64_t>(lane));
  }
  bool touches_tree(const KeyBlock& block) const {
    return tree_mask != nullptr && block.key + block.end > abi::row_position<int64_t>(mask, 0);
  }

  // Calls take(block) for every block that some row sees a key of, oldest first. Bounds grow with
  // the row. False: the list was ended before.
  template <class Take>
  bool for_blocks(const Take& take) const {
    constexpr uint32_t kBlocksAtATime = 32;  // below 10 ms, for 64 rows of 512 coordinates
    const AttentionKernels& kernels = attention_kernels();
    BlockWalk walk(*params, table, bounds[0].begin, bounds[rows - 1].end);
    KeyBlock block;
    for (bool found = walk.next(block); found;) {
      if (task_ended()) return false;
      if (kernels.enter != nullptr) kernels.enter();
      for (uint32_t i = 0; i < kBlocksAtATime && found; ++i) {
        take(block);
        found = walk.next(block);
      }
      if (kernels.leave != nullptr) kernels.leave();
    }
    return true;
  }
};

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
