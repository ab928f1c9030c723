#pragma once
// The protocol of a KvCache: a step is begun by extend(), every layer gets its tokens by append(),
// and only then comes the next one. Recorded calls count where they are recorded; what runs is
// checked again when its list is submitted or its graph replayed, because lists may be submitted in
// another order, dropped, or recorded before there is a step.

#include <string>
#include <vector>

#include "runtime/command_notes.h"

namespace gyre {

class StepProtocol final : public CommandObserver {
 public:
  // Slots of each layer's ring; 0: no ring, no key is lost.
  explicit StepProtocol(const std::vector<uint64_t>& ring_slots);

  // Where the sequence is. Every extend, truncate, clear, load and fork makes a new one.
  struct Place {
    uint64_t length = 0;
    uint64_t peak = 0;    // longest since it was cleared
    uint64_t tokens = 0;  // of the step; 0: none is begun
    uint64_t id = 0;
  };

  const Place& recorded() const { return recorded_; }
  bool holds(uint64_t layer, const Place& at, uint64_t oldest) const;

  // The note for a command that moves the sequence, and what to call when it is recorded: that
  // needs no more memory. `complete`: the layers come with it, as in a copy.
  CommandNote move_note(const Place& next, bool complete = false);
  void moved(const CommandNote& note, const void* list) noexcept;
  void moved_now(Place next) noexcept;     // without a command: loaded
  void lose_all() noexcept { lost_ = 0; }  // a load ended in the middle

  // Refuses a length with tokens whose extend() was recorded and dropped.
  void require_written(const char* op, uint64_t length) const;
  // Refuse calls that may not be recorded into `list` now: every layer has the step's tokens, in
  // this list or submitted; and nothing is recorded elsewhere and not submitted.
  void require_complete(const char* op, const void* list) const;
  void require_submitted(const char* op, const void* list) const;

  // The note for commands in `list` that copy what is there. It must be there still when they run.
  CommandNote copy_note(const void* list) const;

  // Notes for append and attend. Where no step fits, they are for one that comes later.
  CommandNote append_note(uint64_t layer, uint64_t tokens);
  CommandNote attend_note(uint64_t layer, uint64_t tokens, uint64_t window) const;
  void appended(const CommandNote& note, const void* list) noexcept;
  void assume_appended();

  void check(const char* op, const ObservedNotes<const CommandNote>& notes) const override;
  void tell(ListFate fate, const void* list,
            const ObservedNotes<CommandNote>& notes) noexcept override;

 private:
  struct Layer {
    uint64_t ring_slots = 0;
    uint64_t recorded = 0;              // id of the place its append was recorded at,
    const void* recorded_in = nullptr;  // and the list
    uint64_t submitted = 0;             // id of the place its append was submitted at
  };
  struct Pending {
    const void* list;
    uint64_t notes;
  };
  static constexpr uint64_t kNothingLost = ~uint64_t{0};

  void reserve_pending() { pending_.reserve(pending_.size() + 1); }
  void add_pending(const void* list) noexcept;
  bool all_recorded() const;
  bool is_appended(const ObservedNotes<const CommandNote>& notes, size_t index, uint64_t layer,
                   const Place& now) const;
  void check_step(const char* op, const char* what, const CommandNote& note,
                  const Place& now) const;
  void check_append(const char* op, const CommandNote& note, const Place& now) const;
  void check_attend(const char* op, const ObservedNotes<const CommandNote>& notes, size_t index,
                    const Place& now) const;
  void ran(const CommandNote& note) noexcept;
  void taken_out(const CommandNote& note, const void* list) noexcept;
  void dropped(const CommandNote& note, const void* list) noexcept;

  std::vector<Layer> layers_;
  std::vector<Pending> pending_;  // lists with moves and appends that are not submitted
  Place recorded_, submitted_;
  uint64_t lost_ = kNothingLost;    // tokens from here on are not what the length says
  const void* moved_in_ = nullptr;  // the newest move's list, until that is submitted or dropped
  bool is_copy_ = false;
};

}  // namespace gyre
