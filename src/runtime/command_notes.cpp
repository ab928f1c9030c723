#include "runtime/command_notes.h"

#include <algorithm>

namespace gyre {

void CommandNotes::add(const NewNote& note) {
  const auto found = std::ranges::find(observers_, note.observer);
  const auto index = static_cast<uint32_t>(found - observers_.begin());
  if (found == observers_.end()) observers_.push_back(note.observer);
  notes_.push_back(note.note);
  notes_.back().observer = index;
}

void CommandNotes::check(const char* op) const {
  for (uint32_t i = 0; i < observers_.size(); ++i) observers_[i]->check(op, {notes_, i});
}

void CommandNotes::notify(ListOutcome outcome, const void* list) {
  for (uint32_t i = 0; i < observers_.size(); ++i)
    observers_[i]->notify(outcome, list, {notes_, i});
}

void CommandNotes::clear() {
  observers_.clear();
  notes_.clear();
}

}  // namespace gyre
