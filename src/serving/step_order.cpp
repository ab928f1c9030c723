#include "serving/step_order.h"

#include <algorithm>
#include <utility>

#include "runtime/require.h"

namespace gyre {
namespace {

// Numbers of a note: its serial number, the batch, and the step; of a begin() the base, of an
// append() also the layer.
enum Kind : uint32_t { kBegin, kAppend, kAttend };

uint64_t serial_of(const CommandNote& note) { return note.number[0]; }
uint64_t batch_of(const CommandNote& note) { return note.number[1]; }
uint64_t layer_of(const CommandNote& note) { return note.number[3]; }
uint64_t base_of(const CommandNote& note) { return note.number[2]; }
uint64_t step_of(const CommandNote& note) {
  return note.kind == kBegin ? serial_of(note) : note.number[2];
}

}  // namespace

uint64_t StepOrder::add_batch(uint64_t layers) {
  Batch made;
  made.replayed.resize(layers);
  const uint64_t number = next();
  batches_.emplace(number, std::move(made));
  return number;
}

void StepOrder::remove_batch(uint64_t batch) noexcept {
  batches_.at(batch).open = false;
  batches_.at(batch).removed = true;
  forget_removed();
}

// While no list waits, the only ones to name a batch are graphs, which are then refused.
void StepOrder::forget_removed() noexcept {
  if (pending_.empty())
    std::erase_if(batches_, [](const auto& each) { return each.second.removed; });
}

bool StepOrder::take_lost(uint64_t batch) { return std::exchange(batches_.at(batch).lost, false); }

CommandNote StepOrder::begin_note(uint64_t batch, uint64_t base) {
  return {0, kBegin, {next(), batch, base, 0}};
}
CommandNote StepOrder::append_note(uint64_t batch, uint64_t step, uint64_t layer) {
  return {0, kAppend, {next(), batch, step, layer}};
}
CommandNote StepOrder::attend_note(uint64_t batch, uint64_t step) {
  return {0, kAttend, {next(), batch, step, 0}};
}

void StepOrder::recorded(const CommandNote& note, const void* list) {
  const auto its = [&](const auto& entry) { return entry.list == list; };
  // All or nothing.
  pending_.reserve(pending_.size() + 1);
  unfinished_.reserve(unfinished_.size() + 1);
  if (std::ranges::none_of(pending_, its)) pending_.push_back({list, serial_of(note)});
  if (note.kind == kBegin) batches_.at(batch_of(note)).recorded = serial_of(note);
  const uint64_t step = step_of(note);
  if (note.kind == kAttend || step == 0) return;
  const bool known = std::ranges::any_of(
      unfinished_, [&](const Unfinished& u) { return u.list == list && u.step == step; });
  if (!known) unfinished_.push_back({list, step, false, false});
}

void StepOrder::cancel(uint64_t step) {
  std::erase_if(unfinished_, [&](const Unfinished& u) { return u.step == step; });
}

StepOrder::Fate StepOrder::worst_fate(uint64_t step) const {
  Fate worst = Fate::ran;
  for (const Unfinished& u : unfinished_)
    if (u.step == step) worst = std::max(worst, u.dropped ? Fate::dropped : Fate::recorded);
  return worst;
}

void StepOrder::require_nothing_recorded(const char* op) const {
  require(pending_.empty(), op, ": steps of the pool are recorded in ", pending_.size(),
          " encoders and not submitted; submit() comes first");
}

void StepOrder::check(const char* op, const ObservedNotes<const CommandNote>& notes) const {
  now_.clear();
  uint64_t first = 0;
  for (const CommandNote& note : notes.all) {
    if (note.observer != notes.mine) continue;
    require(batches_.contains(batch_of(note)), op, ": a KvBatch that recorded it is gone");
    if (first == 0) first = serial_of(note);
    if (note.kind == kBegin) {
      check_begin(op, note, first);
      now_.emplace_back(batch_of(note), serial_of(note));
    } else {
      check_layer(op, note);
    }
  }
}

// The step that a batch is in, where check() has come to.
uint64_t StepOrder::now_of(uint64_t batch) const {
  for (auto each = now_.rbegin(); each != now_.rend(); ++each)
    if (each->first == batch) return each->second;
  return batches_.at(batch).submitted;
}

// `first` is the serial number by which this list is pending.
void StepOrder::check_begin(const char* op, const CommandNote& note, uint64_t first) const {
  for (const Pending& pending : pending_) {
    require(pending.first == first || pending.first > serial_of(note), op, ": kv_batch.begin ",
            "comes after calls of its pool that are recorded in another encoder and not submitted");
  }
  const bool spoiled = std::ranges::any_of(unfinished_, [&](const Unfinished& u) {
    return u.step == serial_of(note) && u.list != nullptr && u.spoiled;
  });
  const bool follows = base_of(note) == 0 || now_of(batch_of(note)) == base_of(note);
  require(follows && !spoiled, op, ": kv_batch.begin follows a step of its pool that was dropped; ",
          "drop this one as well and truncate() its sequences");
}

void StepOrder::check_layer(const char* op, const CommandNote& note) const {
  const char* const what = note.kind == kAppend ? "kv_batch.append" : "kv_batch.attend";
  const Batch& batch = batches_.at(batch_of(note));
  const uint64_t step = step_of(note), now = now_of(batch_of(note));
  if (step != 0) {
    require(now >= step, op, ": ", what, " comes before its begin() was submitted");
    require(now == step, op, ": ", what, " belongs to a step that is over");
    return;
  }
  require(batch.open, op, ": ", what, " was recorded for any step, and none is begun");
  require(now == batch.recorded, op, ": ", what, " comes before a begin() that is recorded and ",
          "not submitted");
}

void StepOrder::tell(ListFate fate, const void* list,
                     const ObservedNotes<CommandNote>& notes) noexcept {
  for (const CommandNote& note : notes.all) {
    if (note.observer != notes.mine) continue;
    const auto found = batches_.find(batch_of(note));
    if (found == batches_.end()) continue;
    Batch& batch = found->second;
    if (note.kind == kBegin && fate == ListFate::submitted) batch.submitted = serial_of(note);
    if (note.kind == kBegin && fate == ListFate::dropped) batch.lost = true;
    if (note.kind == kAppend && fate == ListFate::replayed) replay(note);
  }
  if (fate == ListFate::replayed) return;
  std::erase_if(pending_, [&](const Pending& pending) { return pending.list == list; });
  const auto its = [&](const Unfinished& u) { return u.list == list; };
  if (fate == ListFate::submitted) std::erase_if(unfinished_, its);
  if (fate == ListFate::dropped) drop(list);
  for (Unfinished& u : unfinished_)
    if (its(u)) u.list = nullptr;
  forget_removed();
}

void StepOrder::replay(const CommandNote& append) noexcept {
  Batch& batch = batches_.at(batch_of(append));
  batch.replayed[layer_of(append)] = batch.submitted;
  std::erase_if(unfinished_, [&](const Unfinished& u) {
    return u.step == batch.submitted && u.list == nullptr && !u.dropped;
  });
}

void StepOrder::drop(const void* list) noexcept {
  uint64_t first = ~uint64_t{0};
  for (Unfinished& u : unfinished_) {
    if (u.list != list) continue;
    u.dropped = true;
    first = std::min(first, u.step);
  }
  for (Unfinished& u : unfinished_) u.spoiled = u.spoiled || u.step > first;
}

}  // namespace gyre
