#pragma once
// Which keys a row of queries sees: causality and windows become a range, a tree mask hides keys
// inside it. Templates on the signed integer that positions are counted in: 32 bits where a kernel
// is short of registers, 64 elsewhere.
#include "abi/types.h"

namespace gyre::abi {

// What all rows of a call have in common.
template <class Int>
struct RowMask {
  Int length;  // keys, those of the call's own tokens included
  Int tokens;  // queries: the last of the sequence
  Int window;  // newest keys that a query sees, its own included; 0: all. See row_window
  bool causal;
};

template <class Int>
struct RowBounds {
  Int begin, end;
};

// A window that Int can count with. Larger ones see every key all the same: a 32-bit caller has
// lengths up to 2^31 - 17 and at most 16 tokens more than keys, a 64-bit one 2^62 of either.
template <class Int>
constexpr Int row_window(uint64_t window) {
  constexpr Int kMost =
      sizeof(Int) == 4 ? Int{0x7FFFFFFF - 16} : static_cast<Int>(uint64_t{1} << 62);
  return window < static_cast<uint64_t>(kMost) ? static_cast<Int>(window) : kMost;
}

// Number of the key that belongs to a token; negative where there are more tokens than keys.
template <class Int>
constexpr Int row_position(const RowMask<Int>& mask, Int token) {
  return mask.length - mask.tokens + token;
}

// Keys of [first, last), 0 <= first <= last <= length, that causality and window leave to a token.
// Both bounds grow with the token. begin > end never happens, begin == end means none.
template <class Int>
constexpr RowBounds<Int> row_bounds(const RowMask<Int>& mask, Int token, Int first, Int last) {
  const Int next = row_position(mask, token) + 1;
  const Int begin = mask.window != 0 ? next - mask.window : Int{0};
  const Int end = mask.causal ? next : mask.length;
  const Int low = begin < first ? first : begin, high = end < first ? first : end;
  return {low < last ? low : last, high < last ? high : last};
}

// A tree mask has a row for each token and a column for each key of the call's own, 0: hidden.
// Older keys have none.
template <class Int>
constexpr bool tree_hides(const uint8_t* row, const RowMask<Int>& mask, Int key) {
  const Int column = key - row_position(mask, Int{0});
  return column >= 0 && row[column] == 0;
}

}  // namespace gyre::abi
