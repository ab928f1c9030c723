#include "ops/paged_schedule.h"

#include "abi/kernels.h"
#include "runtime/require.h"

namespace gyre {
namespace {

// A hash of all numbers that a schedule depends on.
uint32_t schedule_key(const abi::AttentionScheduleParams& p, const Tensor& tail_begin) {
  const abi::AttentionParams& call = p.call;
  const uint64_t numbers[] = {p.group.fewest_keys,
                              p.group.max_splits,
                              p.runs,
                              p.blocks,
                              p.rows,
                              call.tokens,
                              call.kv_heads,
                              call.group,
                              call.window,
                              call.causal,
                              static_cast<uint64_t>(call.phase),
                              call.segment,
                              call.places.sink_tokens,
                              call.places.tail,
                              call.table.sequences,
                              call.table.max_kv_length,
                              call.table.max_query_length,
                              tail_begin.defined() ? tail_begin.address() : 0};
  uint64_t hash = 0;
  for (const uint64_t x : numbers) hash = (hash ^ x) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
  return static_cast<uint32_t>(hash >> 32) | 1;
}

}  // namespace

PagedSchedules::PagedSchedules(const std::vector<PhasePlan>& phases,
                               const abi::AttentionParams& call, const PagedBounds& bounds,
                               const Tensor& tail_begin) {
  for (const auto& [phase, plan] : phases) {
    abi::AttentionScheduleParams p{};
    const abi::AttentionSchedulePlan& wanted = plan.schedule;
    if (wanted.blocks != 0) {
      p.call = call;
      p.call.phase = phase;
      p.group = wanted.group;
      p.blocks = wanted.blocks, p.rows = wanted.rows;
      p.runs = abi::schedule_max_runs(phase, bounds.sequences, call.kv_heads, call.tokens,
                                      bounds.max_query_length, call.group, p.rows, p.blocks);
      p.key = schedule_key(p, tail_begin);
    }
    params_.push_back(p);
  }
}

uint64_t PagedSchedules::words(size_t phase) const {
  const abi::AttentionScheduleParams& p = params_[phase];
  // Runs are read by 16 bytes.
  return p.blocks == 0 ? 0 : (abi::schedule_words(p.blocks, p.runs) + 3) / 4 * 4;
}
uint64_t PagedSchedules::words() const {
  uint64_t all = 0;
  for (size_t i = 0; i < params_.size(); ++i) all += words(i);
  return all;
}
Tensor PagedSchedules::part(const Tensor& all, size_t phase) const {
  uint64_t before = 0;
  for (size_t i = 0; i < phase; ++i) before += words(i);
  return all.slice(0, before, words(phase));
}

void PagedSchedules::check(const PagedCall& call) const {
  const Tensor& s = call.schedule;
  require(s.dtype() == DType::f32 && s.rank() == 1 && s.is_contiguous(), call.op,
          ": schedule must be what attention_schedule() returned, got ", s.dtype(), " ", s.shape());
  require(s.elements() >= words(), call.op, ": schedule was made for a smaller batch: it has ",
          s.elements(), " words, this call's has ", words());
}

void PagedSchedules::dispatch(Recording& recording, const PagedCall& call, size_t phase,
                              const Tensor& to) const {
  recording.dispatch(
      kAttentionSchedule, abi::AttentionScheduleSpec{}, params_[phase],
      {&to, &call.kv_lengths, &call.cu_seqlens_q, &call.is_prefill, &call.keys.tail_begin});
}

Tensor PagedSchedules::shared(Recording& recording, const Device& device, const PagedCall& call,
                              size_t phase) const {
  const CommandList& list = recording.list();
  // A list that was rolled back, or another list, has no such command.
  const auto is_listed = [&](const ListedSchedule& s) {
    if (s.command >= list.commands.size()) return false;
    const Command& command = list.commands[s.command];
    return command.pipeline->kernel == &kAttentionSchedule.info &&
           list.args_of(command)[0] == s.memory.address() &&
           static_cast<const abi::AttentionScheduleParams*>(list.params_of(command))->key == s.key;
  };
  std::vector<ListedSchedule>& schedules = *call.schedules;
  for (ListedSchedule& s : schedules) {
    if (s.key != key(phase) || s.memory.elements() < words(phase)) continue;
    if (is_listed(s)) return s.memory;
    s.command = list.commands.size();
    dispatch(recording, call, phase, s.memory);
    return s.memory;
  }
  schedules.push_back(
      {key(phase), list.commands.size(), device.tensor(DType::f32, {words(phase)})});
  dispatch(recording, call, phase, schedules.back().memory);
  return schedules.back().memory;
}

}  // namespace gyre
