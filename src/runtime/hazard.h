#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gyre/custom_kernel.h"
#include "runtime/kernel_use.h"

namespace gyre {

struct ByteRange {
  uint64_t begin = 0;
  uint64_t end = 0;  // one past the last byte; begin == end touches nothing
};

struct RangeAccess {
  ByteRange range;
  Access access = Access::read;
};

// Sorted, disjoint ranges. The common cases are inline: memory is mostly used in rising order, and
// read again.
class RangeSet {
 public:
  bool overlaps(const ByteRange& range) const {
    if (ranges_.empty() || range.begin >= ranges_.back().end ||
        range.end <= ranges_.front().begin) {
      return false;
    }
    return ranges_[first_ending_after(range.begin)].begin < range.end;
  }
  void insert(const ByteRange& range) {
    if (ranges_.empty() || range.begin >= ranges_.back().end) {
      ranges_.push_back(range);
      return;
    }
    const size_t at = first_ending_after(range.begin);
    const bool known = ranges_[at].begin <= range.begin && range.end <= ranges_[at].end;
    if (!known) insert_at(at, range);
  }
  void clear() { ranges_.clear(); }

 private:
  // No branch on the data: nobody could predict it.
  size_t first_ending_after(uint64_t address) const {
    size_t first = 0;
    for (size_t count = ranges_.size(); count > 0;) {
      const size_t half = count / 2;
      const bool skip = ranges_[first + half].end <= address;
      first += skip ? half + 1 : 0;
      count = skip ? count - half - 1 : half;
    }
    return first;
  }
  void insert_at(size_t at, const ByteRange& range);

  std::vector<ByteRange> ranges_;
};

// Decides which commands must wait. Commands since the last barrier form a group whose members may
// run at the same time; a command that reads what the group writes, or writes what the group
// touches, starts the next group. Addresses are compared, not storages: two wraps of one memory are
// seen as one.
class HazardTracker {
 public:
  struct Mark {
    size_t log, group;
  };

  bool add(std::span<const RangeAccess> accesses);  // true: this command needs a barrier before it
  Mark mark() const { return {log_.size(), group_}; }
  void rollback(const Mark& mark) noexcept;
  void clear();

 private:
  bool conflicts(std::span<const RangeAccess> accesses) const;
  void note(std::span<const RangeAccess> accesses);

  RangeSet reads_, writes_;       // of the current group
  std::vector<RangeAccess> log_;  // all accesses, for going back
  size_t group_ = 0;              // where the current group starts in log_
};

}  // namespace gyre
