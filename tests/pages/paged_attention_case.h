#pragma once

#include "gyre_test.h"
#include "kv_copy/kv_copy_case.h"
#include "op_case.h"
#include "pages/page_memory.h"

namespace gyre::test {

// How a sequence's numbers in device memory are damaged: its rows become NaN.
enum class Damage : uint8_t {
  none,
  negative_length,
  long_length,     // one more than max_kv_length
  many_queries,    // one more than max_query_length
  queries_beyond,  // the last sequence's range ends behind q
  negative_page,   // a needed entry
  page_beyond,
};

struct PagedSequence {
  uint64_t length = 0;  // keys, those of the queries included
  uint64_t tokens = 1;
  bool prompt = false;
  Damage damage = Damage::none;
};

// One call of attention over pages as numbers. Pages of no sequence and slots of no key hold bytes
// that are NaN in every dtype; entries that no query needs name pages that are not there.
struct PagedAttentionCase {
  std::string name;
  DType q = DType::f32, out = DType::f32;
  KvPageShape shape{KvFormat::tq8, KvFormat::tq4, 2, 64, 0, 16};
  uint64_t heads = 4;
  std::vector<PagedSequence> sequences = {};
  reference::KvLayout q_layout = reference::KvLayout::token_major;
  reference::KvLayout out_layout = reference::KvLayout::token_major;
  uint64_t page_gap = 0;                      // bytes between pages
  uint64_t table_gap = 0;                     // entries between rows
  uint64_t rows_before = 0, rows_behind = 0;  // of no sequence
  bool causal = true;
  uint64_t window = 0;
  float soft_cap = 0;
  bool lse = true, sink_logits = false, alibi_slopes = false;
};

OpCase make_case(const PagedAttentionCase& numbers);

}  // namespace gyre::test
