#pragma once
// How rope's grid is cut: plain functions of params, for kernels and for those who launch them. A
// simdgroup takes a item: some heads of one token, several where there are many tokens.
#include "abi/rope.h"

namespace gyre {
namespace metal {

GYRE_CONSTANT uint32_t kRopeRows = 4;         // heads of a item, at most
GYRE_CONSTANT uint32_t kRopeSimdgroups = 4;   // of a group
GYRE_CONSTANT uint64_t kRopeManyTokens = 64;  // from there on a item takes kRopeRows

inline uint32_t rope_item_rows(const GYRE_PARAMS abi::RopeParams& p) {
  return p.tokens < kRopeManyTokens ? 1 : kRopeRows;
}
inline uint64_t rope_items(const GYRE_PARAMS abi::RopeParams& p,
                           const GYRE_PARAMS abi::RopeStream& s) {
  return (s.heads + rope_item_rows(p) - 1) / rope_item_rows(p);
}

}  // namespace metal
}  // namespace gyre
