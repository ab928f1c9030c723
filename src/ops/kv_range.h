#pragma once

#include <cstdint>

#include "gyre/write.h"

namespace gyre {

// Which tokens of a source go to which slots.
struct KvSlotRange {
  uint64_t first_token = 0;
  uint64_t tokens = 0;  // at most capacity; 0: nothing to do
  uint64_t first_slot = 0;
};

// Source range, then capacity and position; all in 64 bits. More tokens than a ring has slots: only
// the last ones survive, so only they are in the range. `op` and `source` (k or v) are for
// messages.
KvSlotRange checked_kv_range(const char* op, const char* source, uint64_t available,
                             uint64_t capacity, const KvRange& options);

}  // namespace gyre
