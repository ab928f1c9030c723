#pragma once
// The two products of a warpgroup's 64 rows, with wgmma on a Hopper and mma.sync elsewhere.
// Operands and sums lie alike for both. On a Hopper a product is only begun here, and ends at
// wait_for_product. T has a variant's constants: ManyRows, LatentTraits.
#include "cuda/kernels/attention/common/wgmma.cuh"
#include "cuda/kernels/instructions.cuh"

namespace gyre::cuda {

// Byte of an operand: chunks of 16 bytes, in rows of 128.
inline uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * 128 + ((chunk ^ row) & 7) * 16;
}
// As swizzled(), where a row has several panels of 128 bytes.
inline uint32_t operand_byte(uint32_t panel_bytes, uint32_t row, uint32_t chunk) {
  return chunk / 8 * panel_bytes + swizzled(row, chunk);
}

#if defined(GYRE_WGMMA)

// s = q k^T. `q`: the group's rows.
template <class T>
inline void begin_scores(const unsigned char* q, const unsigned char* k,
                         float (&s)[T::kKeyTiles][4]) {
  const uint64_t q_at = wgmma_operand(uniform_address(shared_address(q)), 0),
                 k_at = wgmma_operand(uniform_address(shared_address(k)), 0);
  wgmma_sums(s);
  wgmma_fence();
#pragma unroll
  for (uint32_t step = 0; step < T::kKDim / 16; ++step) {
    const uint32_t panel = step / 4, inside = step % 4 * 32;
    wgmma<T::kBf16K>(s, q_at + (panel * T::kLayout.q_panel + inside) / 16,
                     k_at + (panel * T::kLayout.k_panel + inside) / 16, step != 0);
  }
  wgmma_commit();
}

template <class T, uint32_t kColumns>
inline void add_columns(const uint32_t (&p)[T::kKeys / 16][4], uint64_t v, uint32_t first,
                        float (&o)[T::kVTiles][4]) {
#pragma unroll
  for (uint32_t step = 0; step < T::kKeys / 16; ++step) {
    // Levels: a row for each coordinate, keys inside it. Else a row for each key.
    const uint32_t at = T::kLevelsV ? step / 4 * T::kLayout.v_panel + first * 1024 + step % 4 * 32
                                    : first / 8 * T::kLayout.v_panel + step * 2048;
    wgmma_add<T::kBf16V, !T::kLevelsV, kColumns>(o, first, p[step], v + at / 16);
  }
}

// o += p v.
template <class T>
inline void begin_values(const uint32_t (&p)[T::kKeys / 16][4], const unsigned char* v,
                         float (&o)[T::kVTiles][4]) {
  const uint64_t at = wgmma_operand(uniform_address(shared_address(v)), T::kLayout.v_panel);
  constexpr uint32_t kWhole = T::kVDim / 128 * 128, kHalf = (T::kVDim - kWhole) / 64 * 64,
                     kRemaining = T::kVDim - kWhole - kHalf;
  wgmma_sums(o);
  wgmma_fence();
#pragma unroll
  for (uint32_t c = 0; c < kWhole; c += 128) add_columns<T, 128>(p, at, c / 8, o);
  if constexpr (kHalf != 0) add_columns<T, 64>(p, at, kWhole / 8, o);
  if constexpr (kRemaining != 0) add_columns<T, kRemaining>(p, at, (kWhole + kHalf) / 8, o);
  wgmma_commit();
}

template <uint32_t kTiles>
inline void wait_for_product(float (&sums)[kTiles][4]) {
  wgmma_wait();
  wgmma_sums(sums);
}

#else

// Where a lane's part of an operand is: `row` is the lane's, `chunk` 0 or 1. Of even chunks further
// on the swizzle is one XOR. Hidden from the compiler, which would spend minutes on the addresses.
struct OperandLane {
  SharedAddress row_at;
  uint32_t swizzle;

  OperandLane(const unsigned char* operand, uint32_t row, uint32_t chunk)
      : row_at(optimization_barrier(shared_address(operand) + row * 128)),
        swizzle(optimization_barrier(((chunk ^ row) & 7) * 16)) {}
  SharedAddress at(uint32_t panel_bytes, uint32_t chunk) const {
    return row_at + (chunk / 8 * panel_bytes + (swizzle ^ (chunk % 8 * 16)));
  }
};
// For two B fragments of an operand with k contiguous: 16 of its rows, 16 of k.
inline OperandLane operand_lane(const unsigned char* operand) {
  const uint32_t lane = threadIdx.x % kWarp;
  return {operand, lane % 8 + lane / 16 * 8, lane / 8 % 2};
}

template <bool kBf16>
inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kBf16) {
    mma_bf16(c, a, b0, b1);
  } else {
    mma_f16(c, a, b0, b1);
  }
}

template <class T>
inline void begin_scores(const unsigned char* q, const unsigned char* k,
                         float (&s)[T::kKeyTiles][4]) {
  const uint32_t lane = threadIdx.x % kWarp;
  const OperandLane rows(q, threadIdx.x / kWarp % 4 * 16 + lane % 16, lane / 16),
      keys = operand_lane(k);
#pragma unroll
  for (uint32_t i = 0; i < T::kKeyTiles * 4; ++i) s[i / 4][i % 4] = 0;
#pragma unroll
  for (uint32_t step = 0; step < T::kKDim / 16; ++step) {
    uint32_t a[4];
    ldmatrix(a, rows.at(T::kLayout.q_panel, step * 2));
    const SharedAddress from = keys.at(T::kLayout.k_panel, step * 2);
#pragma unroll
    for (uint32_t t = 0; t < T::kKeyTiles; t += 2) {
      uint32_t b[4];
      ldmatrix(b, from + t * 1024);
      multiply<T::kBf16K>(s[t], a, b[0], b[1]);
      multiply<T::kBf16K>(s[t + 1], a, b[2], b[3]);
    }
  }
}

template <class T>
inline void begin_values(const uint32_t (&p)[T::kKeys / 16][4], const unsigned char* v,
                         float (&o)[T::kVTiles][4]) {
  const uint32_t lane = threadIdx.x % kWarp;
  // Levels: a row for each coordinate. Else a row for each key, read transposed.
  const OperandLane values = T::kLevelsV ? operand_lane(v) : OperandLane(v, lane % 16, lane / 16);
#pragma unroll
  for (uint32_t step = 0; step < T::kKeys / 16; ++step) {
#pragma unroll
    for (uint32_t t = 0; t < T::kVTiles; t += 2) {
      uint32_t b[4];
      if constexpr (T::kLevelsV) {
        ldmatrix(b, values.at(T::kLayout.v_panel, step * 2) + t * 1024);
      } else {
        ldmatrix_transposed(b, values.at(T::kLayout.v_panel, t) + step * 2048);
      }
      multiply<T::kBf16V>(o[t], p[step], b[0], b[1]);
      multiply<T::kBf16V>(o[t + 1], p[step], b[2], b[3]);
    }
  }
}

template <uint32_t kTiles>
inline void wait_for_product(float (&)[kTiles][4]) {}

#endif

}  // namespace gyre::cuda
