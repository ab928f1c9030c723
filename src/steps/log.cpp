#include "steps/log.h"

#include <algorithm>
#include <ostream>

#include "abi/attention.h"
#include "runtime/require.h"

namespace gyre {
namespace {

// Numbers of a note. Begin, and copy in the cache that fork() makes: step, length, peak, tokens.
// Append and attend: step, or 0 for any; layer; rows; attend also the window. Read, in the cache
// that fork() copies: none.
enum Kind : uint32_t { kBegin, kCopy, kAppend, kAttend, kRead, kInGraph = 8 };

uint32_t kind_of(const CommandNote& note) { return note.kind & ~uint32_t{kInGraph}; }
bool is_in_graph(const CommandNote& note) { return (note.kind & kInGraph) != 0; }
bool is_begin(const CommandNote& note) { return note.kind == kBegin || note.kind == kCopy; }
uint64_t layer_of(const CommandNote& note) { return note.number[1]; }
uint64_t rows_of(const CommandNote& note) { return note.number[2]; }
uint64_t window_of(const CommandNote& note) { return note.number[3]; }
const char* name_of(const CommandNote& note) {
  return kind_of(note) == kAppend ? ".append of layer " : ".attend of layer ";
}

StepLog::Place place_of(const CommandNote& begin) {
  return {begin.number[1], begin.number[2], begin.number[3], begin.number[0]};
}

}  // namespace

StepLog::StepLog(const Rules& rules, std::shared_ptr<Steps> steps,
                 const std::vector<uint64_t>& ring_slots)
    : rules_(rules), steps_(std::move(steps)) {
  for (const uint64_t slots : ring_slots) layers_.push_back({slots, 0, 0});
  appending_ = static_cast<uint64_t>(std::ranges::count_if(layers_, &Layer::appends));
}

std::ostream& operator<<(std::ostream& out, const StepLog::Missing& missing) {
  const std::vector<StepLog::Layer>& layers = missing.log.layers_;
  const auto lacks = [&](size_t i) { return layers[i].lacks(missing.log.open_); };
  out << (missing.log.appending_ - missing.log.appended_ == 1 ? "layer" : "layers");
  const char* separator = " ";
  for (size_t i = 0; i < layers.size(); ++i) {
    if (!lacks(i)) continue;
    const size_t first = i;
    while (i + 1 < layers.size() && lacks(i + 1)) ++i;
    out << std::exchange(separator, ", ") << first;
    if (i != first) out << " to " << i;
  }
  return out;
}

bool StepLog::holds(uint64_t layer, const Place& at, uint64_t oldest) const {
  const uint64_t slots = layers_[layer].ring_slots;
  return slots == 0 || at.peak <= slots || oldest >= at.peak - slots;
}

void StepLog::require_complete(const char* op, const char* whose) const {
  require(!open() || complete(), op, ": ", whose, "the step of ", recorded_.tokens,
          " tokens lacks append() of ", Missing{*this}, "; append them or ", rules_.take_back);
}

CommandNote StepLog::begin_note(const Place& next, bool complete) {
  steps_->unwritten_.reserve(steps_->unwritten_.size() + 1);
  return {0, complete ? kCopy : kBegin, {++steps_->serial_, next.length, next.peak, next.tokens}};
}

// The step that a call belongs to. 0: one that comes later, of a graph.
uint64_t StepLog::step_for(bool fits) const {
  if (!rules_.any_graph) return recording() ? 0 : recorded_.id;
  return open() && (fits || !complete()) ? recorded_.id : 0;
}

CommandNote StepLog::append_note(uint64_t layer, uint64_t tokens) const {
  const uint64_t step = step_for(tokens == recorded_.tokens);
  require(step == 0 || !rules_.any_graph || tokens == recorded_.tokens, rules_.object,
          ".append: ", rules_.begin, " was for ", recorded_.tokens, " tokens, k has ", tokens);
  return {0, kAppend, {step, layer, tokens, 0}};
}

CommandNote StepLog::attend_note(uint64_t layer, uint64_t queries, uint64_t window) const {
  const uint64_t step = step_for(queries <= recorded_.tokens);
  require(step == 0 || queries <= recorded_.tokens, rules_.object, ".attend: the step has ",
          recorded_.tokens, " tokens, got ", queries, " queries");
  return {0, kAttend, {step, layer, queries, window}};
}

CommandNote StepLog::read_note() { return {0, kRead, {}}; }

void StepLog::recorded(const CommandNote& note, const void* list) noexcept {
  steps_->list_ = list;
  if (is_begin(note)) {
    recorded_ = place_of(note);
    phase_ = recorded_.tokens != 0 ? Phase::step : Phase::idle;
    open_ = steps_->newest_ = recorded_.id;
    appended_ = 0;
    if (recorded_.tokens != 0 || note.kind == kCopy)
      steps_->unwritten_.push_back({recorded_.id, StepOutcome::unsubmitted});
    for (size_t i = 0; note.kind == kCopy && i < layers_.size(); ++i) mark_appended(i);
  } else if (note.kind == kAppend) {
    if (step_of(note) != 0 || recording()) mark_appended(layer_of(note));
    steps_->set_outcome(step_of(note), StepOutcome::unsubmitted);
  }
}

void StepLog::mark_appended(uint64_t layer) noexcept {
  if (layers_[layer].recorded == open_ || !layers_[layer].appends()) return;
  layers_[layer].recorded = open_;
  ++appended_;
}

// Unless it ran before.
void StepLog::mark_missing(uint64_t layer) noexcept {
  if (layers_[layer].recorded != open_ || layers_[layer].ran == open_) return;
  layers_[layer].recorded = 0;
  --appended_;
}

void StepLog::loaded(Place next) noexcept {
  next.id = ++steps_->serial_;
  recorded_ = submitted_ = next;
  phase_ = Phase::idle;
}

void StepLog::mark_captured(const char* op) {
  require(open(), op, ": no step is begun, ", rules_.begin, " comes first");
  require(
      recorded_.id == submitted_.id && steps_->outcome(recorded_.id) != StepOutcome::unsubmitted,
      op, ": what was recorded of the step is not submitted");
  for (size_t i = 0; i < layers_.size(); ++i) {
    mark_appended(i);
    layer_ran(i);
  }
}

void StepLog::record(const char* op) {
  require_complete(op);
  require(!recording(), op, ": a recording is open, end_step() it");
  phase_ = Phase::recording;
  open_ = ++steps_->serial_;
  appended_ = 0;
}

void StepLog::end(const char* op) {
  require(phase_ != Phase::idle, op, ": no step was begun and no recording opened");
  for (size_t i = 0; open() && i < layers_.size(); ++i)
    if (layers_[i].ran == open_) mark_appended(i);
  require(complete(), op, ": the ", recording() ? "recording" : "step", " lacks append() of ",
          Missing{*this});
  phase_ = Phase::idle;
}

void StepLog::cancel() noexcept {
  if (!complete()) steps_->forget(open_);
  phase_ = Phase::idle;
}

void StepLog::check_layer(const char* op, uint64_t layer) const {
  require(phase_ != Phase::idle, op, ": ", rules_.begin, " comes first, or record() for a graph");
  require(layer < layers_.size(), op, ": there are ", layers_.size(), " layers, got layer ", layer);
}

void StepLog::check_append(const char* op, uint64_t layer) const {
  check_layer(op, layer);
  require(layers_[layer].recorded != open_, op, ": layer ", layer,
          " was appended in this step already");
}

void StepLog::check_attend(const char* op, uint64_t layer) const {
  check_layer(op, layer);
  require(layers_[layer].recorded == open_, op, ": layer ", layer,
          " was not appended in this step");
}

void StepLog::check(const char* op, const ObservedNotes<const CommandNote>& notes) const {
  const StepsUse use(*steps_, op);
  Place now = submitted_;
  for (size_t i = 0; i < notes.all.size(); ++i) {
    const CommandNote& note = notes.all[i];
    if (note.observer != notes.observer || note.kind == kRead) continue;
    if (is_begin(note)) {
      now = place_of(note);
      continue;
    }
    const auto demand = [&](bool holds, const char* why) {
      require(holds, op, ": ", rules_.object, name_of(note), layer_of(note), why);
    };
    if (step_of(note) != 0) {
      demand(step_of(note) == now.id, " belongs to a step that is over");
    } else {
      // A list of a recording is for a caller's graph, which runs where the log does not see it.
      const bool captured = recording() && !is_in_graph(note);
      demand(rules_.any_graph || captured || (open() && !complete()),
             " was recorded for any step, and none is begun: begin_step() comes first");
      demand(now.id == recorded_.id,
             steps_->list_ != nullptr
                 ? " comes before a step that is recorded and not submitted: submit() that first"
                 : " comes after a step that was dropped, or a load ended in the middle");
      if (captured) continue;
    }
    if (kind_of(note) == kAppend) {
      check_append(op, note, now);
    } else {
      check_attend(op, notes, i, now);
    }
  }
}

void StepLog::check_append(const char* op, const CommandNote& note, const Place& now) const {
  require(now.tokens != 0, op, ": ", rules_.object, name_of(note), layer_of(note), " has no step, ",
          rules_.begin, " comes first");
  const bool fits = rules_.any_graph ? rows_of(note) == now.tokens : rows_of(note) >= now.tokens;
  require(fits, op, ": ", rules_.object, name_of(note), layer_of(note), " was recorded with ",
          rows_of(note), " rows, the step has ", now.tokens, " tokens");
  require(step_of(note) == 0 || !is_in_graph(note) || steps_->newest_ == now.id, op, ": ",
          rules_.object, name_of(note), layer_of(note),
          " is in a graph of its step, and another step was begun or a sequence rolled back since");
}

void StepLog::check_attend(const char* op, const ObservedNotes<const CommandNote>& notes,
                           size_t index, const Place& now) const {
  const CommandNote& note = notes.all[index];
  const uint64_t layer = layer_of(note), queries = rows_of(note);
  if (now.tokens != 0) {
    require(queries <= now.tokens, op, ": ", rules_.object, name_of(note), layer, " has ", queries,
            " queries, the step ", now.tokens, " tokens");
    require(is_appended(notes, index, layer, now), op, ": ", rules_.object, name_of(note), layer,
            " comes before the step's append()");
  } else {
    require(queries <= now.length, op, ": ", rules_.object, name_of(note), layer, " has ", queries,
            " queries, the cache ", now.length, " tokens");
  }
  const uint64_t oldest = abi::attention_first_key(queries, now.length, window_of(note));
  require(holds(layer, now, oldest), op, ": ", rules_.object, name_of(note), layer,
          " no longer has key ", oldest, ", which ", queries, " queries at length ", now.length,
          " see");
}

// Before the note in its own list, or by a list or a graph that ran.
bool StepLog::is_appended(const ObservedNotes<const CommandNote>& notes, size_t index,
                          uint64_t layer, const Place& now) const {
  for (size_t i = index; i > 0; --i) {
    const CommandNote& note = notes.all[i - 1];
    if (note.observer != notes.observer) continue;
    if (kind_of(note) == kAppend && layer_of(note) == layer) return true;
    if (is_begin(note)) return note.kind == kCopy;
  }
  return layers_[layer].ran == now.id;
}

void StepLog::notify(ListOutcome outcome, const void* list,
                     const ObservedNotes<CommandNote>& notes) noexcept {
  const StepsUse use(*steps_);
  const bool reopen = rules_.any_graph || !complete();
  for (CommandNote& note : notes.all) {
    if (note.observer != notes.observer) continue;
    if (outcome == ListOutcome::kept) {
      retain(note);
    } else if (outcome == ListOutcome::dropped) {
      drop(note, reopen);
    } else {
      ran(note);
    }
  }
  if (outcome != ListOutcome::replayed) steps_->release(list);
}

void StepLog::ran(const CommandNote& note) noexcept {
  if (is_begin(note)) {
    // Appends that are in graphs cannot run any more.
    steps_->set_outcome(submitted_.id, StepOutcome::dropped);
    submitted_ = place_of(note);
    ran_ = 0;
    for (size_t i = 0; note.kind == kCopy && i < layers_.size(); ++i) layer_ran(i);
  } else if (kind_of(note) == kAppend) {
    if (step_of(note) == 0 && !rules_.any_graph && !open()) return;  // a recording
    layer_ran(layer_of(note));
    if (rules_.any_graph && open_ == submitted_.id) mark_appended(layer_of(note));
  }
}

void StepLog::layer_ran(uint64_t layer) noexcept {
  if (layers_[layer].ran == submitted_.id || !layers_[layer].appends()) return;
  layers_[layer].ran = submitted_.id;
  if (++ran_ == appending_) steps_->forget(submitted_.id);
}

void StepLog::retain(CommandNote& note) noexcept {
  note.kind |= kInGraph;
  if (!rules_.any_graph) return;
  if (kind_of(note) == kAppend && step_of(note) == open_) mark_missing(layer_of(note));
  note.number[0] = 0;
}

// An append of the step that is open can be made again.
void StepLog::drop(const CommandNote& note, bool reopen) noexcept {
  if (is_begin(note)) dropped_begin_ = true;
  if (note.kind == kAppend && reopen && step_of(note) == open_) {
    mark_missing(layer_of(note));
  } else if (note.kind == kAppend || is_begin(note)) {
    steps_->set_outcome(step_of(note), StepOutcome::dropped);
  }
}

}  // namespace gyre
