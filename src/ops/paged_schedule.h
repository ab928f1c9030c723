#pragma once
// The step schedules of attention over pages: which block of a kernel works on which keys
// (abi/attention_schedule.h), one for each phase of a batch whose kernel reads one.

#include <vector>

#include "ops/paged_attention.h"

namespace gyre {

// Bounds on what is in device memory.
struct PagedBounds {
  uint64_t sequences, min_query_length, max_query_length, max_kv_length;
};

// A command for some of a batch's sequences.
struct PhasePlan {
  abi::AttentionPhase phase;
  abi::AttentionPlan plan;
};

class PagedSchedules {
 public:
  PagedSchedules(const std::vector<PhasePlan>& phases, const abi::AttentionParams& call,
                 const PagedBounds& bounds, const Tensor& tail_begin);

  // 32-bit words of all schedules, which lie one behind the other, and of one; 0: none.
  uint64_t words() const;
  uint64_t words(size_t phase) const;
  uint32_t key(size_t phase) const { return params_[phase].key; }
  Tensor part(const Tensor& all, size_t phase) const;

  // Refuses a schedule that cannot be the call's.
  void check(const PagedCall& call) const;
  void dispatch(Recording& recording, const PagedCall& call, size_t phase, const Tensor& to) const;
  // That of an earlier command of the same list, or a new one, in call.schedules.
  Tensor shared(Recording& recording, const Device& device, const PagedCall& call,
                size_t phase) const;

 private:
  std::vector<abi::AttentionScheduleParams> params_;
};

}  // namespace gyre
