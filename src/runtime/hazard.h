#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/kernels.h"

namespace gyre {

struct ByteRange {
  uint64_t begin = 0;
  uint64_t end = 0;  // one past the last byte; begin == end touches nothing
};

struct RangeAccess {
  ByteRange range;
  Access access;
};

// Decides which commands must wait. Commands since the last barrier form a group whose members may run
// at the same time; a command that reads what the group writes, or writes what the group touches, starts
// the next group. Addresses are compared, not storages: two wraps of one memory are seen as one.
class HazardTracker {
 public:
  // Position to return to. Entries are only ever appended, so going back is truncation.
  struct Mark {
    size_t reads, writes, group_reads, group_writes;
  };

  bool add(std::span<const RangeAccess> accesses);  // true: this command needs a barrier before it
  Mark mark() const;
  void rollback(const Mark& mark);
  void clear();

 private:
  // Scanning a longer group costs more than the barrier it might save.
  static constexpr size_t kMaxGroup = 128;

  bool conflicts(const RangeAccess& access) const;

  std::vector<ByteRange> reads_, writes_;
  size_t group_reads_ = 0, group_writes_ = 0;  // where the current group starts
};

}  // namespace gyre
