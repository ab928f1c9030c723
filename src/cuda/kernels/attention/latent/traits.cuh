#pragma once
// Latent attention: a variant's constants, its block's shared memory, and where a work item's keys
// lie.
#include "abi/attention_bounds.h"
#include "abi/kv_walk.h"
#include "cuda/kernels/attention/common/unpack.cuh"
#include "cuda/kernels/attention/latent/layout.cuh"
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/kernel_args.cuh"

namespace gyre::cuda {

using enum abi::AttentionArg;

// `kBf16`: operands are of bf16, as latents, rotary parts and queries are; else of f16.
template <uint32_t kKFormat, uint32_t kVFormat, uint32_t kLatent, uint32_t kRotary,
          uint32_t kStageKeys, bool kBf16>
struct LatentTraits {
  static constexpr uint32_t kK = kKFormat, kV = kVFormat;  // of the latent, of the rotary part
  static constexpr uint32_t kLatentDim = kLatent, kRotaryDim = kRotary;
  static constexpr LatentLayout kLayout = latent_layout(kK, kV, kLatent, kRotary, kStageKeys);
  static_assert(kLayout.keys != 0);
  static constexpr bool kLevelsK = abi::kv_is_native(kK), kRotatedV = abi::kv_is_native(kV);
  // Whether stages are copied as they are stored: a copy's end is an arrival then.
  static constexpr bool kCopied = kBf16 || (kK == kFormatF16 && kV == kFormatF16);
  static_assert(!kBf16 || (kK == kFormatBf16 && kV == kFormatBf16));
  static constexpr uint32_t kKeys = kStageKeys, kTiles = kKeys / abi::kKvTile;
  static constexpr uint32_t kScales = kLatent / abi::kKvScaleBlock == 2 ? 2 : 1;  // of a latent row
  // What row_products.cuh asks for: scores over all coordinates, values over half of the latent's.
  static constexpr uint32_t kKDim = kLatent + kRotary, kVDim = kLatent / 2;
  static constexpr uint32_t kKeyTiles = kKeys / 8, kVTiles = kVDim / 8;
  static constexpr bool kBf16K = kBf16, kBf16V = kBf16, kLevelsV = false;
  // Weights in bf16 have half of the digits: what they leave is handed over, too.
  static constexpr uint32_t kWeightParts = kBf16 ? 2 : 1;

  // The latent's coordinate in a column of the operand: levels lie as they are unpacked.
  static uint32_t coordinate(uint32_t column) {
    if constexpr (kLevelsK) return key_coordinate<kK>(column / 32, column / 8 % 4, column % 8);
    return column;
  }
};

// Columns of a stage's operand are slots of the cache: `numbers` are their keys, counted from the
// walk's first, -1: none; `units` what their values are multiplied with, powers of two.
struct LatentState {
  PhaseBarrier full[kLatentSlots], empty[kLatentSlots];
  PhaseBarrier weights_full, weights_empty;
  PhaseBarrier done[2];                 // scores have ended every second work item
  uint32_t invalid[2];                  // a page of a work item does not exist
  uint32_t leaves[kLatentSlots];        // values of the stage leave f16's range
  uint32_t has_units[kLatentSlots][2];  // of 32 keys each, not 0: some unit is not 1
  alignas(16) float units[kLatentSlots][64];
  int32_t numbers[kLatentSlots][64];
  // Scales over the unit, as two f16 alike: of the latent's halves, and of the rotary part.
  uint32_t ratios[kLatentSlots][3][64];
  float rescale[kLatentRows];  // what sums are multiplied with before a stage's values are added
};
static_assert(sizeof(LatentState) <= kLatentStateBytes);

template <class T>
inline LatentState& latent_state() {
  return *reinterpret_cast<LatentState*>(dynamic_shared() + T::kLayout.state);
}
template <class T>
inline unsigned char* latent_slot(uint32_t slot) {
  return dynamic_shared() + T::kLayout.slot + slot * T::kLayout.slot_bytes;
}

// A stage in turn through the slots: which slot, and which phase of its barriers.
struct StageCount {
  uint32_t n = 0;
  uint32_t slot() const { return n % kLatentSlots; }
  uint32_t phase() const { return n / kLatentSlots % 2; }
};

// What causality, window and segment leave to a row.
inline abi::RowMask<int64_t> latent_mask(const abi::AttentionParams& p, const LatentWork& work) {
  abi::RowMask<int64_t> mask = {work.length, static_cast<int64_t>(work.tokens),
                                abi::row_window<int64_t>(p.window), p.causal != 0};
  abi::fill_segment(mask, p.segment, p.places, work.tail_begin);
  return mask;
}

// The walk over a work item's keys, and the key that it begins with.
struct LatentWalk : abi::KvWalk<uint32_t> {
  int32_t first_key = 0;
  uint32_t base_tile = 0;  // over pages: the tile of the sequence at position 0

  template <uint32_t kKeys>
  static LatentWalk of(const abi::AttentionParams& p, const LatentWork& work) {
    LatentWalk w = {};
    const auto begin = static_cast<uint32_t>(work.begin), end = static_cast<uint32_t>(work.end);
    const uint32_t base = begin / kKeys * kKeys;
    if (p.table.page_tokens != 0) {
      w.first_key = work.begin;
      w.base_tile = base / abi::kKvTile;
      w.skip = begin - base;
      w.end_a = w.skip + (end - begin);
      w.tiles = w.tiles_a = (w.end_a + abi::kKvTile - 1) / abi::kKvTile;
      w.end_b = w.tiles_a * abi::kKvTile;
      w.starts_a = end - begin < kKeys ? 0 : end - begin - kKeys + 1;
      return w;
    }
    const uint32_t first = end - base <= p.capacity ? base : begin;
    const uint64_t slot = abi::kv_slot(p.ring_start + first, p.capacity);
    static_cast<abi::KvWalk<uint32_t>&>(w) = abi::kv_walk<uint32_t>(
        static_cast<uint32_t>(p.capacity), static_cast<uint32_t>(slot), end - first, kKeys);
    w.first_key = static_cast<int32_t>(first);
    return w;
  }
  template <uint32_t kKeys>
  uint32_t stages() const {
    return (tiles * abi::kKvTile + kKeys - 1) / kKeys;
  }
};

// Where the state of a row of q over a split lies.
inline float* latent_row_state(const abi::AttentionParams& p, const Args& args,
                               const LatentScratch& scratch, uint64_t row, uint32_t split) {
  return pointer<float>(args.at[arg_partial] + scratch.states) +
         (row * p.splits + split) * latent_state_floats(p.k.head_dim);
}

}  // namespace gyre::cuda
