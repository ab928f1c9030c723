#pragma once
// Attention of many rows: a variant's constants, and its block's shared memory.
#include "cuda/kernels/attention/common/row_products.cuh"
#include "cuda/kernels/attention/common/row_tile.cuh"
#include "cuda/kernels/attention/common/softmax.cuh"
#include "cuda/kernels/attention/common/typed_memory.cuh"
#include "cuda/kernels/attention/common/unpack.cuh"
#include "cuda/kernels/attention/many_rows/drafts_layout.cuh"
#include "cuda/kernels/attention/many_rows/unpacked.cuh"
#include "cuda/kernels/block_shared.cuh"
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::cuda {

template <uint32_t kKFormat, uint32_t kVFormat, uint32_t kKDim_, uint32_t kVDim_, uint32_t kGpu>
struct ManyRows {
  static constexpr uint32_t kK = kKFormat, kV = kVFormat, kKDim = kKDim_, kVDim = kVDim_;
  static constexpr bool kUnpacked = kGpu == kManyRowsUnpacked;  // by a command ahead
  // Whether some of a batch may be unpacked for another command, which has the same tiles.
  static constexpr bool kTakesOthers =
      kGpu == kManyRowsHopper &&
      many_rows_layout(kKFormat, kVFormat, kKDim_, kVDim_, kManyRowsUnpacked).slots != 0;
  static constexpr ManyRowsLayout kLayout = many_rows_layout(kK, kV, kKDim, kVDim, kGpu);
  static_assert(kLayout.slots != 0);
  static_assert(!kTakesOthers ||
                (kLayout.keys == many_rows_layout(kK, kV, kKDim, kVDim, kManyRowsUnpacked).keys &&
                 kLayout.rows() ==
                     many_rows_layout(kK, kV, kKDim, kVDim, kManyRowsUnpacked).rows()));
  static constexpr bool kLevelsK = abi::kv_is_native(kK), kLevelsV = abi::kv_is_native(kV);
  // What the MMAs multiply: levels are f16, and so are queries and weights then.
  static constexpr bool kBf16K = kK == kFormatBf16, kBf16V = kV == kFormatBf16;
  static constexpr uint32_t kGroups = kLayout.groups, kKeys = kLayout.keys,
                            kThreads = kLayout.threads(), kRows = kLayout.rows();
  // Whether it takes tiles from the step schedule: not where attention_drafts does.
  static constexpr bool kTakesRuns =
      kGroups == 1 && !kUnpacked &&
      (kGpu != kManyRowsHalf || drafts_layout(kK, kV, kKDim, kVDim, 1).groups == 0);
  // V's multipliers come with K: weights ask for them before V's operand is needed.
  static constexpr bool kScalesWithKeys = kLevelsK && kLevelsV;
  static constexpr uint32_t kKeyTiles = kKeys / 8, kVTiles = kVDim / 8;  // of sums' columns
  static constexpr uint32_t kTiles = kKeys / abi::kKvTile;               // of a stage
  // f16 weights end below 2 to this: small ones would be subnormal.
  static constexpr float kWeightExponent = kBf16V ? 0.0f : 8.0f;
};

// As products see V's operand: unpacked by a command ahead, it has rows of keys.
template <class T>
struct ValueOperand : T {
  static constexpr bool kLevelsV = T::kLevelsV && !T::kUnpacked;
};

// What some stages alone ask of a row. Keys are counted from the walk's first.
struct RowLimits {
  int32_t begin, end;  // keys that it sees
  int32_t position;    // its own key
  float slope;
};

struct ManyRowsState {
  RowTile tile;
  abi::AttentionRun run;  // with a schedule: the one that the tile is of
  uint32_t merge_groups;  // 0: another block folds the work item's groups
  // Addresses of {values, reference, sum} of the tile's rows: where they go, 0: rows are finished;
  // those of the work item's older keys, which they are folded into first, 0: none.
  uint64_t states, older;
  UnpackedTiles unpacked;
  RowLimits limits[2 * kGroupRows];
  PhaseBarrier full[kMaxSlots], empty[kMaxSlots];
  PhaseBarrier of_roles[2];      // by role, for racecheck alone
  float factor[2 * kGroupRows];  // of a row's scores, in base 2
  uint64_t of_warps[16];
  SharedLevelTable table_k, table_v;
};
static_assert(sizeof(ManyRowsState) <= kManyRowsStateBytes);

// The multipliers and numbers of a stage's keys.
template <class T>
inline unsigned char* key_info(uint32_t stage) {
  return dynamic_shared() + T::kLayout.key_info +
         stage % kKeyInfoStages * T::kLayout.key_info_bytes;
}
inline ManyRowsState& block_state() { return *reinterpret_cast<ManyRowsState*>(dynamic_shared()); }

// Compiled for racecheck, all barriers that differ between the roles are mbarriers at which every
// thread arrives: it counts a thread's other barriers.
constexpr uint32_t kProducerRole = 0, kConsumerRole = 1;

// Barriers of a work tile. One thread.
template <class T>
inline void init_barriers(ManyRowsState& state) {
  constexpr uint32_t kConsumers = T::kGroups * kGroupThreads;
  for (uint32_t i = 0; i < T::kLayout.slots; ++i) {
    init_barrier(&state.full[i], kProducers);
    init_barrier(&state.empty[i], kConsumers / kWarp * kWarpArrivals);
  }
  if constexpr (kForRacecheck) {
    init_barrier(&state.of_roles[kProducerRole], kProducers);
    init_barrier(&state.of_roles[kConsumerRole], kConsumers);
  }
}
template <class T>
inline void end_barriers(ManyRowsState& state) {
  for (uint32_t i = 0; i < T::kLayout.slots; ++i) {
    invalidate_barrier(&state.full[i]);
    invalidate_barrier(&state.empty[i]);
  }
  if constexpr (kForRacecheck) {
    for (PhaseBarrier& barrier : state.of_roles) invalidate_barrier(&barrier);
  }
}

// The kThreads threads of a role synchronize, for the `time`-th time of a work tile.
template <uint32_t kRole, uint32_t kThreads>
inline void sync_role(ManyRowsState& state, uint32_t time) {
  if constexpr (kForRacecheck) {
    arrive(&state.of_roles[kRole]);
    wait_for_phase(&state.of_roles[kRole], time % 2);
  } else {
    sync_named_barrier<kThreads / kWarp>(kRole);
  }
}

// Producers give some of their registers to the consumers. What a block has is fixed when it
// starts: who asks for more waits forever.
template <class T>
struct RegisterShares {
  static constexpr bool kShared =
      T::kGroups == 2 || T::kLayout.blocks == 2;  // else all have enough
  static constexpr uint32_t kAtStart = 65536 / (T::kThreads * T::kLayout.blocks) / 8 * 8;
  static constexpr uint32_t kProducer = T::kGroups == 1 ? 80 : 72,
                            kConsumer = T::kGroups == 1 ? 176 : 216;
  static_assert(!kShared || kProducer * kProducers + kConsumer * T::kGroups * kGroupThreads <=
                                kAtStart * T::kThreads);
};
template <class T>
inline void leave_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shares = RegisterShares<T>;
  if constexpr (Shares::kShared)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shares::kProducer));
#endif
}
template <class T>
inline void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shares = RegisterShares<T>;
  if constexpr (Shares::kShared)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shares::kConsumer));
#endif
}

// How producers copy rows of 16-bit floats: eight or 16 threads to a row, so that what a thread
// copies differs by the tile alone. A warp has at most 32 keys of a stage, in passes.
template <uint32_t kDim>
struct RowCopies {
  static constexpr uint32_t kChunks = kDim / 8, kLanes = kChunks <= 8 ? 8 : 16,
                            kTilesAtOnce = kProducers / kLanes / 8, kOfWarp = kWarp / kLanes;
  uint32_t tile, row;  // of the pass

  // The rows that a producer thread copies.
  explicit RowCopies(uint32_t thread) : tile(thread / kLanes / 8), row(thread / kLanes % 8) {}
};

// Items in turn through a ring of slots: which slot, and which phase of its barriers.
template <uint32_t kSlots>
struct SlotCursor {
  uint32_t slot = 0, phase = 0;

  SlotCursor next() const {
    return slot + 1 == kSlots ? SlotCursor{0, phase ^ 1} : SlotCursor{slot + 1, phase};
  }
};

}  // namespace gyre::cuda
