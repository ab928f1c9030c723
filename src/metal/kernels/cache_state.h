#pragma once
// What a KvCache keeps in device memory, see abi/kv_state.h.
#include "abi/kv_state.h"
#include "metal/kernels/kernel.h"

namespace gyre {
namespace metal {

inline abi::KvState load_state(const device uchar* state) {
  const device ulong* const fields = pointer<ulong>(state);
  return {fields[0], fields[1], fields[2]};
}

}  // namespace metal
}  // namespace gyre
