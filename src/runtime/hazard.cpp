#include "runtime/hazard.h"

#include <algorithm>

namespace gyre {
namespace {

bool overlaps_any(const std::vector<ByteRange>& ranges, size_t first, const ByteRange& range) {
  return std::any_of(ranges.begin() + static_cast<ptrdiff_t>(first), ranges.end(),
                     [&](const ByteRange& other) {
                       return range.begin < other.end && other.begin < range.end;
                     });
}

}  // namespace

bool HazardTracker::conflicts(const RangeAccess& access) const {
  if (access.range.begin == access.range.end) return false;
  if (overlaps_any(writes_, group_writes_, access.range)) return true;
  return access.access != Access::read && overlaps_any(reads_, group_reads_, access.range);
}

bool HazardTracker::add(std::span<const RangeAccess> accesses) {
  const bool full =
      reads_.size() - group_reads_ + writes_.size() - group_writes_ + accesses.size() > kMaxGroup;
  const bool barrier = full || std::any_of(accesses.begin(), accesses.end(),
                                           [&](const RangeAccess& a) { return conflicts(a); });
  if (barrier) {
    group_reads_ = reads_.size();
    group_writes_ = writes_.size();
  }
  for (const RangeAccess& access : accesses) {
    if (access.range.begin == access.range.end) continue;
    // A write conflicts with every later access, so a read_write range needs no second entry.
    (access.access == Access::read ? reads_ : writes_).push_back(access.range);
  }
  return barrier;
}

HazardTracker::Mark HazardTracker::mark() const {
  return {reads_.size(), writes_.size(), group_reads_, group_writes_};
}

void HazardTracker::rollback(const Mark& mark) {
  reads_.resize(mark.reads);
  writes_.resize(mark.writes);
  group_reads_ = mark.group_reads;
  group_writes_ = mark.group_writes;
}

void HazardTracker::clear() { rollback({}); }

}  // namespace gyre
