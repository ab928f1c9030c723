#pragma once
// Which kernels take the sequences of a batch, by their numbers of rows; see abi::AttentionPhase.
#include "ops/paged_schedule.h"

namespace gyre {

// One command, or two, for each. Sequences of few rows have a phase of their own where a kernel for
// more would give them other bits.
std::vector<PhasePlan> plan_phases(const Recording& recording, const char* op,
                                   const abi::AttentionProblem& problem, const PagedBounds& bounds,
                                   bool has_prefill);

}  // namespace gyre
