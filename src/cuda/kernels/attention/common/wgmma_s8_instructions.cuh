#pragma once
// wgmma of Hopper GPUs over int8: 64 rows of a warpgroup, A as the fragments of mma.m16n8k32 in
// registers, B in shared memory with k contiguous. Sums lie as those of mma.m16n8: warp w has rows
// 16 w to 16 w + 15, tile t of columns is d[t].
#include "cuda/kernels/attention/common/wgmma.cuh"

namespace gyre::cuda {

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
#define GYRE_WGMMA_OF(type, columns, sums, a_b, p, ...)                                           \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " p                                          \
               ", 0;\n\t"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" columns "k32.s32." type ".s8 {" sums "}, " a_b \
               ", p;\n\t}"                                                                        \
               : __VA_ARGS__                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor), "r"(add ? 1 : 0))
#define GYRE_WGMMA_64(type)                                                              \
  GYRE_WGMMA_OF(type, "64", GYRE_D32, "{%32, %33, %34, %35}, %36", "%37", GYRE_SUM16(0), \
                GYRE_SUM16(4))
#define GYRE_WGMMA_128(type)                                                              \
  GYRE_WGMMA_OF(type, "128", GYRE_D64, "{%64, %65, %66, %67}, %68", "%69", GYRE_SUM16(0), \
                GYRE_SUM16(4), GYRE_SUM16(8), GYRE_SUM16(12))

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

#undef GYRE_WGMMA_OF
#undef GYRE_WGMMA_64
#undef GYRE_WGMMA_128
#undef GYRE_SUM16
#undef GYRE_SUM4

}  // namespace gyre::cuda
