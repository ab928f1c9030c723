#include <algorithm>
#include <utility>

#include "runtime/require.h"
#include "serving/pool_state.h"

namespace gyre {

KvSequenceState::KvSequenceState(std::shared_ptr<KvPoolState> owner)
    : pool(std::move(owner)), number(pool->next_sequence++), groups(pool->groups.size()) {
  ++pool->sequences;
}

KvSequenceState::~KvSequenceState() {
  const StepsUse use(*pool->steps);
  shorten(0);
  --pool->sequences;
}

void KvSequenceState::require_no_step(const char* op) const {
  if (step != nullptr) step->require_complete(op);
}

void KvSequenceState::require_written(const char* op) const {
  if (unwritten.is_dropped(*pool->steps, length)) {
    const uint64_t to = unwritten.start;
    const bool can_roll_back = can_shorten(to);
    fail(ErrorCode::invalid_argument, op, ": tokens from ", to,
         " on were recorded and dropped, and there are ", length, "; ",
         can_roll_back ? join("rollback() at least ", length - to)
                       : join("clear() the sequence: a window has lost keys that ", to,
                              " tokens would need"));
  }
  unwritten.require_written(op, *pool->steps, length);
}

bool KvSequenceState::can_shorten(uint64_t to) const {
  for (size_t i = 0; i < groups.size(); ++i)
    if (pool->lost_key(i, groups[i].first, to)) return false;
  return true;
}

void KvSequenceState::check_shorter(const char* op, uint64_t to) const {
  for (size_t i = 0; i < groups.size(); ++i) pool->check_window(op, i, groups[i].first, to);
}

void KvSequenceState::shorten(uint64_t to) {
  const uint64_t page_tokens = pool->options.page_tokens;
  for (size_t i = 0; i < groups.size(); ++i) {
    PageGroup& group = pool->groups[i];
    Pages& pages = groups[i];
    const uint64_t end = std::max(group.end_page(to), pages.first), had = pages.end();
    // From the last to the first: the first is then the one used most recently.
    for (; pages.end() > end; pages.ids.pop_back()) group.release(pages.ids.back());
    if (pages.ids.empty() && group.writes(to))
      pages.first = std::min(pages.first, to / page_tokens);
    pages.begin = std::min(pages.begin, to);
    // The page that `to` lies in may be gone already: what is written there again begins the tail.
    if (group.keys().f16 && group.keys().window != 0 && pages.ids.empty()) pages.begin = to;
    if (pages.end() != had) pages.changed(pages.end());
  }
  if (to < length) pool->steps->close_graphs(unwritten.step);
  length = to;
  unwritten.rollback(to);
}

KvSequence::KvSequence(std::shared_ptr<KvSequenceState> state) : state_(std::move(state)) {}
KvSequence::KvSequence(KvSequence&&) noexcept = default;
KvSequence& KvSequence::operator=(KvSequence&&) noexcept = default;
KvSequence::~KvSequence() = default;

KvSequenceState& KvSequence::state(const char* op) const {
  require(state_ != nullptr, op, ": the sequence was moved from");
  return *state_;
}

uint64_t KvSequence::length() const { return state("kv_sequence.length").length; }

KvSequence KvSequence::fork() const try {
  const KvSequenceState& from = state("kv_sequence.fork");
  const StepsUse use(*from.pool->steps, "kv_sequence.fork");
  from.require_no_step("kv_sequence.fork");
  from.require_written("kv_sequence.fork");
  auto made = std::make_shared<KvSequenceState>(from.pool);
  for (size_t i = 0; i < from.groups.size(); ++i) {
    KvSequenceState::Pages& to = made->groups[i];
    to.first = from.groups[i].first;
    to.begin = from.groups[i].begin;
    to.ids.reserve(from.groups[i].ids.size());
    for (const PageId page : from.groups[i].ids) {
      from.pool->groups[i].retain(page);
      to.ids.push_back(page);
    }
  }
  made->length = from.length;
  made->unwritten = from.unwritten;
  return KvSequence(std::move(made));
} catch (const std::bad_alloc&) {
  out_of_memory("kv_sequence.fork");
}

void KvSequence::rollback(uint64_t tokens) try {
  KvSequenceState& s = state("kv_sequence.rollback");
  const StepsUse use(*s.pool->steps, "kv_sequence.rollback");
  s.require_no_step("kv_sequence.rollback");
  require(tokens <= s.length, "kv_sequence.rollback: the sequence has ", s.length,
          " tokens, cannot drop ", tokens);
  s.check_shorter("kv_sequence.rollback", s.length - tokens);
  s.shorten(s.length - tokens);
} catch (const std::bad_alloc&) {  // the message's
  out_of_memory("kv_sequence.rollback");
}

void KvSequence::clear() {
  KvSequenceState& s = state("kv_sequence.clear");
  const StepsUse use(*s.pool->steps, "kv_sequence.clear");
  s.require_no_step("kv_sequence.clear");
  s.shorten(0);
}

}  // namespace gyre
