#pragma once
// What every kernel's text begins with: its arguments, its Spec, numbers in memory. The same text
// is compiled by Apple's compiler and, with tests/metal_host's shim of the standard library, as
// C++. Included first: it says to abi/types.h whose compiler it is.
#include <metal_stdlib>

#include "abi/types.h"

using namespace metal;

// Bits are promised: a product and a sum are two roundings. Without fast math Apple's compiler
// still contracts; the first line is what its language documents, from 3.2 on.
#pragma METAL fp contract(off)
#pragma clang fp contract(off)

// A kernel's Spec: the pipeline is compiled for it.
#if defined(GYRE_METAL_HOST)
inline thread_local uint spec_low, spec_high;  // one for all texts: they share functions, too
#else
constant uint spec_low [[function_constant(0)]];
constant uint spec_high [[function_constant(1)]];
#endif

#if defined(threadgroup)  // a macro, which an attribute's name cannot be
#define GYRE_GROUP_MEMORY
#else
#define GYRE_GROUP_MEMORY [[threadgroup(0)]]
#endif

// buffer(0) are the Params, buffer(1 + i) is the i-th argument of the KernelInfo. Behind them:
// `arguments` has bit i where argument i is there, and bit 16 + i where it begins at a multiple of
// 16 bytes; `shared` is the thread group's memory.
#define GYRE_GRID_ARGUMENTS                                                                  \
  constant uint &arguments [[buffer(17)]], threadgroup uchar *shared GYRE_GROUP_MEMORY,      \
      uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],  \
      uint3 threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]], \
      uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]
#define GYRE_GRID \
  { group, groups, threads.x, index, lane, simdgroup, arguments, shared }

// Registers have no index: loops over it are unrolled, up to a bound that the Spec says,
// too. Emulation leaves them alone.
#if defined(GYRE_METAL_HOST)
#define GYRE_UNROLL
#else
#define GYRE_UNROLL _Pragma("clang loop unroll(full)")
#pragma clang diagnostic ignored "-Wpass-failed"  // before the Spec is known bounds are not, either
#endif

namespace gyre {
namespace metal {

struct Grid {
  uint3 group, groups;
  uint threads;  // of a group
  uint index;    // of the thread in its group
  uint lane, simdgroup;
  uint arguments;
  threadgroup uchar* shared;

  bool has(uint argument) const { return (arguments >> argument & 1) != 0; }
  bool aligned(uint argument) const { return (arguments >> (16 + argument) & 1) != 0; }
};

constant constexpr uint kLanes = 32;  // of a simdgroup

inline uint spec_byte(uint i) { return ((i < 4 ? spec_low : spec_high) >> (i % 4 * 8)) & 0xFF; }
inline uint spec_half(uint i) { return ((i < 2 ? spec_low : spec_high) >> (i % 2 * 16)) & 0xFFFF; }

// DType values.
constant constexpr uint kF32 = 0, kF16 = 1, kBf16 = 2;
inline uint float_bytes(uint dtype) { return dtype == kF32 ? 4 : 2; }

// What a pointer is cast to lies at a multiple of its size.
#if defined(GYRE_METAL_HOST)
#define GYRE_CHECK_ALIGNMENT(at, T)                      \
  if (reinterpret_cast<uintptr_t>(at) % alignof(T) != 0) \
  ::gyre::fibers::fail("a pointer is not aligned for " #T)
#else
#define GYRE_CHECK_ALIGNMENT(at, T)
#endif
template <class T>
device T* pointer(device uchar* at) {
  GYRE_CHECK_ALIGNMENT(at, T);
  return reinterpret_cast<device T*>(at);
}
template <class T>
const device T* pointer(const device uchar* at) {
  GYRE_CHECK_ALIGNMENT(at, T);
  return reinterpret_cast<const device T*>(at);
}

// f32, f16 and bf16 with the bits of gyre/dtype.h: nearest, ties to even, one NaN for each narrow
// type; f16 to f32 keeps a NaN's sign and payload and makes it quiet. Integers: what a GPU does
// with subnormal halves and NaN is its own affair.
inline float half_to_float(ushort bits) {
  const uint sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7FFFu;
  uint wide = (magnitude << 13) + 0x38000000u;
  if (magnitude < 0x400u) wide = as_type<uint>(static_cast<float>(magnitude) * 0x1p-24f);
  if (magnitude >= 0x7C00u) {
    wide = magnitude == 0x7C00u ? 0x7F800000u : 0x7FC00000u | (magnitude & 0x3FFu) << 13;
  }
  return as_type<float>(sign | wide);
}
inline ushort float_to_half(float value) {
  const uint pattern = as_type<uint>(value), magnitude = pattern & 0x7FFFFFFFu;
  uint rounded = 0x7C00u;
  if (magnitude < 0x38800000u) {
    rounded = as_type<uint>(as_type<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else if (magnitude < 0x47800000u) {
    rounded = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  }
  const ushort bits = static_cast<ushort>((pattern >> 16 & 0x8000u) | rounded);
  return magnitude > 0x7F800000u ? static_cast<ushort>(0x7E00) : bits;
}
inline float bfloat_to_float(ushort bits) { return as_type<float>(static_cast<uint>(bits) << 16); }
inline ushort float_to_bfloat(float value) {
  const uint pattern = as_type<uint>(value);
  const uint rounded = (pattern + 0x7FFFu + (pattern >> 16 & 1u)) >> 16;
  return (pattern & 0x7FFFFFFFu) > 0x7F800000u ? static_cast<ushort>(0x7FC0)
                                               : static_cast<ushort>(rounded);
}

inline float load_float(const device uchar* from, uint dtype, ulong i) {
  if (dtype == kF32) return pointer<float>(from)[i];
  const ushort bits = pointer<ushort>(from)[i];
  return dtype == kF16 ? half_to_float(bits) : bfloat_to_float(bits);
}
inline void store_float(device uchar* to, uint dtype, ulong i, float value) {
  if (dtype == kF32) {
    pointer<float>(to)[i] = value;
  } else {
    pointer<ushort>(to)[i] = dtype == kF16 ? float_to_half(value) : float_to_bfloat(value);
  }
}

// Codes and scales of a cache are read through these, so that tests can count the bytes.
#if defined(GYRE_METAL_HOST)
#define GYRE_COUNT_READ(bytes) ::gyre::metal_host::cache_bytes_read += (bytes)
#else
#define GYRE_COUNT_READ(bytes)
#endif
template <class T>
T read_cache(const device uchar* from) {
  GYRE_COUNT_READ(sizeof(T));
  return *pointer<T>(from);
}

// Bytes of a row by all threads of a group, or of `count` of them; wide: 16 at a time, both sides
// begin at multiples of 16.
inline void copy_bytes(const device uchar* from, device uchar* to, ulong bytes, bool wide,
                       ulong first, ulong step) {
  const ulong vectors = wide ? bytes / 16 : 0;
  for (ulong i = first; i < vectors; i += step) pointer<uint4>(to)[i] = pointer<uint4>(from)[i];
  for (ulong i = 16 * vectors + first; i < bytes; i += step) to[i] = from[i];
}

}  // namespace metal
}  // namespace gyre
