#pragma once
// What rope and norm_rope refuse alike, as changes to a call that would be fine.

#include <vector>

#include "refused_call.h"

namespace gyre::test {

struct RopeCall {
  RopeInputs in;
  RopeOptions options;
};

using Rule = RuleOf<RopeCall>;

RopeCall good_rope_call(FilledTensors& tensors);

std::vector<Rule> rope_dim_refusals();
std::vector<Rule> rope_mode_refusals();
std::vector<Rule> rope_position_refusals();
std::vector<Rule> rope_tensor_refusals();
std::vector<Rule> rope_memory_refusals();
std::vector<Rule> rope_frequency_refusals();

std::vector<Rule> all_rope_refusals();

}  // namespace gyre::test
