#pragma once
// wgmma of Hopper GPUs: 64 rows of a warpgroup by operands in shared memory. Sums lie as those of
// mma.m16n8: warp w has rows 16 w to 16 w + 15, tile t of columns is d[t].
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/warp.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GYRE_WGMMA 1
#endif

namespace gyre::cuda {

#if !defined(GYRE_WGMMA)

inline void wgmma_fence() {}
inline void wgmma_commit() {}
inline void wgmma_wait() {}
inline void fence_operands() {}
inline SharedAddress uniform_address(SharedAddress at) { return at; }

#else

inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Shared memory that threads wrote, seen by wgmma.
inline void fence_operands() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// An address that all lanes have alike, as a shuffle: the compiler then adds offsets to it in
// uniform registers.
inline SharedAddress uniform_address(SharedAddress at) { return __shfl_sync(kAll, at, 0); }

// An operand in rows of 128 bytes, swizzled by 128 bytes; eight rows are 1024 bytes on. `panel`:
// bytes to the next 64 elements of a row where these are M or N; elsewhere it is not used.
inline uint64_t wgmma_operand(SharedAddress at, uint32_t panel) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{panel >> 4} << 16 | (at & 0x3FFFFu) >> 4;
}

// Sums may be touched from here on: the compiler does not know that wgmma writes them later.
template <uint32_t kTiles>
inline void wgmma_sums(float (&d)[kTiles][4]) {
#pragma unroll
  for (uint32_t i = 0; i < kTiles * 4; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

#define GYRE_SUM4(t) "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define GYRE_SUM16(t) GYRE_SUM4(t), GYRE_SUM4(t + 1), GYRE_SUM4(t + 2), GYRE_SUM4(t + 3)
// The operands of 8 to 64 sums; wgmma_s8_instructions.cuh has the same.
#define GYRE_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define GYRE_D16 GYRE_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define GYRE_D24 GYRE_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define GYRE_D32 GYRE_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define GYRE_D64                                                       \
  GYRE_D32                                                             \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44," \
  " %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d = or += a b, a and b in shared memory with k contiguous; 64 or 128 columns.
#define GYRE_WGMMA_SS_OF(type, columns, sums, a_b, p, ...)                          \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " p                            \
               ", 0;\n\t"                                                           \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type \
               " "                                                                  \
               "{" sums "}, " a_b ", p, 1, 1, 0, 0;\n\t}"                           \
               : __VA_ARGS__                                                        \
               : "l"(a), "l"(b), "r"(add ? 1 : 0))
#define GYRE_WGMMA_SS(...)                                    \
  if constexpr (kBf16) GYRE_WGMMA_SS_OF("bf16", __VA_ARGS__); \
  if constexpr (!kBf16) GYRE_WGMMA_SS_OF("f16", __VA_ARGS__)

template <bool kBf16>
inline void wgmma(float (&d)[8][4], uint64_t a, uint64_t b, bool add) {
  GYRE_WGMMA_SS("64", GYRE_D32, "%32, %33", "%34", GYRE_SUM16(0), GYRE_SUM16(4));
}
template <bool kBf16>
inline void wgmma(float (&d)[16][4], uint64_t a, uint64_t b, bool add) {
  GYRE_WGMMA_SS("128", GYRE_D64, "%64, %65", "%66", GYRE_SUM16(0), GYRE_SUM16(4), GYRE_SUM16(8),
                GYRE_SUM16(12));
}

// d += a b with a in registers, as the A fragments of mma.m16n8k16; b has k contiguous, or, if
// `kTransposed`, its columns. d is tiles [kFirst, kFirst + kColumns / 8) of all sums.
#define GYRE_WGMMA_RS_OF(type, transposed, columns, sums, a_b, ...)                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type \
               " "                                                                  \
               "{" sums "}, " a_b ", 1, 1, 1, " transposed ";"                      \
               : __VA_ARGS__                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define GYRE_WGMMA_RS(...)                                                         \
  if constexpr (kBf16 && kTransposed) GYRE_WGMMA_RS_OF("bf16", "1", __VA_ARGS__);  \
  if constexpr (kBf16 && !kTransposed) GYRE_WGMMA_RS_OF("bf16", "0", __VA_ARGS__); \
  if constexpr (!kBf16 && kTransposed) GYRE_WGMMA_RS_OF("f16", "1", __VA_ARGS__);  \
  if constexpr (!kBf16 && !kTransposed) GYRE_WGMMA_RS_OF("f16", "0", __VA_ARGS__)

template <bool kBf16, bool kTransposed, uint32_t kColumns, uint32_t kTiles>
inline void wgmma_add(float (&all)[kTiles][4], uint32_t first, const uint32_t (&a)[4], uint64_t b) {
  float(*const d)[4] = all + first;
  if constexpr (kColumns == 16) {
    GYRE_WGMMA_RS("16", GYRE_D8, "{%8, %9, %10, %11}, %12", GYRE_SUM4(0), GYRE_SUM4(1));
  } else if constexpr (kColumns == 32) {
    GYRE_WGMMA_RS("32", GYRE_D16, "{%16, %17, %18, %19}, %20", GYRE_SUM16(0));
  } else if constexpr (kColumns == 48) {
    GYRE_WGMMA_RS("48", GYRE_D24, "{%24, %25, %26, %27}, %28", GYRE_SUM16(0), GYRE_SUM4(4),
                  GYRE_SUM4(5));
  } else if constexpr (kColumns == 64) {
    GYRE_WGMMA_RS("64", GYRE_D32, "{%32, %33, %34, %35}, %36", GYRE_SUM16(0), GYRE_SUM16(4));
  } else if constexpr (kColumns == 128) {
    GYRE_WGMMA_RS("128", GYRE_D64, "{%64, %65, %66, %67}, %68", GYRE_SUM16(0), GYRE_SUM16(4),
                  GYRE_SUM16(8), GYRE_SUM16(12));
  }
}

#undef GYRE_WGMMA_SS
#undef GYRE_WGMMA_SS_OF
#undef GYRE_WGMMA_RS
#undef GYRE_WGMMA_RS_OF
#undef GYRE_SUM16
#undef GYRE_SUM4

#endif

}  // namespace gyre::cuda
