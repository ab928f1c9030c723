#pragma once
// Instructions without a name in C++: tensor-core products, copies that do not wait, shared memory.
// Fragments as in the PTX manual, with g = lane / 4 and j = lane % 4: of A (16 x k) a lane has rows
// g and g + 8, of B (k x 8) column g, of C (16 x 8) rows g and g + 8, columns 2j and 2j + 1.
#include "abi/types.h"
#include "convert.cuh"

namespace gyre::cuda {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kAll = 0xFFFFFFFFu;

#if defined(GYRE_CUDA_HOST)

inline unsigned char* dynamic_shared() { return cuda_host::dynamic_shared(); }
inline uint32_t dynamic_shared_bytes() { return cuda_host::dynamic_shared_bytes(); }

inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_host::mma16(c, a, b0, b1, [](uint16_t bits) { return to_float(Half{bits}); });
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_host::mma16(c, a, b0, b1, [](uint16_t bits) { return to_float(BFloat16{bits}); });
}
inline void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_host::mma8(c, a, b0, b1);
}
inline void mma_s8_u8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_host::mma8<uint8_t>(c, a, b0, b1);
}
inline void load_transposed(uint32_t (&a)[4], const void* row) { cuda_host::ldmatrix(a, row); }
template <uint32_t kBytes>
inline void copy_async(void* to, const void* from, bool present) {
  if (present) std::memcpy(to, from, kBytes);
  if (!present) std::memset(to, 0, kBytes);
}
inline void copy_commit() {}
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t select) {
  return __byte_perm(a, b, select);
}
template <uint32_t kLeft>
inline void copy_wait() {}
inline uint32_t opaque(uint32_t x) { return x; }
inline uint32_t keep(uint32_t x, uint32_t*) { return x; }
inline float load_fresh(const float* from) { return *from; }
inline float2 load_fresh(const float2* from) { return *from; }
// Subnormal results are 0, as on the device.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? 0.0f : x; }
inline float exp2_fast(float x) { return flushed(std::exp2(x)); }
inline float reciprocal(float x) { return flushed(1.0f / x); }
// Two f16 less two others, where the differences are integers.
inline uint32_t subtract_halves(uint32_t a, uint32_t b) {
  const auto one = [](uint32_t x, uint32_t y) -> uint32_t {
    return from_float<Half>(to_float(Half{static_cast<uint16_t>(x)}) -
                            to_float(Half{static_cast<uint16_t>(y)}))
        .bits;
  };
  return one(a & 0xFFFF, b & 0xFFFF) | one(a >> 16, b >> 16) << 16;
}

#else

inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char bytes[];
  return bytes;
}
inline uint32_t dynamic_shared_bytes() {
  uint32_t bytes;
  asm("mov.u32 %0, %dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}
inline uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}

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
// Four 8 x 8 matrices of 16 bits, transposed; lanes 8 m to 8 m + 7 name the rows of matrix m.
inline void load_transposed(uint32_t (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address(row))
               : "memory");
}
// Absent bytes become zeros; `from` is not read then.
template <uint32_t kBytes>
inline void copy_async(void* to, const void* from, bool present) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(present ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(present ? kBytes : 0), "n"(kBytes)
                 : "memory");
  }
}
// Bytes of b and a by the four low nibbles of `select`; one with its top bit set spreads the sign
// of the byte instead, which __byte_perm does not promise.
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t select) {
  uint32_t c;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(select));
  return c;
}
inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <uint32_t kLeft>
inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
// The same number, of which the compiler knows nothing: it spends minutes on how addresses follow
// from nested minima.
inline uint32_t opaque(uint32_t x) {
  asm("" : "+r"(x));
  return x;
}
// The same number, which is kept in a register from here on: constants and addresses would be made
// anew wherever they are used. `place`, in shared memory, is the lane's own for a moment: what was
// there may have changed.
inline uint32_t keep(uint32_t x, uint32_t* place) {
  asm volatile("st.volatile.shared.u32 [%1], %0;" ::"r"(x), "r"(shared_address(place)) : "memory");
  asm volatile("ld.volatile.shared.u32 %0, [%1];"
               : "=r"(x)
               : "r"(shared_address(place))
               : "memory");
  return x;
}
// What another block wrote: not from this multiprocessor's own cache.
inline float load_fresh(const float* from) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}
inline float2 load_fresh(const float2* from) {
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from) : "memory");
  return x;
}
// Relative error 2^-23, of a number that is neither subnormal nor beyond 2^126.
inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Relative error 2^-22; NaN stays NaN.
inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
inline uint32_t subtract_halves(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

#endif

template <class T>
inline T* keep(T* pointer, uint32_t* place) {
  const auto bits = reinterpret_cast<uint64_t>(pointer);
  return reinterpret_cast<T*>(uint64_t{keep(static_cast<uint32_t>(bits), place)} |
                              uint64_t{keep(static_cast<uint32_t>(bits >> 32), place)} << 32);
}

// What a 16-bit cache holds, by its KvFormat.
template <uint32_t kFormat>
struct HalfType {
  using type = Half;
  static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_f16(c, a, b0, b1);
  }
};
template <>
struct HalfType<2> {
  using type = BFloat16;
  static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_bf16(c, a, b0, b1);
  }
};

}  // namespace gyre::cuda
