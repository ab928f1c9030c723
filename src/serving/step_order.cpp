#include "serving/step_order.h"

#include <algorithm>
#include <utility>

#include "runtime/require.h"

namespace gyre {
namespace {

// Numbers of a note: its serial number, 0 in a graph; the batch; the step. Of a begin() base and
// tokens instead of the step, of others also the layer and, of an append(), its rows.
enum Kind : uint32_t { kBegin, kAppend, kAttend };

uint64_t serial_of(const CommandNote& note) { return note.number[0]; }
uint64_t batch_of(const CommandNote& note) { return note.number[1]; }
constexpr uint64_t kLayerBits = 16;
uint64_t layer_of(const CommandNote& note) {
  return note.number[3] & ((uint64_t{1} << kLayerBits) - 1);
}
uint64_t rows_of(const CommandNote& append) { return append.number[3] >> kLayerBits; }
uint64_t tokens_of(const CommandNote& begin) { return begin.number[3]; }
bool is_in_graph(const CommandNote& note) { return serial_of(note) == 0; }
uint64_t base_of(const CommandNote& note) { return note.number[2]; }
uint64_t step_of(const CommandNote& note) {
  return note.kind == kBegin ? serial_of(note) : note.number[2];
}

}  // namespace

uint64_t StepOrder::add_batch(uint64_t layers) {
  Batch made;
  made.appended.resize(layers);
  const uint64_t number = next();
  batches_.emplace(number, std::move(made));
  return number;
}

void StepOrder::remove_batch(uint64_t batch) noexcept {
  batches_.at(batch).phase = Phase::idle;
  batches_.at(batch).removed = true;
  forget_removed();
}

// While no list waits, the only ones to name a batch are graphs, which are then refused.
void StepOrder::forget_removed() noexcept {
  if (pending_.empty())
    std::erase_if(batches_, [](const auto& each) { return each.second.removed; });
}

bool StepOrder::take_lost(uint64_t batch) { return std::exchange(batches_.at(batch).lost, false); }

void StepOrder::assume_appended(uint64_t batch) {
  Batch& of = batches_.at(batch);
  std::ranges::fill(of.appended, of.submitted);
}

CommandNote StepOrder::begin_note(uint64_t batch, uint64_t base, uint64_t tokens) {
  return {0, kBegin, {next(), batch, base, tokens}};
}
CommandNote StepOrder::append_note(uint64_t batch, uint64_t step, uint64_t layer, uint64_t rows) {
  return {0, kAppend, {next(), batch, step, layer | rows << kLayerBits}};
}
CommandNote StepOrder::attend_note(uint64_t batch, uint64_t step, uint64_t layer) {
  return {0, kAttend, {next(), batch, step, layer}};
}

void StepOrder::recorded(const CommandNote& note, const void* list) {
  const auto its = [&](const auto& entry) { return entry.list == list; };
  // All or nothing.
  pending_.reserve(pending_.size() + 1);
  unfinished_.reserve(unfinished_.size() + 1);
  const size_t may_drop = dropped_.size() + unfinished_.size() + 1;
  if (dropped_.capacity() < may_drop) dropped_.reserve(2 * may_drop);
  if (std::ranges::none_of(pending_, its)) pending_.push_back({list, serial_of(note)});
  if (note.kind == kBegin) {
    Batch& batch = batches_.at(batch_of(note));
    batch.recorded = newest_ = serial_of(note);
    batch.tokens = tokens_of(note);
  }
  const uint64_t step = step_of(note);
  if (note.kind == kAttend || step == 0) return;
  const auto known = std::ranges::find_if(
      unfinished_, [&](const Unfinished& u) { return u.list == list && u.step == step; });
  const uint64_t appends = note.kind == kAppend ? 1 : 0;
  if (known != unfinished_.end()) {
    known->appends += appends;
  } else {
    unfinished_.push_back({list, step, appends, false});
  }
}

void StepOrder::cancel(uint64_t step) {
  std::erase_if(unfinished_, [&](const Unfinished& u) { return u.step == step; });
  std::erase(dropped_, step);
}

StepOrder::Fate StepOrder::fate(uint64_t step) const {
  if (std::ranges::binary_search(dropped_, step)) return Fate::dropped;
  Fate worst = Fate::ran;
  for (const Unfinished& u : unfinished_)
    if (u.step == step) worst = std::max(worst, u.list == nullptr ? Fate::kept : Fate::recorded);
  return worst;
}

void StepOrder::require_nothing_recorded(const char* op) const {
  require(pending_.empty(), op, ": steps of the pool are recorded in ", pending_.size(),
          " encoders and not submitted; submit() comes first");
}

void StepOrder::check(const char* op, const ObservedNotes<const CommandNote>& notes) const {
  now_.clear();
  uint64_t first = 0;
  for (size_t i = 0; i < notes.all.size(); ++i) {
    const CommandNote& note = notes.all[i];
    if (note.observer != notes.mine) continue;
    require(batches_.contains(batch_of(note)), op, ": a KvBatch that recorded it is gone");
    if (first == 0) first = serial_of(note);
    if (note.kind == kBegin) {
      check_begin(op, note, first);
      now_.emplace_back(batch_of(note), serial_of(note));
    } else {
      check_layer(op, notes, i);
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

void StepOrder::check_layer(const char* op, const ObservedNotes<const CommandNote>& notes,
                            size_t index) const {
  const CommandNote& note = notes.all[index];
  const char* const what = note.kind == kAppend ? "kv_batch.append" : "kv_batch.attend";
  const Batch& batch = batches_.at(batch_of(note));
  const uint64_t step = step_of(note), now = now_of(batch_of(note));
  if (step != 0) {
    require(now >= step, op, ": ", what, " comes before its begin() was submitted");
    require(now == step, op, ": ", what, " belongs to a step that is over");
  } else {
    const bool is_recording = batch.phase == Phase::recording && !is_in_graph(note);
    require(batch.phase == Phase::step || is_recording, op, ": ", what,
            " was recorded for any step, and none is begun");
    require(now == batch.recorded, op, ": ", what, " comes before a begin() that is recorded and ",
            "not submitted");
    if (is_recording) return;  // for a caller's graph, which runs where Gyre does not see it
  }
  if (note.kind == kAppend) return check_append(op, note);
  require(is_appended(notes, index), op, ": kv_batch.attend of layer ", layer_of(note),
          " comes before the step's append()");
}

void StepOrder::check_append(const char* op, const CommandNote& note) const {
  const Batch& batch = batches_.at(batch_of(note));
  const uint64_t step = step_of(note), layer = layer_of(note);
  if (step == 0) {
    require(rows_of(note) >= batch.tokens, op, ": kv_batch.append of layer ", layer,
            " was recorded with ", rows_of(note), " rows, the step has ", batch.tokens, " tokens");
    return;
  }
  // Its pages may be others' by then.
  require(batch.appended[layer] != step || newest_ == step, op, ": kv_batch.append of layer ",
          layer, " has run, and another step was begun since");
}

// Before the note in its own list, or by a list or a graph that ran in this step.
bool StepOrder::is_appended(const ObservedNotes<const CommandNote>& notes, size_t index) const {
  const uint64_t batch = batch_of(notes.all[index]), layer = layer_of(notes.all[index]);
  for (size_t i = index; i > 0; --i) {
    const CommandNote& note = notes.all[i - 1];
    if (note.observer != notes.mine || batch_of(note) != batch) continue;
    if (note.kind == kAppend && layer_of(note) == layer) return true;
    if (note.kind == kBegin) return false;
  }
  return batches_.at(batch).appended[layer] == now_of(batch);
}

void StepOrder::tell(ListFate fate, const void* list,
                     const ObservedNotes<CommandNote>& notes) noexcept {
  for (CommandNote& note : notes.all) {
    if (note.observer != notes.mine) continue;
    if (fate == ListFate::kept && note.kind != kBegin) note.number[0] = 0;
    const auto found = batches_.find(batch_of(note));
    if (found == batches_.end()) continue;
    Batch& batch = found->second;
    if (note.kind == kBegin && fate == ListFate::submitted) batch.submitted = serial_of(note);
    if (note.kind == kBegin && fate == ListFate::dropped) batch.lost = true;
    if (note.kind == kAppend) ran(note, fate);
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

void StepOrder::ran(const CommandNote& append, ListFate fate) noexcept {
  if (fate != ListFate::submitted && fate != ListFate::replayed) return;
  Batch& batch = batches_.at(batch_of(append));
  const uint64_t now = batch.submitted;
  uint64_t& appended = batch.appended[layer_of(append)];
  if (appended == now || (step_of(append) == 0 && batch.phase != Phase::step)) return;
  appended = now;
  if (fate == ListFate::submitted) return;
  const auto is_kept = [&](const Unfinished& u) {
    return u.step == now && u.list == nullptr && u.appends != 0;
  };
  const auto kept = std::ranges::find_if(unfinished_, is_kept);
  if (kept != unfinished_.end() && --kept->appends == 0) unfinished_.erase(kept);
}

void StepOrder::drop(const void* list) noexcept {
  uint64_t first = ~uint64_t{0};
  for (Unfinished& u : unfinished_) {
    if (u.list != list) continue;
    dropped_.insert(std::ranges::upper_bound(dropped_, u.step), u.step);  // memory is there
    first = std::min(first, u.step);
  }
  std::erase_if(unfinished_, [&](const Unfinished& u) { return u.list == list; });
  for (Unfinished& u : unfinished_) u.spoiled = u.spoiled || u.step > first;
}

}  // namespace gyre
