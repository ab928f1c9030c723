#pragma once
// The step log of a KvCache or a KvBatch. A step is begun, every layer appends its tokens, and only
// then the next step begins. The log follows what was recorded, submitted, replayed and dropped,
// and refuses calls that would give wrong answers.
//
// At most one encoder holds unsubmitted calls on a cache or pool; a second one is refused. So steps
// run in the order of the calls, and a dropped list takes back everything that was not submitted.

#include <atomic>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/command_notes.h"

namespace gyre {

// What became of a step's tokens. in_graph: their appends have not all run, and no list has them.
enum class StepOutcome : uint8_t { written, unsubmitted, in_graph, dropped };

// The steps of a cache, or of all batches of a pool.
class Steps {
 public:
  static constexpr uint64_t kLostStep = ~uint64_t{0};  // its outcome is `dropped`

  explicit Steps(const char* owner);  // "kv_cache", for messages

  void require_encoder(const char* op, const void* list) const;  // refuses a second encoder
  void require_submitted(const char* op) const;                  // no encoder holds a call
  StepOutcome outcome(uint64_t step) const;
  void forget(uint64_t step) noexcept;  // it was written or taken back
  // The step's pages may belong to others now: graphs that were recorded in it must not run.
  void close_graphs(uint64_t step) { newest_ = newest_ == step ? 0 : newest_; }

 private:
  friend class StepLog;
  friend class StepsUse;
  struct Unwritten {
    uint64_t step;
    StepOutcome outcome;
  };
  size_t find(uint64_t step) const;
  void set_outcome(uint64_t step, StepOutcome outcome) noexcept;  // dropped: for good
  void release(const void* list) noexcept;

  const char* owner_;
  uint64_t process_;
  mutable std::atomic<std::thread::id> thread_{};  // that is inside a call
  const void* list_ = nullptr;                     // the encoder with unsubmitted calls
  std::vector<Unwritten> unwritten_;               // in the order of their steps
  uint64_t serial_ = 0;
  uint64_t newest_ = 0;  // step
};

// A call's time inside a pool. Calls of one thread nest.
class StepsUse {
 public:
  StepsUse(const Steps& steps, const char* op);    // refuses a second thread
  explicit StepsUse(const Steps& steps) noexcept;  // waits: for calls that must not throw
  StepsUse(const StepsUse&) = delete;
  StepsUse& operator=(const StepsUse&) = delete;
  ~StepsUse();

 private:
  bool enter() noexcept;
  std::atomic<std::thread::id>& thread_;
  bool nested_;
};

// Tokens of a sequence that are not written yet, or never will be.
struct UnwrittenTokens {
  uint64_t step = 0;   // the newest that wrote to the sequence
  uint64_t start = 0;  // first token of the oldest step that was unsubmitted when it began

  void begin(const Steps& steps, uint64_t next, uint64_t at);
  void rollback(uint64_t length) { *this = length <= start ? UnwrittenTokens{} : *this; }
  bool is_dropped(const Steps& steps, uint64_t length) const;
  // Refuse tokens that were dropped; or that are in a graph as well; or unsubmitted as well.
  void require_not_dropped(const char* op, const Steps& steps, uint64_t length) const;
  void require_written(const char* op, const Steps& steps, uint64_t length) const;
  void require_submitted(const char* op, const Steps& steps, uint64_t length) const;
};

class StepLog final : public CommandObserver {
 public:
  struct Rules {
    const char* object;     // opens messages: "kv_cache"
    const char* begin;      // the call that begins a step: "begin_step()"
    const char* take_back;  // calls that end an incomplete step
    // Graphs may be recorded at any time and run in every step with as many tokens. Otherwise they
    // are recorded between record() and end_step(), or run in the step that they were recorded in.
    bool any_graph;
  };
  // Where a sequence is. A batch uses tokens and id alone.
  struct Place {
    uint64_t length = 0;
    uint64_t peak = 0;    // longest since it was cleared
    uint64_t tokens = 0;  // of the step; 0: none is begun
    uint64_t id = 0;      // set by begin_note()
  };

  // Slots of a layer without a cache: it reads another's, and no append is expected.
  static constexpr uint64_t kSharesKv = ~uint64_t{0};
  // ring_slots: per layer; 0: no key is lost.
  StepLog(const Rules& rules, std::shared_ptr<Steps> steps,
          const std::vector<uint64_t>& ring_slots);

  bool holds(uint64_t layer, const Place& at, uint64_t oldest) const;
  bool recording() const { return phase_ == Phase::recording; }
  bool open() const { return phase_ == Phase::step; }  // begun, perhaps complete
  bool complete() const { return appended_ == appending_; }
  // If a step is begun. `whose` opens the message.
  void require_complete(const char* op, const char* whose = "") const;

  // Notes for an encoder's list, and recorded() when the list has them. `complete`: the layers come
  // with the step, as in a copy.
  CommandNote begin_note(const Place& next, bool complete = false);
  CommandNote append_note(uint64_t layer, uint64_t tokens) const;
  CommandNote attend_note(uint64_t layer, uint64_t queries, uint64_t window) const;
  static CommandNote read_note();
  static uint64_t step_of(const CommandNote& note) { return note.number[0]; }
  void recorded(const CommandNote& note, const void* list) noexcept;

  // Without commands.
  void loaded(Place next) noexcept;
  void lost() noexcept { recorded_.id = ++steps_->serial_; }  // a load failed half-way
  void mark_captured(const char* op);                         // every layer
  void record(const char* op);                                // for a graph
  void end(const char* op);  // a recording, or a step whose appends were replayed
  void cancel() noexcept;    // the step or recording
  // A batch appends each layer once and attends behind that.
  void check_append(const char* op, uint64_t layer) const;
  void check_attend(const char* op, uint64_t layer) const;
  // Whether a begin was dropped since the last call.
  bool take_dropped_begin() { return std::exchange(dropped_begin_, false); }

  void check(const char* op, const ObservedNotes<const CommandNote>& notes) const override;
  void notify(ListOutcome outcome, const void* list,
              const ObservedNotes<CommandNote>& notes) noexcept override;

 private:
  enum class Phase : uint8_t { idle, step, recording };
  struct Layer {
    uint64_t ring_slots;
    uint64_t recorded;  // step or recording that its append was recorded in
    uint64_t ran;       // step that its append ran in
    bool appends() const { return ring_slots != kSharesKv; }
    bool lacks(uint64_t step) const { return appends() && recorded != step; }
  };
  // "layers 0, 2 to 5", written where the message is: no other memory may be taken here.
  struct Missing {
    const StepLog& log;
  };
  friend std::ostream& operator<<(std::ostream& out, const Missing& missing);

  uint64_t step_for(bool fits) const;
  void check_layer(const char* op, uint64_t layer) const;
  void check_append(const char* op, const CommandNote& note, const Place& now) const;
  void check_attend(const char* op, const ObservedNotes<const CommandNote>& notes, size_t index,
                    const Place& now) const;
  bool is_appended(const ObservedNotes<const CommandNote>& notes, size_t index, uint64_t layer,
                   const Place& now) const;
  void mark_appended(uint64_t layer) noexcept;
  void mark_missing(uint64_t layer) noexcept;
  void ran(const CommandNote& note) noexcept;
  void layer_ran(uint64_t layer) noexcept;
  void retain(CommandNote& note) noexcept;
  void drop(const CommandNote& note, bool reopen) noexcept;

  Rules rules_;
  std::shared_ptr<Steps> steps_;
  std::vector<Layer> layers_;
  Place recorded_, submitted_;
  Phase phase_ = Phase::idle;
  uint64_t open_ = ~uint64_t{0};  // the step or recording that appends count for
  uint64_t appending_ = 0;        // layers that append
  uint64_t appended_ = 0;         // layers of it that have appended
  uint64_t ran_ = 0;              // layers whose append ran in submitted_
  bool dropped_begin_ = false;
};

}  // namespace gyre
