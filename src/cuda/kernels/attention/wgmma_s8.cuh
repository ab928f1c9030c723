#pragma once
// wgmma of Hopper GPUs over int8: 64 rows of a warpgroup, A as the fragments of mma.m16n8k32 in
// registers, B in shared memory with k contiguous. Sums lie as those of mma.m16n8: warp w has rows
// 16 w to 16 w + 15, tile t of columns is d[t]. On the host they are there at once.
#include "cuda/kernels/attention/wgmma.cuh"

namespace gyre::cuda {

// Byte of an operand in rows of 64 or 128 bytes: chunks of 16 bytes, XOR swizzle. What wgmma reads
// begins at a multiple of 1024 bytes.
template <uint32_t kRowBytes>
constexpr uint32_t swizzled_byte(uint32_t row, uint32_t chunk) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  const uint32_t by = kRowBytes == 128 ? row & 7 : row / 2 & 3;
  return row * kRowBytes + (chunk ^ by) * 16;
}

#if defined(GYRE_CUDA_HOST)

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

#else

// An operand of 8 times kTiles rows; eight of them are 8 kRowBytes on.
template <uint32_t kRowBytes>
struct WgmmaOperand {
  uint64_t descriptor;
};
// `offset` from an address that several operands share: they share its part of the descriptor.
template <uint32_t kRowBytes>
inline WgmmaOperand<kRowBytes> wgmma_operand(SharedAddress at, uint32_t offset) {
  constexpr uint64_t kSwizzle = uint64_t{kRowBytes == 128 ? 1 : 2} << 62,
                     kEightRows = uint64_t{8 * kRowBytes >> 4} << 32;
  return {kSwizzle | kEightRows | ((at & 0x3FFFFu) >> 4) + (offset >> 4)};
}

// Sums may be touched from here on: the compiler does not know that wgmma writes them later.
template <uint32_t kTiles>
inline void wgmma_sums(int32_t (&d)[kTiles][4]) {
#pragma unroll
  for (uint32_t i = 0; i < kTiles * 4; ++i) asm volatile("" : "+r"(d[i / 4][i % 4]));
}

#define GYRE_SUM4(t) "+r"(d[t][0]), "+r"(d[t][1]), "+r"(d[t][2]), "+r"(d[t][3])
#define GYRE_SUM16(t) GYRE_SUM4(t), GYRE_SUM4(t + 1), GYRE_SUM4(t + 2), GYRE_SUM4(t + 3)
#define GYRE_WGMMA_64(type)                                                    \
  asm volatile(                                                                \
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"                       \
      "wgmma.mma_async.sync.aligned.m64n64k32.s32." type                       \
      ".s8 "                                                                   \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "     \
      "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, " \
      "%29, %30, %31}"                                                         \
      ", {%32, %33, %34, %35}, %36, p;\n\t}"                                   \
      : GYRE_SUM16(0), GYRE_SUM16(4)                                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor), "r"(add ? 1 : 0))
#define GYRE_WGMMA_128(type)                                                   \
  asm volatile(                                                                \
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"                       \
      "wgmma.mma_async.sync.aligned.m64n128k32.s32." type                      \
      ".s8 "                                                                   \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "     \
      "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, " \
      "%29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, " \
      "%43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, " \
      "%57, %58, %59, %60, %61, %62, %63}"                                     \
      ", {%64, %65, %66, %67}, %68, p;\n\t}"                                   \
      : GYRE_SUM16(0), GYRE_SUM16(4), GYRE_SUM16(8), GYRE_SUM16(12)            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor), "r"(add ? 1 : 0))

// d = or += a b. A: int8_t or uint8_t.
template <class A, uint32_t kTiles, uint32_t kRowBytes>
inline void wgmma_s8(int32_t (*d)[4], const uint32_t (&a)[4], const WgmmaOperand<kRowBytes>& b,
                     bool add) {
  static_assert(kTiles == 8 || kTiles == 16);
  constexpr bool kSigned = static_cast<A>(-1) < 0;
  if constexpr (kTiles == 8 && kSigned) GYRE_WGMMA_64("s8");
  if constexpr (kTiles == 8 && !kSigned) GYRE_WGMMA_64("u8");
  if constexpr (kTiles == 16 && kSigned) GYRE_WGMMA_128("s8");
  if constexpr (kTiles == 16 && !kSigned) GYRE_WGMMA_128("u8");
}

#undef GYRE_WGMMA_64
#undef GYRE_WGMMA_128
#undef GYRE_SUM16
#undef GYRE_SUM4

#endif

}  // namespace gyre::cuda
