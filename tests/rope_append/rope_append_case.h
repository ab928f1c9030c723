#pragma once

#include "gyre_test.h"
#include "kv_copy/kv_copy_case.h"
#include "op_case.h"

namespace gyre::test {

// One rope_append call as numbers, into pages or into a cache. Angles are quarter turns, norms and
// weights powers of two: nothing is rounded, so every bit that must be there is known.
struct RopeAppendCase {
  std::string name = {};
  KvFormat k = KvFormat::tq8;
  KvFormat v = KvFormat::tq4;
  DType dtype = DType::f32;
  uint64_t heads = 3;  // 0: k and v alone
  uint64_t kv_heads = 2, k_dim = 64, v_dim = 64;
  KvLayout layout = KvLayout::token_major;
  bool in_place = false;
  RopeOptions options = {};
  bool rotates = true, norm = false, weights = true, factors = false;
  uint64_t tokens = 5;
  // Pages if there are slots, one for each token.
  DType slot_type = DType::i64;
  std::vector<int64_t> slots = {};
  // Otherwise a cache.
  uint64_t sink_tokens = 0, tail = 0, body = 40, start = 21;
  uint64_t unseen = 0;  // tokens that the step has beyond those recorded

  bool paged() const { return !slots.empty(); }
};

OpCase make_case(const RopeAppendCase& numbers);

}  // namespace gyre::test
