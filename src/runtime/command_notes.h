#pragma once
// Notes that an op leaves beside its commands. Their observer is asked before the list runs and
// told what became of it: KvCache and KvPool follow their steps that way. Backends never see them.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace gyre {

// What became of a list: it was submitted, kept in a graph, replayed from one, or dropped.
enum class ListOutcome : uint8_t { submitted, kept, replayed, dropped };

struct CommandNote {
  uint32_t observer = 0;  // index, set by CommandNotes
  uint32_t kind = 0;      // and numbers: the observer's
  uint64_t number[4] = {};
};

// Notes of a list in order, those of other observers among them.
template <class Note>
struct ObservedNotes {
  std::span<Note> all;
  uint32_t observer;
};

class CommandObserver {
 public:
  CommandObserver() = default;
  CommandObserver(const CommandObserver&) = delete;
  CommandObserver& operator=(const CommandObserver&) = delete;
  virtual ~CommandObserver() = default;

  // Throws if the list must not run now; `op` opens the message.
  virtual void check(const char* op, const ObservedNotes<const CommandNote>& notes) const = 0;
  // `list` says which list; null if replayed. Notes that are kept may be changed.
  virtual void notify(ListOutcome outcome, const void* list,
                      const ObservedNotes<CommandNote>& notes) noexcept = 0;
};

// What an op hands to its recording.
struct NewNote {
  std::shared_ptr<CommandObserver> observer;
  CommandNote note;
};

class CommandNotes {
 public:
  void add(const NewNote& note);
  void check(const char* op) const;
  void notify(ListOutcome outcome, const void* list);
  uint64_t size() const { return notes_.size(); }
  void shrink(uint64_t size) { notes_.resize(size); }
  void clear();

 private:
  std::vector<std::shared_ptr<CommandObserver>> observers_;
  std::vector<CommandNote> notes_;
};

}  // namespace gyre
