// Steps that are not written yet, and who uses them: one encoder, one thread at a time.
#include <algorithm>
#include <thread>

#include "runtime/process.h"
#include "runtime/require.h"
#include "steps/log.h"

namespace gyre {

Steps::Steps(const char* owner) : owner_(owner), process_(process_generation()) {}

void Steps::require_encoder(const char* op, const void* list) const {
  require(list_ == nullptr || list_ == list, op, ": another encoder has calls on this ", owner_,
          " that are not submitted; a ", owner_,
          " takes calls from one encoder at a time: ", "submit() or clear() that one first");
}

void Steps::require_submitted(const char* op) const {
  require(list_ == nullptr, op, ": calls on the ", owner_,
          " are recorded in an encoder and not submitted; submit() comes first");
}

// Its index, or how many there are.
size_t Steps::find(uint64_t step) const {
  const auto found = std::ranges::lower_bound(unwritten_, step, {}, &Unwritten::step);
  const bool is_there = found != unwritten_.end() && found->step == step;
  return is_there ? static_cast<size_t>(found - unwritten_.begin()) : unwritten_.size();
}

StepOutcome Steps::outcome(uint64_t step) const {
  if (step == kLostStep) return StepOutcome::dropped;
  const size_t index = find(step);
  return index == unwritten_.size() ? StepOutcome::written : unwritten_[index].outcome;
}

void Steps::set_outcome(uint64_t step, StepOutcome outcome) noexcept {
  const size_t index = find(step);
  if (index != unwritten_.size() && unwritten_[index].outcome != StepOutcome::dropped)
    unwritten_[index].outcome = outcome;
}

void Steps::forget(uint64_t step) noexcept {
  std::erase_if(unwritten_, [&](const Unwritten& each) { return each.step == step; });
}

void Steps::release(const void* list) noexcept {
  if (list_ != list) return;
  list_ = nullptr;
  for (Unwritten& each : unwritten_) {
    if (each.outcome == StepOutcome::unsubmitted) each.outcome = StepOutcome::in_graph;
  }
}

StepsUse::StepsUse(const Steps& steps, const char* op)
    : thread_(steps.thread_), nested_(thread_.load() == std::this_thread::get_id()) {
  require(nested_ || enter(), op, ": the ", steps.owner_, " is in use by another thread; ",
          "threads take turns with a ", steps.owner_, ", its sequences and batches");
}

StepsUse::StepsUse(const Steps& steps) noexcept
    : thread_(steps.thread_), nested_(thread_.load() == std::this_thread::get_id()) {
  while (!nested_ && !enter()) {
    // A child of fork() has no other thread that would leave.
    nested_ = steps.process_ != process_generation();
    std::this_thread::yield();
  }
}

StepsUse::~StepsUse() {
  if (!nested_) thread_.store({}, std::memory_order_release);
}

bool StepsUse::enter() noexcept {
  std::thread::id nobody;
  return thread_.compare_exchange_strong(nobody, std::this_thread::get_id());
}

void UnwrittenTokens::begin(const Steps& steps, uint64_t next, uint64_t at) {
  const bool waits = steps.outcome(step) == StepOutcome::unsubmitted;
  *this = {next, waits ? std::min(start, at) : at};
}

bool UnwrittenTokens::is_dropped(const Steps& steps, uint64_t length) const {
  return length > start && steps.outcome(step) == StepOutcome::dropped;
}

void UnwrittenTokens::require_not_dropped(const char* op, const Steps& steps,
                                          uint64_t length) const {
  require(!is_dropped(steps, length), op, ": tokens from ", start,
          " on were recorded and dropped, or their load ended in the middle, and there are ",
          length, "; rollback() or clear() them");
}

void UnwrittenTokens::require_written(const char* op, const Steps& steps, uint64_t length) const {
  require_not_dropped(op, steps, length);
  require(length <= start || steps.outcome(step) != StepOutcome::in_graph, op, ": tokens from ",
          start, " on are in a graph that was not replayed");
}

void UnwrittenTokens::require_submitted(const char* op, const Steps& steps, uint64_t length) const {
  require_written(op, steps, length);
  require(length <= start || steps.outcome(step) == StepOutcome::written, op, ": tokens from ",
          start, " on are recorded and not submitted; submit() comes first");
}

}  // namespace gyre
