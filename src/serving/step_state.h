#pragma once
// Where a batch is in its step: which calls may come next. The host knows, so a call that would
// give wrong answers is refused with what is missing.

#include <cstdint>
#include <iosfwd>
#include <vector>

namespace gyre {

class StepState {
 public:
  explicit StepState(size_t layers) : appended_(layers, 0) {}

  bool recording() const { return phase_ == Phase::recording; }
  bool open() const { return phase_ == Phase::step; }  // begun, perhaps complete
  bool complete() const { return appended_layers_ == appended_.size(); }

  void require_complete(const char* op) const;  // if a step is open
  void begin();                                 // what require_complete() allows
  void record(const char* op);
  void end(const char* op);  // of a step or a recording that is complete
  void cancel() { enter(Phase::idle); }
  // Refused out of order; note_append() when the layer's writes are recorded.
  void check_append(const char* op, uint64_t layer) const;
  void check_attend(const char* op, uint64_t layer) const;
  void note_append(uint64_t layer);
  bool appended(uint64_t layer) const { return appended_[layer] != 0; }
  size_t layers() const { return appended_.size(); }

 private:
  enum class Phase : uint8_t { idle, step, recording };

  // "layer 0, 2, 3 of 4", written where a message is: nothing else may take memory here.
  struct Missing {
    const StepState& of;
  };
  friend std::ostream& operator<<(std::ostream& out, const Missing& missing);

  void enter(Phase phase);
  Missing missing() const { return {*this}; }

  Phase phase_ = Phase::idle;
  std::vector<uint8_t> appended_;
  size_t appended_layers_ = 0;
};

}  // namespace gyre
