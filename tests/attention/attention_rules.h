#pragma once
// What attention and attention_partial refuse, as changes to a call that would be fine.

#include <string>
#include <vector>

#include "op_case.h"

namespace gyre::test {

KvBuffer make_cache(FilledTensors& tensors, const KvShape& shape);

// A call that would be fine, for either op; each rule changes one thing about it.
struct AttentionCall {
  AttentionInputs in;
  AttentionOptions options;
  Tensor partial;
};

using AttentionChange = void (*)(AttentionCall&, FilledTensors&);

struct AttentionRule {
  const char* name;
  std::vector<std::string> message;
  AttentionChange change;
};

// Rules for what both ops take.
std::vector<AttentionRule> query_rules();
std::vector<AttentionRule> cache_rules();
std::vector<AttentionRule> option_rules();

}  // namespace gyre::test
