#pragma once
// wgmma of Hopper GPUs: 64 rows of a warpgroup by operands in shared memory. Sums lie as those of
// mma.m16n8: warp w has rows 16 w to 16 w + 15, tile t of columns is d[t].
#include "cuda/kernels/ptx.cuh"
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

// d = or += a b, a and b in shared memory with k contiguous; 64 or 128 columns.
#define GYRE_SUM4(t) "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define GYRE_SUM16(t) GYRE_SUM4(t), GYRE_SUM4(t + 1), GYRE_SUM4(t + 2), GYRE_SUM4(t + 3)
#define GYRE_WGMMA_SS_64(type)                                                          \
  asm volatile(                                                                         \
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"                                \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                       \
      " "                                                                               \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "         \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}" \
      ", %32, %33, p, 1, 1, 0, 0;\n\t}"                                                 \
      : GYRE_SUM16(0), GYRE_SUM16(4)                                                    \
      : "l"(a), "l"(b), "r"(add ? 1 : 0))
#define GYRE_WGMMA_SS_128(type)                                                          \
  asm volatile(                                                                          \
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"                                 \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                       \
      " "                                                                                \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"  \
      ", %64, %65, p, 1, 1, 0, 0;\n\t}"                                                  \
      : GYRE_SUM16(0), GYRE_SUM16(4), GYRE_SUM16(8), GYRE_SUM16(12)                      \
      : "l"(a), "l"(b), "r"(add ? 1 : 0))

template <bool kBf16>
inline void wgmma(float (&d)[8][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (kBf16) {
    GYRE_WGMMA_SS_64("bf16");
  } else {
    GYRE_WGMMA_SS_64("f16");
  }
}
template <bool kBf16>
inline void wgmma(float (&d)[16][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (kBf16) {
    GYRE_WGMMA_SS_128("bf16");
  } else {
    GYRE_WGMMA_SS_128("f16");
  }
}

// d += a b with a in registers, as the A fragments of mma.m16n8k16; b has k contiguous, or, if
// `kTransposed`, its columns. d is tiles [kFirst, kFirst + kColumns / 8) of all sums.
#define GYRE_WGMMA_RS_16(type, transposed)                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type \
               " "                                                         \
               "{%0, %1, %2, %3, %4, %5, %6, %7}"                          \
               ", {%8, %9, %10, %11}, %12, 1, 1, 1, " transposed ";"       \
               : GYRE_SUM4(0), GYRE_SUM4(1)                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define GYRE_WGMMA_RS_32(type, transposed)                                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type              \
               " "                                                                      \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}" \
               ", {%16, %17, %18, %19}, %20, 1, 1, 1, " transposed ";"                  \
               : GYRE_SUM16(0)                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define GYRE_WGMMA_RS_48(type, transposed)                                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n48k16.f32." type "." type               \
               " "                                                                       \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23}"                                 \
               ", {%24, %25, %26, %27}, %28, 1, 1, 1, " transposed ";"                   \
               : GYRE_SUM16(0), GYRE_SUM4(4), GYRE_SUM4(5)                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define GYRE_WGMMA_RS_64(type, transposed)                                                       \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                       \
               " "                                                                               \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "         \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}" \
               ", {%32, %33, %34, %35}, %36, 1, 1, 1, " transposed ";"                           \
               : GYRE_SUM16(0), GYRE_SUM16(4)                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define GYRE_WGMMA_RS_128(type, transposed)                                                       \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                       \
               " "                                                                                \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"  \
               ", {%64, %65, %66, %67}, %68, 1, 1, 1, " transposed ";"                            \
               : GYRE_SUM16(0), GYRE_SUM16(4), GYRE_SUM16(8), GYRE_SUM16(12)                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <bool kBf16, bool kTransposed, uint32_t kColumns, uint32_t kTiles>
inline void wgmma_add(float (&all)[kTiles][4], uint32_t first, const uint32_t (&a)[4], uint64_t b) {
  float(*const d)[4] = all + first;
  if constexpr (kColumns == 16) {
    if constexpr (kBf16 && kTransposed) GYRE_WGMMA_RS_16("bf16", "1");
    if constexpr (kBf16 && !kTransposed) GYRE_WGMMA_RS_16("bf16", "0");
    if constexpr (!kBf16 && kTransposed) GYRE_WGMMA_RS_16("f16", "1");
    if constexpr (!kBf16 && !kTransposed) GYRE_WGMMA_RS_16("f16", "0");
  }
  if constexpr (kColumns == 32) {
    if constexpr (kBf16 && kTransposed) GYRE_WGMMA_RS_32("bf16", "1");
    if constexpr (kBf16 && !kTransposed) GYRE_WGMMA_RS_32("bf16", "0");
    if constexpr (!kBf16 && kTransposed) GYRE_WGMMA_RS_32("f16", "1");
    if constexpr (!kBf16 && !kTransposed) GYRE_WGMMA_RS_32("f16", "0");
  }
  if constexpr (kColumns == 48) {
    if constexpr (kBf16 && kTransposed) GYRE_WGMMA_RS_48("bf16", "1");
    if constexpr (kBf16 && !kTransposed) GYRE_WGMMA_RS_48("bf16", "0");
    if constexpr (!kBf16 && kTransposed) GYRE_WGMMA_RS_48("f16", "1");
    if constexpr (!kBf16 && !kTransposed) GYRE_WGMMA_RS_48("f16", "0");
  }
  if constexpr (kColumns == 64) {
    if constexpr (kBf16 && kTransposed) GYRE_WGMMA_RS_64("bf16", "1");
    if constexpr (kBf16 && !kTransposed) GYRE_WGMMA_RS_64("bf16", "0");
    if constexpr (!kBf16 && kTransposed) GYRE_WGMMA_RS_64("f16", "1");
    if constexpr (!kBf16 && !kTransposed) GYRE_WGMMA_RS_64("f16", "0");
  }
  if constexpr (kColumns == 128) {
    if constexpr (kBf16 && kTransposed) GYRE_WGMMA_RS_128("bf16", "1");
    if constexpr (kBf16 && !kTransposed) GYRE_WGMMA_RS_128("bf16", "0");
    if constexpr (!kBf16 && kTransposed) GYRE_WGMMA_RS_128("f16", "1");
    if constexpr (!kBf16 && !kTransposed) GYRE_WGMMA_RS_128("f16", "0");
  }
}

#undef GYRE_WGMMA_SS_64
#undef GYRE_WGMMA_SS_128
#undef GYRE_WGMMA_RS_16
#undef GYRE_WGMMA_RS_32
#undef GYRE_WGMMA_RS_48
#undef GYRE_WGMMA_RS_64
#undef GYRE_WGMMA_RS_128
#undef GYRE_SUM16
#undef GYRE_SUM4

#endif

}  // namespace gyre::cuda
