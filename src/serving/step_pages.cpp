#include "serving/step_pages.h"

#include <algorithm>

#include "runtime/require.h"

namespace gyre {
namespace {

using Pages = KvSequence::State::Pages;

// Whether the step goes on inside a shared page. Also behind the last sink: the prefix index knows
// a page of sink tokens under the tokens of a whole page, and these part here.
bool copies_page(const PageGroup& group, const Pages& pages, const StepPages::Member& member) {
  return member.place != 0 && pages.has(member.page) && group.shared(pages.at(member.page));
}

}  // namespace

StepPages::StepPages(std::shared_ptr<KvPool::State> pool, uint64_t max_sequences,
                     uint64_t max_tokens, uint64_t max_kv_length)
    : pool_(std::move(pool)),
      max_pages_((max_kv_length + pool_->options.page_tokens - 1) / pool_->options.page_tokens),
      needed_(pool_->groups.size()),
      given_(pool_->groups.size()) {
  copies_.reserve(max_sequences * pool_->groups.size());
  held_.reserve(max_sequences * pool_->groups.size());
  changes_.reserve(max_sequences * pool_->groups.size());
  // A window moves by what the step before has written, and by a page that it had left.
  dropped_.reserve((max_sequences + max_tokens / pool_->options.page_tokens) *
                   pool_->groups.size());
}

void StepPages::check(const char* op, std::span<const Member> members) {
  changes_.clear();
  uint64_t dropped = 0;
  for (size_t i = 0; i < pool_->groups.size(); ++i) {
    const PageGroup& group = pool_->groups[i];
    uint64_t needed = 0, given = 0;
    for (const Member& member : members) {
      Pages& pages = member.sequence->groups[i];
      // The first step with a sequence takes host memory for all that come.
      if (pages.ids.capacity() < max_pages_) pages.ids.reserve(max_pages_);
      const uint64_t end = group.end_page_of(member.end_page), has = pages.end();
      const uint64_t more =
          (end > has ? end - has : 0) + (copies_page(group, pages, member) ? 1 : 0);
      uint64_t page = pages.first;
      for (; page < has && group.is_behind(page, member.start); ++page)
        given += group.last(pages.at(page)) ? 1 : 0;
      needed += more;
      dropped += page - pages.first;
      if (more != 0 || page != pages.first)
        changes_.push_back({&member, i, page - pages.first, pages.first, pages.begin});
    }
    needed_[i] = needed;
    given_[i] = given;
  }
  for (size_t i = 0; i < pool_->groups.size(); ++i) {
    const PageGroup& group = pool_->groups[i];
    const uint64_t has = pool_->available(i) + given_[i];
    if (needed_[i] <= has) continue;
    fail(ErrorCode::out_of_memory, op, ": ", needed_[i] - has,
         " pages are missing: the step needs ", needed_[i], " of ", pool_->group_name(i),
         ", where ", has, " of ", group.pages(), " can be had");
  }
  dropped_.reserve(dropped);
}

void StepPages::take(const Member& member, size_t index) {
  PageGroup& group = pool_->groups[index];
  Pages& pages = member.sequence->groups[index];
  if (copies_page(group, pages, member)) {
    const PageId to = pool_->take(index);
    PageId& entry = pages.ids[member.page - pages.first];
    copies_.push_back({index, entry, to});
    held_.push_back({member.sequence.get(), member.page});
    entry = to;
    pages.changed(member.page);
  }
  const uint64_t end = group.end_page_of(member.end_page);
  while (pages.end() < end) pages.ids.push_back(pool_->take(index));
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
  for (const Change& change : changes_) drop(change);
  for (const Change& change : changes_) take(*change.member, change.group);
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

void StepPages::keep() {
  for (const PageCopy& copy : copies_) pool_->groups[copy.group].release(copy.from);
  copies_.clear();
  held_.clear();
}

}  // namespace gyre
