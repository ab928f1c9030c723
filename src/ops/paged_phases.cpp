#include "ops/paged_phases.h"

#include "abi/kernels.h"
#include "ops/attention_latent.h"

namespace gyre {
namespace {

// The plans of a batch's phases; see abi::AttentionPhase.
std::vector<PhasePlan> plan_by_rows(const Recording& recording, const char* op,
                                    const abi::AttentionProblem& problem, const PagedBounds& bounds,
                                    bool has_prefill) {
  using abi::AttentionPhase;
  const uint64_t group = problem.heads / problem.kv_heads;
  const uint64_t fewest = bounds.min_query_length * group;
  const uint64_t max_rows = bounds.max_query_length * group;
  std::vector<PhasePlan> phases;
  const auto add = [&](AttentionPhase phase, AttentionPhase planned) {
    abi::AttentionProblem of = problem;
    of.phase = planned;
    abi::AttentionPlan plan = abi::attention_default_plan(of);
    recording.plan(kAttention, of, plan);
    phases.push_back({phase, plan});
  };
  if (problem.latent != 0) {
    add(AttentionPhase::all, AttentionPhase::all);
    require_latent_kernel(recording, op, problem, phases.front().plan);
    return phases;
  }
  if (max_rows >= abi::phase_fewest_rows(AttentionPhase::drafts)) {
    add(AttentionPhase::drafts, AttentionPhase::drafts);
    const uint32_t from = phases.front().plan.drafts;
    if (from != 0 && max_rows >= from) {
      const uint32_t draft_rows = abi::phase_max_rows(AttentionPhase::drafts);
      const AttentionPhase fewer = abi::phase_of_rows(0, from - 1);
      phases.front().phase = abi::phase_of_rows(fewest < from ? from : 0, draft_rows);
      if (fewest < from) add(fewer, fewer);
      if (has_prefill || max_rows > draft_rows)
        add(AttentionPhase::many_rows, AttentionPhase::prompt);
      return phases;
    }
    phases.clear();
  }
  add(AttentionPhase::decode, AttentionPhase::decode);
  if (!has_prefill && max_rows <= abi::kDecodePhaseRows) return phases;
  add(AttentionPhase::prompt, AttentionPhase::prompt);
  // One command where one kernel takes both.
  const abi::AttentionPlan &decode = phases[0].plan, &prompt = phases[1].plan;
  if (decode.kernel == abi::AttentionKernel::attention_decode || prompt.kernel != decode.kernel ||
      prompt.spec != decode.spec || prompt.reduce != decode.reduce)
    return phases;
  phases[0].phase = AttentionPhase::all;
  phases.resize(1);
  return phases;
}

}  // namespace

std::vector<PhasePlan> plan_phases(const Recording& recording, const char* op,
                                   const abi::AttentionProblem& problem, const PagedBounds& bounds,
                                   bool has_prefill) {
  std::vector<PhasePlan> phases = plan_by_rows(recording, op, problem, bounds, has_prefill);
  const uint64_t group = problem.heads / problem.kv_heads, fewest = bounds.min_query_length * group;
  for (size_t i = 0, count = phases.size(); i < count; ++i) {
    const uint32_t own = phases[i].plan.own_rows;
    if (own == 0 || fewest > own) continue;
    const abi::AttentionPhase whole = phases[i].phase;
    abi::AttentionProblem few = problem;
    few.phase = whole;
    few.max_query_length = static_cast<uint32_t>(own / group);
    abi::AttentionPlan plan = abi::attention_default_plan(few);
    recording.plan(kAttention, few, plan);
    phases.push_back({abi::phase_of_rows(abi::phase_fewest_rows(whole), own), plan});
    phases[i].phase = abi::phase_of_rows(own + 1, abi::phase_max_rows(whole));
  }
  return phases;
}

}  // namespace gyre
