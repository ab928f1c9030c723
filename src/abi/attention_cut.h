#pragma once
// Where decoding cuts a sequence's keys into pieces, whose states are folded from the oldest on. A
// pure function of the sequence's own length: a row's bits must not depend on who shares its batch,
// nor on the number of threads or multiprocessors. Pieces begin at multiples of their size.
#include "abi/types.h"

namespace gyre::abi {

// A backend's constants. `fewest_keys` is a power of two, and so is every size of a piece.
struct AttentionCut {
  uint64_t fewest_keys;
  uint64_t most_pieces;
};

constexpr uint64_t attention_piece_keys(const GYRE_THREAD AttentionCut& cut, uint64_t length) {
  uint64_t keys = cut.fewest_keys;
  while (length / keys >= cut.most_pieces && length > keys * cut.most_pieces) keys *= 2;
  return keys;
}

// Pieces [first, end) of keys [begin, end of keys), 0 <= begin <= end_key <= length.
struct AttentionPieces {
  uint64_t keys;  // of a piece
  uint64_t first, end;
};
constexpr AttentionPieces attention_pieces(const GYRE_THREAD AttentionCut& cut, uint64_t length,
                                           uint64_t begin, uint64_t end_key) {
  const uint64_t keys = attention_piece_keys(cut, length);
  return {keys, begin / keys, begin < end_key ? (end_key + keys - 1) / keys : begin / keys};
}

}  // namespace gyre::abi
