#pragma once
// PTX instructions without a C++ name: MMA, byte permutes, access to global memory, and barriers
// for the compiler. block_instructions.cuh has those of shared memory. Fragments as in the PTX
// manual, with g = lane / 4 and j = lane % 4: of A (16 x k) a lane has rows g and g + 8, of B (k x
// 8) column g, of C (16 x 8) rows g and g + 8, columns 2j and 2j + 1.
#include "abi/types.h"

namespace gyre::cuda {

inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
inline void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
inline void mma_s8_u8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// PRMT: bytes of b and a by the four low nibbles of `select`. A nibble with its top bit set
// replicates the sign of the byte instead, which __byte_perm does not promise.
inline uint32_t rotate_right(uint32_t x, uint32_t by) { return __funnelshift_r(x, x, by); }
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t select) {
  uint32_t c;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(select));
  return c;
}
// x >> 16 as a dot product: permutes, shifts and logic share one pipe, IDP has another.
inline uint32_t upper_half(uint32_t x) {
  uint32_t y;
  asm("dp2a.lo.u32.u32 %0, %1, %2, 0;" : "=r"(y) : "r"(x), "r"(0x0100));
  return y;
}
// sum + x * weight, or sum where the weight is 0, even if x is infinite. Predicated: a branch would
// wait for each weight.
inline float fma_weighted(float x, float weight, float sum) {
  asm("{\n\t.reg .pred p;\n\tsetp.neu.f32 p, %2, 0f00000000;\n\t"
      "@p fma.rn.f32 %0, %1, %2, %0;\n\t}"
      : "+f"(sum)
      : "f"(x), "f"(weight));
  return sum;
}
// -1 less one half of x: the lower 16 bits are that half with all bits inverted. Dot products, too.
inline uint32_t inverted_lower(uint32_t x) {
  uint32_t y;
  asm("dp2a.lo.u32.s32 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x00FF), "r"(-1));
  return y;
}
inline uint32_t inverted_upper(uint32_t x) {
  uint32_t y;
  asm("dp2a.lo.u32.s32 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0xFF00), "r"(-1));
  return y;
}
// Optimization barrier: the compiler loses what it knows about x. It would spend minutes on how
// addresses follow from nested minima.
inline uint32_t optimization_barrier(uint32_t x) {
  asm("" : "+r"(x));
  return x;
}
// Pins x in a register: the compiler would rematerialize constants and addresses at every use. A
// shuffle from the lane itself is opaque to it.
inline uint32_t pin(uint32_t x) {
  asm volatile("shfl.sync.idx.b32 %0, %0, %1, 0x1f, 0xffffffff;" : "+r"(x) : "r"(threadIdx.x % 32));
  return x;
}
// Code-motion barrier: nothing that depends on x is computed before this place.
inline uint32_t code_motion_barrier(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
inline uint64_t code_motion_barrier(uint64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
// Aborts the kernel with an error.
inline void trap() { __trap(); }
// Returns the value before. Releases what this thread wrote and observed, to the whole GPU, and
// acquires what the threads before it released. By address: NVRTC may spend minutes on what
// pointer() returns.
inline uint32_t atomic_add_acq_rel(uint64_t address, uint32_t x) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(x)
               : "memory");
  return before;
}
// 32 or 16 bits, predicated: after a branch the load would be waited for at once.
inline uint32_t load_bits(uint64_t row, uint32_t index, bool wide) {
  uint32_t bits;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t"
      "@p ld.global.b32 %0, [%1];\n\t@!p ld.global.u16 %0, [%1];\n\t}"
      : "=r"(bits)
      : "l"(row + uint64_t{index} * (wide ? 4 : 2)), "r"(wide ? 1 : 0));
  return bits;
}
// Reads what another block wrote: from L2, not from L1.
template <class T>
inline T load_l2(uint64_t from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  T x;
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.x), "=f"(x.y)
                 : "l"(from)
                 : "memory");
  } else {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from)
                 : "memory");
  }
  return x;
}
// Relative error 2^-22; NaN stays NaN.
inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 2 ulp for b from 2^-126 to 2^126.
inline float divide_fast(float a, float b) { return __fdividef(a, b); }
inline uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
inline uint32_t max_u16x2(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

}  // namespace gyre::cuda
