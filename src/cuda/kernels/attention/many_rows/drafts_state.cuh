#pragma once
// Attention of draft tokens: a variant's constants, its block's shared memory, and the order of a
// stage's keys.
#include "cuda/kernels/attention/common/schedule_run.cuh"
#include "cuda/kernels/attention/common/unpack.cuh"
#include "cuda/kernels/attention/common/wgmma.cuh"
#include "cuda/kernels/attention/many_rows/drafts_layout.cuh"
#include "cuda/kernels/block_shared.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::cuda {

template <uint32_t kKFormat, uint32_t kVFormat, uint32_t kKDim_, uint32_t kVDim_, uint32_t kGroups_>
struct Drafts {
  static constexpr uint32_t kK = kKFormat, kV = kVFormat, kKDim = kKDim_, kVDim = kVDim_;
  static constexpr uint32_t kGroups = kGroups_, kConsumers = kGroups * kGroupThreads;
  static constexpr DraftsLayout kLayout = drafts_layout(kK, kV, kKDim, kVDim, kGroups);
  static_assert(kLayout.groups != 0);
  static constexpr bool kLevelsK = true, kBf16K = false;  // LaneQuery reads them
  using FormK = LevelForm<kK, true>;
  using FormV = LevelForm<kV, true>;
  static constexpr uint32_t kKeyTiles = kDraftKeys / 8, kVTiles = kVDim / 8;  // of sums' columns
  // Rows of the operands: of K 64 or 128 coordinates of a key, of V the stage's keys.
  static constexpr uint32_t kKRow = kKDim < 128 ? 64 : 128, kVRow = kDraftKeys;

  // The order of a stage's keys. Weights go from score fragments to A fragments within a thread if
  // byte 16 h + 4 j + i of 32 is column 8 (2 h + i / 2) + 2 j + i % 2 of the scores. V's operand
  // has its tiles one behind the other as they unpack, so K's rows take the columns that follow.
  static constexpr uint32_t column(uint32_t position) {
    const uint32_t tile = position / 8, place = value_place<kV>(position % 8);
    return tile / 4 * 32 + (tile / 2 % 2 * 2 + place % 4 / 2) * 8 + (tile % 2 * 2 + place / 4) * 2 +
           place % 2;
  }
  static constexpr uint32_t position(uint32_t column) {
    const uint32_t eight = column / 8 % 4, j = column / 2 % 4;
    const uint32_t tile = column / 32 * 4 + eight / 2 * 2 + j / 2;
    return tile * 8 + value_token<kV>(j % 2 * 4 + eight % 2 * 2 + column % 2);
  }
  static constexpr bool orders_agree() {
    bool all = true;
    for (uint32_t i = 0; i < kDraftKeys; ++i) all = all && position(column(i)) == i;
    return all;
  }
  static_assert(orders_agree());
};

// What some stages alone ask of a row, in keys of the sequence.
struct DraftLimits {
  int32_t begin, end;  // that it sees
  int32_t position;    // its own
  float slope, factor;
};

struct DraftRun {
  abi::AttentionRun of;
  uint32_t invalid;  // 1: a page that does not exist
};

// Copies run ahead of unpacking and this of multiplying, by at most so many stages together, of
// which each may be another run's; a run's place is used again when all are done with it.
constexpr uint32_t kDraftRuns = 16;
static_assert(kDraftRuns > kDraftMaxSlots + kDraftMaxStored + 2);

// The call lies in shared memory: where they read it from the kernel's own parameters, NVRTC spends
// minutes on what their addresses may alias.
struct DraftsState {
  abi::AttentionParams call;
  Args args;
  DraftRun runs[kDraftRuns];
  PhaseBarrier described[kDraftRuns];
  PhaseBarrier full[kDraftMaxSlots], empty[kDraftMaxSlots];
  PhaseBarrier loaded[kDraftMaxStored];  // stages as they are stored
  float factor[2 * kDraftRows];          // of a row's scores, in base 2
  int32_t biases[2 * kDraftRows];        // what LevelForm's bias adds to a row's sums
  DraftLimits limits[2 * kDraftRows];
  SharedLevelTable table_k, table_v;
  float2 halves[2 * 8];  // {reference, sum} of rows of the second half of a stage's keys

  // Hidden from the compiler, which would spend minutes on what the address may be.
  DraftRun& run(uint32_t index) { return runs[optimization_barrier(index % kDraftRuns)]; }
  void wait_for_run(uint32_t index) const {
    wait_for_phase(&described[index % kDraftRuns], index / kDraftRuns % 2);
  }
};
static_assert(sizeof(DraftsState) <= kDraftStateBytes);

inline DraftsState& drafts_state() { return *reinterpret_cast<DraftsState*>(dynamic_shared()); }

// Stages of keys, counted from the sequence's key 0.
struct DraftStages {
  uint32_t begin, end;  // at least one
};
// A run's keys that some query sees.
inline DraftStages run_stages(const abi::AttentionRun& run) {
  const uint32_t shift = run.shift, from = run.first << shift;
  const uint32_t to = (run.first + run.count) << shift;
  const uint32_t low = from < run.begin ? run.begin : from, high = to < run.end ? to : run.end;
  const uint32_t begin = low / kDraftKeys, end = (high + kDraftKeys - 1) / kDraftKeys;
  return {optimization_barrier(begin), optimization_barrier(end > begin ? end : begin + 1)};
}

// Lanes leave the loop of a wait one by one: without this they stay apart.
inline void wait_together(const PhaseBarrier* barrier, uint32_t parity) {
  wait_for_phase(barrier, parity);
  __syncwarp();
}

// Slots of a ring in turn: which one, and which phase of its barriers. Hidden from the compiler,
// which would spend minutes on the addresses.
template <uint32_t kSlots>
struct DraftSlot {
  uint32_t index = 0, phase = 0;

  void step() {
    const bool last = index + 1 == kSlots;
    index = optimization_barrier(last ? 0 : index + 1);
    phase ^= last ? 1 : 0;
  }
};

// Operands of a slot, and the scales of its keys in the order of its columns: K's, then V's.
template <class T>
inline unsigned char* draft_slot(uint32_t index) {
  return dynamic_shared() + T::kLayout.slots_at + index * T::kLayout.slot_bytes;
}
template <class T>
inline float* draft_scales(uint32_t slot) {
  return reinterpret_cast<float*>(dynamic_shared() + T::kLayout.scales_at +
                                  slot * kDraftScaleBytes);
}

// Producers give some of their registers to the consumers.
template <class T>
struct DraftRegisters {
  static constexpr uint32_t kAtStart = 65536 / (T::kLayout.threads() * T::kLayout.blocks) / 8 * 8;
  static constexpr bool kShared = kAtStart < 232;
  static constexpr uint32_t kProducer = 64, kConsumer = T::kGroups == 1 ? 192 : 208;
  static_assert(!kShared || kProducer * kProducers + kConsumer * T::kConsumers <=
                                kAtStart * T::kLayout.threads());
  static void leave() {
#if defined(GYRE_WGMMA)
    if constexpr (kShared) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducer));
#endif
  }
  static void take() {
#if defined(GYRE_WGMMA)
    if constexpr (kShared) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumer));
#endif
  }
};

}  // namespace gyre::cuda
