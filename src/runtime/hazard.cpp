#include "runtime/hazard.h"

#include <algorithm>

namespace gyre {

void RangeSet::insert_at(size_t at, const ByteRange& range) {
  const auto first = ranges_.begin() + static_cast<ptrdiff_t>(at);
  auto last = first;
  ByteRange merged = range;
  for (; last != ranges_.end() && last->begin < range.end; ++last) {
    merged.begin = std::min(merged.begin, last->begin);
    merged.end = std::max(merged.end, last->end);
  }
  if (first == last) {
    ranges_.insert(first, range);
  } else {
    *first = merged;
    ranges_.erase(first + 1, last);
  }
}

bool HazardTracker::conflicts(std::span<const RangeAccess> accesses) const {
  for (const RangeAccess& access : accesses) {
    if (access.range.begin == access.range.end) continue;
    if (writes_.overlaps(access.range)) return true;
    if (access.access != Access::read && reads_.overlaps(access.range)) return true;
  }
  return false;
}

void HazardTracker::note(std::span<const RangeAccess> accesses) {
  for (const RangeAccess& access : accesses) {
    if (access.range.begin == access.range.end) continue;
    // A write conflicts with every later access, so read_write needs no second entry.
    (access.access == Access::read ? reads_ : writes_).insert(access.range);
  }
}

bool HazardTracker::add(std::span<const RangeAccess> accesses) {
  const bool barrier = conflicts(accesses);
  // First: what throws after it leaves a longer log, by which rollback() knows that the sets may
  // lack something.
  const size_t logged = log_.size();
  log_.insert(log_.end(), accesses.begin(), accesses.end());
  if (barrier) {
    reads_.clear();
    writes_.clear();
    group_ = logged;
  }
  note(accesses);
  return barrier;
}

// Takes no memory: the sets have held these ranges before, in this order.
void HazardTracker::rollback(const Mark& mark) noexcept {
  if (log_.size() == mark.log) return;
  log_.resize(mark.log);
  group_ = mark.group;
  reads_.clear();
  writes_.clear();
  note(std::span(log_).subspan(group_));
}

void HazardTracker::clear() {
  log_.clear();
  group_ = 0;
  reads_.clear();
  writes_.clear();
}

}  // namespace gyre
