#include "serving/step_pages.h"

#include <algorithm>

#include "runtime/require.h"

namespace gyre {
namespace {

using Pages = KvSequence::State::Pages;

// Whether the step writes behind what a shared page holds already.
bool copies_page(const PageGroup& group, const Pages& pages, uint64_t start, uint64_t page_tokens) {
  const uint64_t page = start / page_tokens;
  return start % page_tokens != 0 && group.writes(start) && pages.has(page) &&
         group.shared(pages.at(page));
}

}  // namespace

StepPages::StepPages(std::shared_ptr<KvPool::State> pool, uint64_t max_sequences,
                     uint64_t max_length)
    : pool_(std::move(pool)),
      max_pages_((max_length + pool_->options.page_tokens - 1) / pool_->options.page_tokens),
      needed_(pool_->groups.size()),
      given_(pool_->groups.size()) {
  copies_.reserve(max_sequences * pool_->groups.size());
  held_.reserve(max_sequences * pool_->groups.size());
}

void StepPages::check(const char* op, std::span<const Member> members) {
  const uint64_t page_tokens = pool_->options.page_tokens;
  for (size_t i = 0; i < pool_->groups.size(); ++i) {
    const PageGroup& group = pool_->groups[i];
    uint64_t needed = 0, given = 0;
    for (const Member& member : members) {
      Pages& pages = member.sequence->groups[i];
      pages.ids.reserve(max_pages_);  // the first step with a sequence, for all that come
      const uint64_t end = group.end_page(member.start + member.tokens);
      needed += end > pages.end() ? end - pages.end() : 0;
      needed += copies_page(group, pages, member.start, page_tokens) ? 1 : 0;
      const uint64_t first = group.first_page(member.start);
      for (uint64_t page = pages.first; page < first && page < pages.end(); ++page)
        given += group.last(pages.at(page)) ? 1 : 0;
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
}

void StepPages::take(const Member& member, size_t index) {
  PageGroup& group = pool_->groups[index];
  Pages& pages = member.sequence->groups[index];
  const uint64_t page_tokens = pool_->options.page_tokens, page = member.start / page_tokens;
  if (copies_page(group, pages, member.start, page_tokens)) {
    const PageId to = pool_->take(index);
    PageId& entry = pages.ids[page - pages.first];
    copies_.push_back({index, entry, to});
    held_.push_back({member.sequence.get(), page});
    entry = to;
    pages.changed(page);
  }
  const uint64_t end = group.end_page(member.start + member.tokens);
  while (pages.end() < end) pages.ids.push_back(pool_->take(index));
}

void StepPages::take(std::span<const Member> members) {
  for (size_t i = 0; i < pool_->groups.size(); ++i) {
    PageGroup& group = pool_->groups[i];
    for (const Member& member : members) {
      Pages& pages = member.sequence->groups[i];
      const uint64_t first = std::min(group.first_page(member.start), pages.end());
      if (first <= pages.first) continue;
      const auto gone = static_cast<ptrdiff_t>(first - pages.first);
      for (auto id = pages.ids.begin() + gone; id != pages.ids.begin();) group.release(*--id);
      pages.ids.erase(pages.ids.begin(), pages.ids.begin() + gone);
      pages.first = first;
    }
  }
  for (size_t i = 0; i < pool_->groups.size(); ++i) {
    for (const Member& member : members) take(member, i);
  }
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
  for (const Member& member : members) member.sequence->shorten(member.start);
}

void StepPages::keep() {
  for (const PageCopy& copy : copies_) pool_->groups[copy.group].release(copy.from);
  copies_.clear();
  held_.clear();
}

}  // namespace gyre
