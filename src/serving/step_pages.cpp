#include "serving/step_pages.h"

#include <algorithm>
#include <tuple>

#include "runtime/require.h"

namespace gyre {
namespace {

using Pages = KvSequenceState::Pages;

// Whether the step writes into a page that others hold.
bool writes_shared(const PageGroup& group, const Pages& pages, const StepPages::Member& member) {
  return member.place != 0 && pages.has(member.page) && group.writes(member.start) &&
         group.shared(pages.at(member.page));
}

}  // namespace

StepPages::StepPages(std::shared_ptr<KvPoolState> pool, uint64_t max_sequences, uint64_t max_tokens,
                     uint64_t max_kv_length)
    : pool_(std::move(pool)),
      max_pages_((max_kv_length + pool_->options.page_tokens - 1) / pool_->options.page_tokens) {
  copies_.reserve(max_sequences * pool_->groups.size());
  held_.reserve(max_sequences * pool_->groups.size());
  changes_.reserve(max_sequences * pool_->groups.size());
  indexed_.reserve(max_sequences * pool_->groups.size());
  shared_.reserve(2 * max_sequences);
  // A window moves by what the step before has written, and by a page that it had left.
  dropped_.reserve((max_sequences + max_tokens / pool_->options.page_tokens) *
                   pool_->groups.size());
}

void StepPages::check(const char* op, std::span<const Member> members) {
  changes_.clear();
  indexed_.clear();
  for (size_t i = 0; i < pool_->groups.size(); ++i) {
    const size_t indexed = indexed_.size();
    check_room(op, i, indexed, count(i, members), members);
  }
  uint64_t dropped = 0;
  for (const Change& change : changes_) dropped += change.drop;
  dropped_.reserve(dropped);
}

// Pages that the step needs of a group, and pages that it drops before.
StepPages::Count StepPages::count(size_t index, std::span<const Member> members) {
  const PageGroup& group = pool_->groups[index];
  Count count;
  shared_.clear();
  for (const Member& member : members) {
    Pages& pages = member.sequence->groups[index];
    // The first step with a sequence takes host memory for all that come.
    if (pages.ids.capacity() < max_pages_) pages.ids.reserve(max_pages_);
    const uint64_t end = group.end_page_of(member.end_page), has = pages.end();
    const uint64_t added = end > has ? end - has : 0;
    uint64_t page = pages.first;
    for (; page < has && group.is_behind(page, member.start); ++page) {
      if (group.holders(pages.at(page)) == 1) {
        ++count.given;
      } else {
        shared_.push_back({pages.at(page), false, member.start, changes_.size()});
      }
    }
    count.needed += added;
    const bool writes = writes_shared(group, pages, member);
    if (writes) shared_.push_back({pages.at(member.page), true, member.start, changes_.size()});
    if (added != 0 || writes || page != pages.first)
      changes_.push_back({&member, index, page - pages.first, pages.first, pages.begin, writes});
  }
  if (!shared_.empty()) count_shared(index, count);
  return count;
}

// A page that all its holders drop is room. If all holders that are left write to a page, one of
// them need not copy it: the longest, because what it writes lies behind what the others have, so
// that they can have the page back when the step is taken back.
void StepPages::count_shared(size_t index, Count& count) {
  const PageGroup& group = pool_->groups[index];
  std::ranges::sort(shared_, {}, [](const Shared& each) {
    return std::tuple(each.page, each.writes, each.start);
  });
  for (auto first = shared_.begin(); first != shared_.end();) {
    const PageId page = first->page;
    const auto writer = std::find_if(
        first, shared_.end(), [&](const Shared& each) { return each.page != page || each.writes; });
    const auto end =
        std::find_if(writer, shared_.end(), [&](const Shared& each) { return each.page != page; });
    const auto drops = static_cast<uint64_t>(writer - first);
    const auto writers = static_cast<uint64_t>(end - writer);
    const bool everyone = group.holders(page) == drops + writers;
    count.needed += writers;
    if (everyone && writers == 0) ++count.given;
    if (everyone && writers != 0) {
      const size_t longest = (end - 1)->change;
      if (group.nodes(page) != 0) {
        indexed_.push_back({page, index, longest});
      } else {
        changes_[longest].copies = false;
        --count.needed;
      }
    }
    first = end;
  }
}

// Where pages are missing, the index lets go of pages that one sequence then need not copy: those
// in `indexed_` from `indexed` on.
void StepPages::check_room(const char* op, size_t index, size_t indexed, const Count& count,
                           std::span<const Member> members) {
  const uint64_t has = pool_->available(index) + count.given;
  const uint64_t missing = count.needed > has ? count.needed - has : 0;
  const uint64_t spared = indexed_.size() - indexed;
  if (missing > spared) {
    const uint64_t pages = pool_->groups[index].pages(), needed = count.needed - spared;
    check_each(op, index, members);
    fail(ErrorCode::out_of_memory, op, ": ", needed - has, " pages are missing: the step needs ",
         needed, " of group \"", pool_->group_name(index), "\", where ", has, " of ", pages,
         " are free or cached");
  }
  indexed_.resize(indexed + missing);
  for (size_t i = indexed; i < indexed_.size(); ++i) changes_[indexed_[i].change].copies = false;
}

// Refuses a sequence that the pool cannot hold even alone.
void StepPages::check_each(const char* op, size_t index, std::span<const Member> members) const {
  const PageGroup& group = pool_->groups[index];
  for (const Member& member : members) {
    const uint64_t first =
        std::max(member.sequence->groups[index].first, group.first_page(member.start));
    const uint64_t end = group.end_page_of(member.end_page);
    require(end <= first + group.pages(), op, ": can never fit: a sequence of ", member.start,
            " tokens and ", member.tokens, " more needs ", end - first, " pages of ",
            pool_->group_name(index), ", and the pool has ", group.pages(),
            "; take fewer tokens in a step, or a pool with more pages, sequences or step_tokens");
  }
}

void StepPages::take(const Change& change) {
  const Member& member = *change.member;
  const PageGroup& group = pool_->groups[change.group];
  Pages& pages = member.sequence->groups[change.group];
  if (change.copies) {
    const PageId to = pool_->take(change.group);
    PageId& entry = pages.ids[member.page - pages.first];
    copies_.push_back({change.group, entry, to});
    held_.push_back({member.sequence.get(), member.page});
    entry = to;
    pages.changed(member.page);
  }
  const uint64_t end = group.end_page_of(member.end_page);
  while (pages.end() < end) pages.ids.push_back(pool_->take(change.group));
}

// Pages that fall off the front of a window.
void StepPages::drop(const Change& change) {
  PageGroup& group = pool_->groups[change.group];
  Pages& pages = change.member->sequence->groups[change.group];
  const auto end = pages.ids.begin() + static_cast<ptrdiff_t>(change.drop);
  dropped_.insert(dropped_.end(), pages.ids.begin(), end);
  for (uint64_t i = change.drop; i-- > 0;) group.release(pages.ids[i]);
  pages.ids.erase(pages.ids.begin(), end);
  pages.first += change.drop;
}

// Takes back pages that a step dropped, if the step was never recorded: nothing has been written to
// them since.
void StepPages::take_back_dropped() {
  if (dropped_.empty()) return;
  auto at = dropped_.begin();
  for (const Change& change : changes_) {
    Pages& pages = change.member->sequence->groups[change.group];
    const auto end = at + static_cast<ptrdiff_t>(change.drop);
    for (auto page = at; page != end; ++page) pool_->groups[change.group].take_back(*page);
    pages.ids.insert(pages.ids.begin(), at, end);  // as many as there were: no memory is taken
    pages.first = change.first;
    pages.begin = change.begin;
    at = end;
  }
  dropped_.clear();
}

void StepPages::take(std::span<const Member> members) {
  for (const Indexed& each : indexed_) {
    // A prefix that was evicted before may have taken this one along.
    if (pool_->groups[each.group].nodes(each.page) != 0) pool_->evict(each.group, each.page);
  }
  for (const Change& change : changes_) drop(change);
  for (const Change& change : changes_) take(change);
  for (const Member& member : members) member.sequence->length = member.start + member.tokens;
}

void StepPages::undo(std::span<const Member> members) {
  for (size_t i = 0; i < copies_.size(); ++i) {
    Pages& pages = held_[i].sequence->groups[copies_[i].group];
    pages.ids[held_[i].page - pages.first] = copies_[i].from;
    pages.changed(held_[i].page);
    pool_->groups[copies_[i].group].release(copies_[i].to);
  }
  copies_.clear();
  held_.clear();
  for (const Member& member : members) {
    member.sequence->shorten(member.start);
    member.sequence->unwritten = member.before;
  }
  take_back_dropped();
}

void StepPages::note_copies() const {
  for (const Held& held : held_) {
    uint64_t& start = held.sequence->unwritten.start;
    start = std::min(start, held.page * pool_->options.page_tokens);
  }
}

void StepPages::commit() {
  for (const PageCopy& copy : copies_) pool_->groups[copy.group].release(copy.from);
  copies_.clear();
  held_.clear();
}

}  // namespace gyre
