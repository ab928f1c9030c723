#pragma once
// AVX-512's dot product of unsigned with signed bytes, for files compiled with it. All of it
// anonymous, so that each has its own copy.

#include <immintrin.h>

namespace gyre::cpu {
namespace {

// acc += the dot product of each four bytes. g++ 12 copies the accumulator of the intrinsic before
// and after, which takes twice as many instructions as the products.
inline void add_products(__m512i& acc, __m512i unsigned_bytes, __m512i signed_bytes) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(unsigned_bytes), "v"(signed_bytes));
}

}  // namespace
}  // namespace gyre::cpu
