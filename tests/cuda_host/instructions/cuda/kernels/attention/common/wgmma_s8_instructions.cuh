#pragma once
// src/cuda/kernels/attention/common/wgmma_s8_instructions.cuh on fibers: sums are there at once.
#include "cuda/kernels/attention/common/wgmma.cuh"

namespace gyre::cuda {

template <uint32_t kRowBytes>
struct WgmmaOperand {
  SharedAddress at;
};
template <uint32_t kRowBytes>
inline WgmmaOperand<kRowBytes> wgmma_operand(SharedAddress at, uint32_t offset) {
  return {at + offset};
}
template <uint32_t kTiles>
inline void wgmma_sums(int32_t (&)[kTiles][4]) {}

template <class A, uint32_t kTiles, uint32_t kRowBytes>
inline void wgmma_s8(int32_t (*d)[4], const uint32_t (&a)[4], const WgmmaOperand<kRowBytes>& b,
                     bool add) {
  unsigned char* const shared = dynamic_shared();
  const auto begin = static_cast<uint32_t>(b.at - shared);
  cuda_host::with_operands({a[0], a[1], a[2], a[3]}, [&](const auto* lanes) {
    const uint32_t lane = threadIdx.x % kWarp;
    for (uint32_t i = 0; i < kTiles * 4; ++i) {
      const uint32_t row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      int32_t& sum = d[i / 4][i % 4];
      if (!add) sum = 0;
      for (uint32_t k = 0; k < 32; ++k) {
        const uint64_t x = lanes[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2];
        uint32_t at = begin + column * kRowBytes + k;
        at ^= (at >> 7 & (kRowBytes == 128 ? 7u : 3u)) << 4;
        sum += static_cast<A>(x >> (k % 4 * 8)) * static_cast<int8_t>(shared[at]);
      }
    }
  });
}

}  // namespace gyre::cuda
