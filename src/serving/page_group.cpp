#include "serving/page_group.h"

namespace gyre {

PageGroup::PageGroup(const GroupKeys& keys, uint64_t pages, uint64_t page_tokens)
    : keys_(keys),
      page_tokens_(page_tokens),
      limit_pages_(keys.limit != 0 ? (keys.limit + page_tokens - 1) / page_tokens : ~uint64_t{0}),
      page_(pages) {
  free_.reserve(pages);
  for (uint64_t i = pages; i-- > 0;) free_.push_back(static_cast<PageId>(i));
}

PageId PageGroup::take() {
  const PageId page = free_.back();
  free_.pop_back();
  page_[index(page)].holders = 1;
  return page;
}

void PageGroup::retain(PageId page) {
  Page& p = page_[index(page)];
  if (is_cached(p)) unlink(page);
  ++p.holders;
}

void PageGroup::release(PageId page) {
  Page& p = page_[index(page)];
  --p.holders;
  if (p.holders == 0) free_.push_back(page);
  if (is_cached(p)) link(page);
}

void PageGroup::take_back(PageId page) {
  if (page_[index(page)].holders != 0) return retain(page);
  std::erase(free_, page);
  page_[index(page)].holders = 1;
}

void PageGroup::cache(PageId page, uint32_t node) {
  Page& p = page_[index(page)];
  p.node = node;
  ++p.nodes;
  ++p.holders;
}

void PageGroup::uncache(PageId page, uint32_t other) {
  Page& p = page_[index(page)];
  if (p.holders == 1) unlink(page);
  p.node = other;
  --p.nodes;
  if (--p.holders == 0) free_.push_back(page);
}

void PageGroup::link(PageId page) {
  Page& p = page_[index(page)];
  p.older = newest_;
  p.newer = kNoPage;
  (newest_ == kNoPage ? oldest_ : page_[index(newest_)].newer) = page;
  newest_ = page;
  ++cached_;
}

void PageGroup::unlink(PageId page) {
  const Page& p = page_[index(page)];
  (p.older == kNoPage ? oldest_ : page_[index(p.older)].newer) = p.newer;
  (p.newer == kNoPage ? newest_ : page_[index(p.newer)].older) = p.older;
  --cached_;
}

}  // namespace gyre
