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
  // What may run of recordings, whose notes are for any step. In a step that lacks layers: graphs
  // and lists. While a recording is open: its list alone, which a caller's graph may capture.
  enum class Phase : uint8_t { idle, recording, step };
  void set_phase(uint64_t batch, Phase phase) { batches_.at(batch).phase = phase; }
  // Whether a begin() of the batch was dropped since the last call.
  bool take_lost(uint64_t batch);
  // Whether the layer's append of the batch's newest step has been submitted or replayed.
  bool appended(uint64_t batch, uint64_t layer) const {
    const Batch& of = batches_.at(batch);
    return of.appended[layer] == of.recorded && of.recorded != 0;
  }
  void assume_appended(uint64_t batch);  // all layers

  // Notes. A step is known by the number that its begin() got here. `base`: the step of the same
  // batch whose tables it changes; 0: it sends them whole. Step 0 is any, of a recording.
  CommandNote begin_note(uint64_t batch, uint64_t base, uint64_t tokens);
  CommandNote append_note(uint64_t batch, uint64_t step, uint64_t layer, uint64_t rows);
  CommandNote attend_note(uint64_t batch, uint64_t step, uint64_t layer);
  void recorded(const CommandNote& note, const void* list);
  static uint64_t step_of_begin(const CommandNote& begin) { return begin.number[0]; }

  void cancel(uint64_t step);  // it did not happen, whatever becomes of its lists
  // The worst of a step's writes. Kept: in a graph that was not replayed.
  enum class Fate : uint8_t { ran, recorded, kept, dropped };
  Fate fate(uint64_t step) const;
  void require_nothing_recorded(const char* op) const;

  void check(const char* op, const ObservedNotes<const CommandNote>& notes) const override;
  void tell(ListFate fate, const void* list,
            const ObservedNotes<CommandNote>& notes) noexcept override;

 private:
  struct Batch {
    uint64_t submitted = 0;  // its newest begin() that was
    uint64_t recorded = 0;
    uint64_t tokens = 0;  // of the newest that was recorded
    Phase phase = Phase::idle;
    bool lost = false;
    bool removed = false;
    std::vector<uint64_t> appended{};  // per layer: the newest step whose append ran
  };
  struct Pending {
    const void* list;
    uint64_t first;  // serial number of its first note
  };
  // A step some of whose writes have not run. No list: they are in a graph.
  struct Unfinished {
    const void* list;
    uint64_t step;
    uint64_t appends;  // that are in the list or the graph
    bool spoiled;      // a step before it was dropped
  };

  uint64_t next() { return ++serial_; }
  void forget_removed() noexcept;
  uint64_t now_of(uint64_t batch) const;
  void check_begin(const char* op, const CommandNote& note, uint64_t first) const;
  void check_layer(const char* op, const ObservedNotes<const CommandNote>& notes,
                   size_t index) const;
  void check_append(const char* op, const CommandNote& note) const;
  bool is_appended(const ObservedNotes<const CommandNote>& notes, size_t index) const;
  void ran(const CommandNote& append, ListFate fate) noexcept;
  void drop(const void* list) noexcept;

  std::map<uint64_t, Batch> batches_;  // by number
  std::vector<Pending> pending_;
  std::vector<Unfinished> unfinished_;
  std::vector<uint64_t> dropped_;  // steps, in order
  uint64_t serial_ = 0;
  uint64_t newest_ = 0;  // begin() that was recorded
  // Of check(): the steps that a list begins, by batch.
  mutable std::vector<std::pair<uint64_t, uint64_t>> now_;
};

}  // namespace gyre
