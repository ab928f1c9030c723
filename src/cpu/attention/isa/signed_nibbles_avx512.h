#pragma once
// Codes of two bits and their signs, side by side in nibbles: indices of one look-up. For files
// compiled with AVX-512; all of it anonymous, so that each has its own copy.

#include "cpu/attention/isa/unpack_x86.h"

namespace gyre::cpu {
namespace {

// A byte has four codes, the first in the lowest bits. at[0] has the first and the third, at[1] the
// others: code, sign, and a clear bit. A look-up wants bit 7 of its index clear, and moving a
// nibble down brings bit 3 of the next byte there.
struct SignedNibbles {
  __m512i at[2];

  // The signs are in bits 0, 2, 4 and 6, and the other bits are clear.
  SignedNibbles(__m512i codes, __m512i signs) {
    const __m512i magnitudes = _mm512_set1_epi8(0x33);
    const __m512i odd = _mm512_srli_epi16(codes, 2);
    at[0] = _mm512_ternarylogic_epi64(codes, magnitudes, _mm512_slli_epi16(signs, 2), kChoose);
    at[1] = _mm512_ternarylogic_epi64(odd, magnitudes, signs, kChoose);
  }
  // An index of code kNth: its lowest three bits.
  template <uint32_t kNth>
  __m512i index() const {
    return kNth < 2 ? at[kNth % 2] : _mm512_srli_epi16(at[kNth % 2], 4);
  }

 private:
  static constexpr int kChoose = 0xE2;  // (a, b, c): b ? a : c
};

}  // namespace
}  // namespace gyre::cpu
