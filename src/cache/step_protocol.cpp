#include "cache/step_protocol.h"

#include <algorithm>

#include "abi/attention.h"
#include "runtime/require.h"

namespace gyre {
namespace {

// Numbers of a note. Moves, kCopy in the cache that fork() makes: id, length, peak, tokens. Reads,
// in the one it copies: id. Others: id, or 0 for any step; layer, tokens; attends also the window.
enum Kind : uint32_t { kMove, kCopy, kAppend, kAttend, kRead };

bool is_move(const CommandNote& note) { return note.kind == kMove || note.kind == kCopy; }
uint64_t id_of(const CommandNote& note) { return note.number[0]; }
uint64_t layer_of(const CommandNote& note) { return note.number[1]; }
uint64_t tokens_of(const CommandNote& note) { return note.number[2]; }
uint64_t window_of(const CommandNote& note) { return note.number[3]; }

StepProtocol::Place place_of(const CommandNote& move) {
  return {move.number[1], move.number[2], move.number[3], move.number[0]};
}

// "layer 3", "layers 0, 2 to 5".
std::string text_of(const std::vector<uint64_t>& layers) {
  std::string text = layers.size() == 1 ? "layer " : "layers ";
  for (size_t i = 0; i < layers.size();) {
    size_t last = i;
    while (last + 1 < layers.size() && layers[last + 1] == layers[last] + 1) ++last;
    text += (i == 0 ? "" : ", ") + std::to_string(layers[i]);
    if (last != i) text += " to " + std::to_string(layers[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace

// A note that belongs to a step may run in that step only, others in the newest.
void StepProtocol::check_step(const char* op, const char* what, const CommandNote& note,
                              const Place& now) const {
  const uint64_t id = id_of(note);
  require(id != 0 || now.id == recorded_.id, op, ": ", what, " of layer ", layer_of(note),
          " comes before an extend(), truncate() or clear() that is recorded and not submitted");
  require(id <= now.id, op, ": ", what, " of layer ", layer_of(note),
          " comes before its extend() was submitted");
  require(id == 0 || id == now.id, op, ": ", what, " of layer ", layer_of(note),
          " belongs to a step that is over");
}

StepProtocol::StepProtocol(const std::vector<uint64_t>& ring_slots) {
  for (const uint64_t slots : ring_slots) layers_.push_back({slots, 0, nullptr, 0});
}

CommandNote StepProtocol::move_note(const Place& next, bool complete) {
  reserve_pending();
  return {0, complete ? kCopy : kMove, {recorded_.id + 1, next.length, next.peak, next.tokens}};
}

void StepProtocol::moved(const CommandNote& note, const void* list) noexcept {
  recorded_ = place_of(note);
  moved_in_ = list;
  if (recorded_.length <= lost_) lost_ = kNothingLost;
  add_pending(list);
  if (note.kind != kCopy) return;
  is_copy_ = true;
  for (Layer& layer : layers_) layer.recorded = recorded_.id, layer.recorded_in = list;
}

void StepProtocol::moved_now(Place next) noexcept {
  next.id = recorded_.id + 1;
  recorded_ = submitted_ = next;
  moved_in_ = nullptr;
  lost_ = kNothingLost;
}

void StepProtocol::add_pending(const void* list) noexcept {
  for (Pending& pending : pending_) {
    if (pending.list != list) continue;
    ++pending.notes;
    return;
  }
  pending_.push_back({list, 1});
}

bool StepProtocol::all_recorded() const {
  return std::ranges::all_of(layers_, [&](const Layer& layer) {
    return layer.recorded == recorded_.id || layer.submitted == recorded_.id;
  });
}

void StepProtocol::require_written(const char* op, uint64_t length) const {
  require(length <= lost_, op, ": tokens from ", lost_, " on were recorded and dropped, or their ",
          "load ended in the middle, and ", length, " would be there; truncate() or clear() them");
}

void StepProtocol::require_complete(const char* op, const void* list) const {
  require_written(op, recorded_.length);
  require(!is_copy_ || submitted_.id != 0 || (list != nullptr && moved_in_ == list), op,
          ": the fork() that the kv_cache comes from is not submitted");
  if (recorded_.tokens == 0) return;
  std::vector<uint64_t> missing, elsewhere;
  for (uint64_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    if (layer.submitted == recorded_.id) continue;
    if (layer.recorded != recorded_.id) {
      missing.push_back(i);
    } else if (layer.recorded_in != list) {
      elsewhere.push_back(i);
    }
  }
  require(missing.empty(), op, ": the step of ", recorded_.tokens, " tokens lacks append() of ",
          text_of(missing), "; append them or truncate() the whole step");
  require(elsewhere.empty(), op, ": append() of ", text_of(elsewhere),
          " is recorded in another encoder and not submitted");
}

void StepProtocol::require_submitted(const char* op, const void* list) const {
  for (const Pending& pending : pending_) {
    require(pending.list == list, op, ": ", pending.notes,
            " calls are recorded in an encoder and not submitted; submit() comes first");
  }
  require_complete(op, list);
}

CommandNote StepProtocol::copy_note(const void* list) const {
  return {0, kRead, {moved_in_ == list ? recorded_.id : submitted_.id}};
}

CommandNote StepProtocol::append_note(uint64_t layer, uint64_t tokens) {
  require_written("kv_cache.append", recorded_.length);
  reserve_pending();
  const bool other = recorded_.tokens == 0 || (tokens != recorded_.tokens && all_recorded());
  require(other || tokens == recorded_.tokens, "kv_cache.append: extend() was for ",
          recorded_.tokens, " tokens, k has ", tokens);
  return {0, kAppend, {other ? 0 : recorded_.id, layer, tokens, 0}};
}

CommandNote StepProtocol::attend_note(uint64_t layer, uint64_t tokens, uint64_t window) const {
  const bool other = recorded_.tokens == 0 || (tokens > recorded_.tokens && all_recorded());
  require(other || tokens <= recorded_.tokens, "kv_cache.attend: the step has ", recorded_.tokens,
          " tokens, got ", tokens, " queries");
  return {0, kAttend, {other ? 0 : recorded_.id, layer, tokens, window}};
}

void StepProtocol::appended(const CommandNote& note, const void* list) noexcept {
  add_pending(list);
  if (id_of(note) == 0) return;
  Layer& layer = layers_[layer_of(note)];
  layer.recorded = id_of(note);
  layer.recorded_in = list;
}

void StepProtocol::assume_appended() {
  const char* const op = "kv_cache.assume_appended";
  require(recorded_.tokens != 0, op, ": no step is begun, extend() comes first");
  require(recorded_.id == submitted_.id, op, ": extend() is recorded and not submitted");
  for (Layer& layer : layers_) layer.submitted = submitted_.id;
}

void StepProtocol::check(const char* op, const ObservedNotes<const CommandNote>& notes) const {
  Place now = submitted_;
  for (size_t i = 0; i < notes.all.size(); ++i) {
    const CommandNote& note = notes.all[i];
    if (note.observer != notes.mine) continue;
    require(!is_copy_ || now.id != 0 || note.kind == kCopy, op,
            ": the fork() that a kv_cache comes from is not submitted");
    if (!is_move(note)) require_written(op, now.length);
    if (note.kind == kRead) {
      require(id_of(note) == now.id, op,
              ": a kv_cache whose fork() was recorded has moved since by ",
              "an extend(), truncate(), clear() or load()");
    } else if (note.kind == kAppend) {
      check_append(op, note, now);
    } else if (note.kind == kAttend) {
      check_attend(op, notes, i, now);
    } else {
      require(id_of(note) > now.id, op, ": an extend(), truncate() or clear() of a kv_cache ",
              "that was recorded after this one has been submitted before it");
      now = place_of(note);
    }
  }
}

void StepProtocol::check_append(const char* op, const CommandNote& note, const Place& now) const {
  const char* const what = "kv_cache.append";
  check_step(op, what, note, now);
  require(now.tokens != 0, op, ": ", what, " of layer ", layer_of(note),
          " has no step, extend() comes first");
  require(now.tokens == tokens_of(note), op, ": ", what, " of layer ", layer_of(note), " has ",
          tokens_of(note), " tokens, the step ", now.tokens);
}

void StepProtocol::check_attend(const char* op, const ObservedNotes<const CommandNote>& notes,
                                size_t index, const Place& now) const {
  const char* const what = "kv_cache.attend";
  const CommandNote& note = notes.all[index];
  const uint64_t layer = layer_of(note), tokens = tokens_of(note);
  check_step(op, what, note, now);
  if (now.tokens != 0) {
    require(tokens <= now.tokens, op, ": ", what, " of layer ", layer, " has ", tokens,
            " queries, the step ", now.tokens, " tokens");
    require(is_appended(notes, index, layer, now), op, ": ", what, " of layer ", layer,
            " comes before the step's append()");
  } else {
    require(tokens <= now.length, op, ": ", what, " of layer ", layer, " has ", tokens,
            " queries, the cache ", now.length, " tokens");
  }
  const uint64_t oldest = abi::attention_first_key(tokens, now.length, window_of(note));
  require(holds(layer, now, oldest), op, ": ", what, ": layer ", layer, " no longer has key ",
          oldest, ", which ", tokens, " queries at length ", now.length, " see");
}

// Before the note in its own list, or by a list that was submitted.
bool StepProtocol::is_appended(const ObservedNotes<const CommandNote>& notes, size_t index,
                               uint64_t layer, const Place& now) const {
  for (size_t i = index; i > 0; --i) {
    const CommandNote& note = notes.all[i - 1];
    if (note.observer != notes.mine) continue;
    if (note.kind == kAppend && layer_of(note) == layer) return true;
    if (is_move(note)) return note.kind == kCopy;
  }
  return layers_[layer].submitted == now.id;
}

bool StepProtocol::holds(uint64_t layer, const Place& at, uint64_t oldest) const {
  const uint64_t slots = layers_[layer].ring_slots;
  return slots == 0 || at.peak <= slots || oldest >= at.peak - slots;
}

void StepProtocol::tell(ListFate fate, const void* list,
                        const ObservedNotes<CommandNote>& notes) noexcept {
  for (CommandNote& note : notes.all) {
    if (note.observer != notes.mine) continue;
    if (fate == ListFate::submitted || fate == ListFate::replayed) {
      ran(note);
    } else {
      taken_out(note, list);
      if (fate == ListFate::dropped) dropped(note, list);
    }
    if (fate == ListFate::kept && (note.kind == kAppend || note.kind == kAttend))
      note.number[0] = 0;
  }
  if (fate == ListFate::replayed) return;
  if (moved_in_ == list) moved_in_ = nullptr;
  std::erase_if(pending_, [&](const Pending& pending) { return pending.list == list; });
}

void StepProtocol::ran(const CommandNote& note) noexcept {
  if (is_move(note)) submitted_ = place_of(note);
  if (note.kind == kAppend) layers_[layer_of(note)].submitted = submitted_.id;
  if (note.kind != kCopy) return;
  for (Layer& layer : layers_) layer.submitted = submitted_.id;
}

// The list that an append was recorded in will not be submitted.
void StepProtocol::taken_out(const CommandNote& note, const void* list) noexcept {
  for (uint64_t i = 0; i < layers_.size(); ++i) {
    const bool its = note.kind == kCopy || (note.kind == kAppend && layer_of(note) == i);
    if (its && layers_[i].recorded_in == list) layers_[i].recorded = 0;
  }
}

// Which tokens are missing now.
void StepProtocol::dropped(const CommandNote& note, const void* list) noexcept {
  // A move that is older than what was submitted had been given up before.
  if (is_move(note) && id_of(note) > submitted_.id) {
    const Place place = place_of(note);
    const uint64_t there = note.kind == kCopy ? 0 : place.length - place.tokens;
    if (recorded_.length > there) lost_ = std::min(lost_, there);
  }
  // An append of the step that runs can be made again, unless its list had gone on from there.
  if (note.kind != kAppend || id_of(note) != submitted_.id || recorded_.id == submitted_.id) return;
  const Layer& layer = layers_[layer_of(note)];
  if (layer.recorded_in == list && layer.submitted != submitted_.id)
    lost_ = std::min(lost_, submitted_.length - submitted_.tokens);
}

}  // namespace gyre
