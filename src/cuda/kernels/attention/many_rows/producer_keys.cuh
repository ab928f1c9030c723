#pragma once
// Attention of many rows: what producers tell the consumers of a stage's keys.
#include "cuda/kernels/attention/many_rows/operand_scale.cuh"
#include "cuda/kernels/attention/many_rows/traits.cuh"

namespace gyre::cuda {

template <class T>
inline uint32_t producer_thread() {
  return threadIdx.x - T::kGroups * kGroupThreads;
}

template <class T>
struct ProducerKeys {
  static constexpr ManyRowsLayout kLayout = T::kLayout;

  // In registers, which 32 bits are enough for: shared memory is slow to ask for every item.
  abi::KvWalk<uint32_t> walk;

  explicit ProducerKeys(const RowTile& tile) {
    const abi::KvWalk<uint64_t>& w = tile.walk;
    const auto narrow = [](uint64_t x) { return static_cast<uint32_t>(x); };
    walk = {narrow(w.first_tile), narrow(w.tiles_a), narrow(w.tiles),    narrow(w.skip),
            narrow(w.end_a),      narrow(w.end_b),   narrow(w.starts_a), narrow(w.starts_b)};
  }

  // Numbers of the keys, counted from the walk's first; -1: none.
  void number(uint32_t stage) const {
    const uint32_t thread = producer_thread<T>();
    if (thread >= T::kKeys) return;
    const uint32_t number = walk.key_of(stage * T::kKeys + thread);  // kNoKey is -1
    reinterpret_cast<int32_t*>(key_info<T>(stage) + kLayout.numbers)[thread] =
        static_cast<int32_t>(number);
  }

  // The multipliers of the thread's key, as scales are stored; of slots without a key 1. V's also
  // have the largest that each warp saw. Consumers are told of any but 1.
  template <bool kOfK, bool kOfV>
  void hand_over(uint32_t stage, uint32_t k, uint32_t v) const {
    const uint32_t thread = producer_thread<T>(), key = thread % T::kKeys, warp = thread / kWarp;
    const bool there = walk.key_of(stage * T::kKeys + key) != walk.kNoKey;
    if (!there) k = v = kScaleOne;
    unsigned char* const to = key_info<T>(stage);
    if constexpr (kOfK) reinterpret_cast<float*>(to + kLayout.scales)[key] = value(k);
    if constexpr (kOfV) {
      const float multiplier = value(v);
      reinterpret_cast<float*>(to + kLayout.v_scales)[key] = multiplier;
      const uint32_t largest = __reduce_max_sync(
          kAll, there && is_finite(multiplier) ? __float_as_uint(multiplier) : 0u);
      if (thread % kWarp == 0) reinterpret_cast<uint32_t*>(to + kLayout.maxima)[warp] = largest;
    }
    const bool other = __any_sync(kAll, k != kScaleOne || v != kScaleOne) != 0;
    if (thread % kWarp == 0) to[kLayout.not_one + warp] = other ? 1 : 0;
  }

 private:
  static float value(uint32_t stored) { return __uint_as_float(stored << 15) * 0x1p-31f; }
};

}  // namespace gyre::cuda
