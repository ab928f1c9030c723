#include "serving/step_state.h"

#include <algorithm>
#include <ostream>

#include "runtime/require.h"

namespace gyre {

void StepState::enter(Phase phase) {
  phase_ = phase;
  std::ranges::fill(appended_, uint8_t{0});
  appended_layers_ = 0;
}

std::ostream& operator<<(std::ostream& out, const StepState::Missing& missing) {
  constexpr size_t kMostNamed = 8;
  const std::vector<uint8_t>& appended = missing.of.appended_;
  size_t named = 0;
  out << "layer ";
  for (size_t i = 0; i < appended.size(); ++i) {
    if (appended[i] != 0) continue;
    if (named == kMostNamed) {
      out << ", ...";
      break;
    }
    out << (named++ == 0 ? "" : ", ") << i;
  }
  return out << " of " << appended.size();
}

void StepState::require_complete(const char* op) const {
  if (phase_ != Phase::step || complete()) return;
  require(appended_layers_ == 0 || appended_.size() == 1, op, ": the step that was begun was not ",
          "appended in ", missing());
  fail(ErrorCode::invalid_argument, op, ": the step that was begun was appended in no layer; ",
       "append it, end() it after the replay of a recorded step, or cancel() it");
}

void StepState::begin() { enter(Phase::step); }

void StepState::record(const char* op) {
  require_complete(op);
  require(phase_ != Phase::recording, op, ": a recording is open, end() it");
  enter(Phase::recording);
}

void StepState::end(const char* op) {
  require(phase_ != Phase::idle, op, ": no step was begun and no recording opened");
  require(complete(), op, ": the ",
          phase_ == Phase::recording ? "recording" : "step that was begun", " was not appended in ",
          missing());
  enter(Phase::idle);
}

void StepState::check_append(const char* op, uint64_t layer) const {
  require(phase_ != Phase::idle, op, ": begin() comes first, or record() for a graph");
  require(layer < appended_.size(), op, ": there are ", appended_.size(), " layers, got layer ",
          layer);
  require(appended_[layer] == 0, op, ": layer ", layer, " was appended in this step already");
}

void StepState::check_attend(const char* op, uint64_t layer) const {
  require(phase_ != Phase::idle, op, ": begin() comes first, or record() for a graph");
  require(layer < appended_.size(), op, ": there are ", appended_.size(), " layers, got layer ",
          layer);
  require(appended_[layer] != 0, op, ": layer ", layer, " was not appended in this step");
}

void StepState::note_append(uint64_t layer) {
  appended_[layer] = 1;
  ++appended_layers_;
}

}  // namespace gyre
