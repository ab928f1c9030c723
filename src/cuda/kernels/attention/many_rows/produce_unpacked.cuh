#pragma once
// Attention of many rows: what the producer warps do where a command ahead has unpacked K and V:
// they copy. Items as in produce.cuh.
#include "cuda/kernels/attention/many_rows/producer_keys.cuh"

namespace gyre::cuda {

template <class T>
class UnpackedProducer {
 public:
  static constexpr ManyRowsLayout kLayout = T::kLayout;

  explicit UnpackedProducer(ManyRowsState& state)
      : state_(state), keys_(state.tile), from_(state.unpacked) {}

  void run() {
    const uint32_t items = 2 * state_.tile.stage_count();
    SlotCursor<kLayout.slots> at, next;
    // Item m is copied, and item m - kAhead handed over.
    constexpr uint32_t kAhead = kLayout.ahead - 1;
#pragma unroll 1
    for (uint32_t m = 0; m < items + kAhead; ++m) {
      if (m >= kAhead) {
        copy_wait<kAhead - 1>();
        if (m == kAhead) hand_over_keys(0);
        fence_operands();
        arrive(&state_.full[at.slot]);
        at = at.next();
        // The next item's keys, ahead of its K: consumers wait for that.
        if ((m - kAhead) % 2 != 0) hand_over_keys((m - kAhead) / 2 + 1);
      }
      if (m < items) {
        wait_for_phase(&state_.empty[next.slot], next.phase ^ 1);
        const SharedAddress to =
            shared_address(dynamic_shared()) + kLayout.slot + next.slot * kLayout.slot_bytes;
        if (m == 0) copy_multipliers(0);
        if (m % 2 == 0) {
          copy_rows<T::kKDim, kLayout.k_panel>(to, from_.k);
        } else {
          copy_rows<T::kVDim, kLayout.v_panel>(to, from_.v);
          if (m + 1 < items) copy_multipliers(m / 2 + 1);  // no memory lies behind the last
        }
        next = next.next();
      }
      copy_commit();
    }
    copy_wait<0>();
  }

 private:
  // From an address: NVRTC may spend minutes on what pointer() returns.
  static void copy(SharedAddress to, uint64_t from) {
    copy_async<16>(to, reinterpret_cast<const void*>(from), true);
  }
  static uint32_t thread() { return producer_thread<T>(); }
  static unsigned char* multipliers(uint32_t stage) {
    return dynamic_shared() + kLayout.stored + stage % kKeyInfoStages * kLayout.stored_bytes +
           thread() / kWarp * kWarpMultipliers;
  }

  // Rows of K or V to their places in the operand.
  template <uint32_t kDim, uint32_t kPanel>
  static void copy_rows(SharedAddress to, uint64_t& rows) {
    using Copies = RowCopies<kDim>;
    constexpr uint32_t kChunks = Copies::kChunks, kLanes = Copies::kLanes, kRow = kDim * 2;
    const Copies of(thread());
    const uint32_t lane = thread() % kLanes;
    const uint64_t from = rows + (of.tile * 8 + of.row) * kRow + lane * 16;
    to += of.tile * 1024 + of.row * 128 + lane / 8 * kPanel + ((lane ^ of.row) & 7) * 16;
#pragma unroll
    for (uint32_t tile = 0; tile < T::kTiles; tile += Copies::kTilesAtOnce) {
#pragma unroll
      for (uint32_t c = 0; c < kChunks; c += kLanes)
        copy(to + tile * 1024 + c / 8 * kPanel, from + tile * 8 * kRow + c * 16);
    }
    rows += T::kKeys * kRow;
  }

  // A warp copies those of the keys that it hands over: four tiles of K's, then V's.
  void copy_multipliers(uint32_t stage) {
    const uint32_t lane = thread() % kWarp, tile = thread() / 8 % T::kTiles / 4 * 4 + lane % 4;
    const uint64_t from = lane < 4 ? from_.k_multipliers : from_.v_multipliers;
    if (lane < 8)
      copy(shared_address(multipliers(stage) + lane * 16), from + tile * kScaleTileBytes);
    from_.k_multipliers += T::kTiles * kScaleTileBytes;
    from_.v_multipliers += T::kTiles * kScaleTileBytes;
  }
  void hand_over_keys(uint32_t stage) const {
    __syncwarp();  // what its other lanes copied
    keys_.number(stage);
    const auto* const of = reinterpret_cast<const uint16_t*>(multipliers(stage)) + thread() % kWarp;
    keys_.template hand_over<true, true>(stage, of[0], of[kWarp]);
  }

  ManyRowsState& state_;
  const ProducerKeys<T> keys_;
  UnpackedTiles from_;  // of the next items
};

}  // namespace gyre::cuda
