#pragma once
// kv_extend: the state and the positions of a step.
#include "abi/kv_state.h"

namespace gyre::abi {

struct KvExtendSpec {
  uint8_t unused[8];
};

struct KvExtendParams {
  KvState state;
  uint64_t positions;  // how many: start, start + 1, ...
};

}  // namespace gyre::abi
