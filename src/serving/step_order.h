#pragma once
// The order in which the recorded steps of a pool run. Pages change hands on the host when a step
// is recorded, and a batch sends what differs from the step before: so lists run in the order in
// which they were recorded, and what is dropped is never taken for written. Lists are checked when
// they are submitted, graphs when they are replayed.

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "runtime/command_notes.h"

namespace gyre {

class StepOrder final : public CommandObserver {
 public:
  uint64_t add_batch(uint64_t layers);  // its number
  // Lists that were recorded with it may still run.
  void remove_batch(uint64_t batch) noexcept;
  uint64_t batches() const { return batches_.size(); }
  // Whether a recorded step may run for the batch: one is begun and not complete, or a recording is
  // open, whose list a caller's graph may capture.
  void set_open(uint64_t batch, bool open) { batches_.at(batch).open = open; }
  // Whether a begin() of the batch was dropped since the last call.
  bool take_lost(uint64_t batch);
  // Whether a graph has appended the layer in the batch's newest step.
  bool replayed(uint64_t batch, uint64_t layer) const {
    const Batch& of = batches_.at(batch);
    return of.replayed[layer] == of.recorded && of.recorded != 0;
  }

  // Notes. A step is known by the number that its begin() got here. `base`: the step of the same
  // batch whose tables it changes; 0: it sends them whole. Step 0 is any, of a recording.
  CommandNote begin_note(uint64_t batch, uint64_t base);
  CommandNote append_note(uint64_t batch, uint64_t step, uint64_t layer);
  CommandNote attend_note(uint64_t batch, uint64_t step);
  void recorded(const CommandNote& note, const void* list);
  static uint64_t step_of_begin(const CommandNote& begin) { return begin.number[0]; }

  void cancel(uint64_t step);  // it did not happen, whatever becomes of its lists
  enum class Fate : uint8_t { ran, recorded, dropped };
  Fate fate(uint64_t step) const { return unfinished_.empty() ? Fate::ran : worst_fate(step); }
  void require_nothing_recorded(const char* op) const;

  void check(const char* op, const ObservedNotes<const CommandNote>& notes) const override;
  void tell(ListFate fate, const void* list,
            const ObservedNotes<CommandNote>& notes) noexcept override;

 private:
  struct Batch {
    uint64_t submitted = 0;  // its newest begin() that was
    uint64_t recorded = 0;
    bool open = false, lost = false;
    bool removed = false;
    std::vector<uint64_t> replayed{};  // per layer: the newest step in which a graph appended it
  };
  struct Pending {
    const void* list;
    uint64_t first;  // serial number of its first note
  };
  // A step some of whose writes have not run. No list: they are in a graph, or dropped.
  struct Unfinished {
    const void* list;
    uint64_t step;
    bool dropped;
    bool spoiled;  // a step before it was dropped
  };

  uint64_t next() { return ++serial_; }
  void forget_removed() noexcept;
  uint64_t now_of(uint64_t batch) const;
  void check_begin(const char* op, const CommandNote& note, uint64_t first) const;
  void check_layer(const char* op, const CommandNote& note) const;
  void replay(const CommandNote& append) noexcept;
  void drop(const void* list) noexcept;
  Fate worst_fate(uint64_t step) const;

  std::map<uint64_t, Batch> batches_;  // by number
  std::vector<Pending> pending_;
  std::vector<Unfinished> unfinished_;
  uint64_t serial_ = 0;
  // Of check(): the steps that a list begins, by batch.
  mutable std::vector<std::pair<uint64_t, uint64_t>> now_;
};

}  // namespace gyre
