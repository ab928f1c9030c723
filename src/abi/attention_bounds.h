#pragma once
// Which keys a row of queries sees: causality and windows become a range, a tree mask hides keys
// inside it. Templates on the signed integer that positions are counted in: 32 bits where a kernel
// is short of registers, 64 elsewhere.
#include "abi/kv_state.h"

namespace gyre::abi {

// What all rows of a call have in common.
template <class Int>
struct RowMask {
  Int length;  // keys, those of the call's own tokens included
  Int tokens;  // queries: the last of the sequence
  Int window;  // newest keys that a query sees, its own included; 0: all. See row_window
  bool causal;
  // Which of a layer's keys these are. A query sees the first `sink_tokens` keys and the `tail`
  // newest up to its own in 16 bits, those between in the layer's formats; of keys before
  // tail_begin there is no 16-bit copy.
  KvSegment segment = kSegmentBody;
  Int sink_tokens = 0;
  Int tail = 0;  // 0: no tail
  Int tail_begin = 0;
};

template <class Int>
struct RowBounds {
  Int begin, end;
};

// A window that Int can count with. Larger ones see every key all the same: a 32-bit caller has
// at most 2^30 keys and 1024 tokens, a 64-bit one 2^62 of either.
template <class Int>
constexpr Int row_window(uint64_t window) {
  constexpr Int kMax =
      sizeof(Int) == 4 ? Int{0x7FFFFFFF - 1024} : static_cast<Int>(uint64_t{1} << 62);
  return window < static_cast<uint64_t>(kMax) ? static_cast<Int>(window) : kMax;
}

// With a KvState; a cache without one has a body alone.
template <class Int>
constexpr void fill_segment(GYRE_THREAD RowMask<Int>& mask, KvSegment segment,
                            const GYRE_PARAMS KvPlaces& places, uint64_t tail_begin) {
  mask.segment = segment;
  mask.sink_tokens = static_cast<Int>(places.sink_tokens);
  mask.tail = row_window<Int>(places.tail);
  mask.tail_begin = static_cast<Int>(tail_begin);
}

// Number of the key that belongs to a token; negative where there are more tokens than keys.
template <class Int>
constexpr Int row_position(const GYRE_THREAD RowMask<Int>& mask, Int token) {
  return mask.length - mask.tokens + token;
}

// The oldest key that a query sees in the 16-bit tail; `next` is the key after its own.
template <class Int>
constexpr Int tail_boundary(const GYRE_THREAD RowMask<Int>& mask, Int next) {
  if (mask.tail == 0) return mask.length;
  const Int newest = next - mask.tail, held = newest > mask.tail_begin ? newest : mask.tail_begin;
  return held > mask.sink_tokens ? held : mask.sink_tokens;
}

// Keys of [first, last), 0 <= first <= last <= length, that causality, window and segment leave to
// a token. Both bounds grow with the token. begin > end never happens, begin == end means none.
template <class Int>
constexpr RowBounds<Int> row_bounds(const GYRE_THREAD RowMask<Int>& mask, Int token, Int first,
                                    Int last) {
  const Int next = row_position(mask, token) + 1;
  Int begin = mask.window != 0 ? next - mask.window : Int{0};
  Int end = mask.causal ? next : mask.length;
  if (mask.segment == kSegmentSinks) {
    end = mask.sink_tokens < end ? mask.sink_tokens : end;
  } else if (mask.segment == kSegmentTail || mask.tail != 0 || mask.sink_tokens != 0) {
    const Int boundary = tail_boundary(mask, next);
    const Int oldest = mask.segment == kSegmentTail ? boundary : mask.sink_tokens;
    begin = begin < oldest ? oldest : begin;
    if (mask.segment == kSegmentBody && boundary < end) end = boundary;
    if (end < begin) end = begin;  // a window within the tail leaves nothing to the body
  }
  const Int low = begin < first ? first : begin, high = end < first ? first : end;
  return {low < last ? low : last, high < last ? high : last};
}

// A tree mask has a row for each token and a column for each key of the call's own, 0: hidden.
// Older keys have none.
template <class Int, class BytePointer>
constexpr bool tree_hides(BytePointer row, const GYRE_THREAD RowMask<Int>& mask, Int key) {
  const Int column = key - row_position(mask, Int{0});
  return column >= 0 && row[column] == 0;
}

}  // namespace gyre::abi
