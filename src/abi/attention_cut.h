#pragma once
// Where decoding cuts a sequence's keys into splits, whose states are folded from the oldest on. A
// pure function of the sequence's own length: a row's bits must not depend on who shares its batch,
// nor on the number of threads or multiprocessors. Splits begin at multiples of their size.
#include "abi/types.h"

namespace gyre::abi {

// A backend's constants. `fewest_keys` is a power of two, and so is every size of a split.
struct AttentionCut {
  uint64_t fewest_keys;
  uint64_t max_splits;
};

constexpr uint64_t sequence_split_keys(const GYRE_THREAD AttentionCut& cut, uint64_t length) {
  uint64_t keys = cut.fewest_keys;
  while (length / keys >= cut.max_splits && length > keys * cut.max_splits) keys *= 2;
  return keys;
}

// Splits [first, end) of keys [begin, end of keys), 0 <= begin <= end_key <= length.
struct AttentionSplits {
  uint64_t keys;  // of a split
  uint64_t first, end;
};
constexpr AttentionSplits sequence_splits(const GYRE_THREAD AttentionCut& cut, uint64_t length,
                                          uint64_t begin, uint64_t end_key) {
  const uint64_t keys = sequence_split_keys(cut, length);
  return {keys, begin / keys, begin < end_key ? (end_key + keys - 1) / keys : begin / keys};
}

}  // namespace gyre::abi
