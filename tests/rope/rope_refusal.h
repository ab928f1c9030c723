#pragma once
// What rope and norm_rope refuse alike, as changes to a call that would be fine.

#include <string>
#include <vector>

#include "op_case.h"

namespace gyre::test {

struct RopeCall {
  RopeInputs in;
  RopeOptions options;
};

struct RopeRefusal {
  std::string name;
  std::vector<std::string> message;
  void (*change)(RopeCall&, FilledTensors&);
};

RopeCall good_rope_call(FilledTensors& tensors);

std::vector<RopeRefusal> rope_dim_refusals();
std::vector<RopeRefusal> rope_mode_refusals();
std::vector<RopeRefusal> rope_position_refusals();
std::vector<RopeRefusal> rope_tensor_refusals();
std::vector<RopeRefusal> rope_memory_refusals();
std::vector<RopeRefusal> rope_frequency_refusals();

std::vector<RopeRefusal> all_rope_refusals();

}  // namespace gyre::test
