#pragma once
// What attention and attention_partial refuse, as changes to a call that would be fine.

#include <vector>

#include "refused_call.h"

namespace gyre::test {

KvBuffer make_cache(FilledTensors& tensors, const KvShape& shape);

// A call that would be fine, for either op; each rule changes one thing about it.
struct AttentionCall {
  AttentionInputs in;
  AttentionOptions options;
  Tensor partial;
};

using Rule = RuleOf<AttentionCall>;

// Rules for what both ops take.
std::vector<Rule> query_rules();
std::vector<Rule> cache_rules();
std::vector<Rule> option_rules();

}  // namespace gyre::test
