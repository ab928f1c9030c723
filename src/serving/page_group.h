#pragma once
// Who holds which page of a group of layers, on the host. A page is free, or it has holders:
// sequences, and the nodes of the prefix index that have it. Pages that only the index holds are
// cached: in the order in which their last sequence let go of them, so that the oldest is evicted.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gyre {

using PageId = int32_t;
constexpr PageId kNoPage = -1;
constexpr uint32_t kNoNode = ~0u;

// Which keys the layers of a group keep.
struct GroupKeys {
  uint64_t window = 0;  // keys that a query sees, the newest, its own included; 0: all
  uint64_t limit = 0;   // keys that a query sees, the first; 0: all
  bool f16 = false;     // copies in 16 bits: a tail (window) or sink tokens (limit)
};

class PageGroup {
 public:
  PageGroup(const GroupKeys& keys, uint64_t pages, uint64_t page_tokens);

  const GroupKeys& keys() const { return keys_; }
  uint64_t pages() const { return page_.size(); }
  uint64_t free() const { return free_.size(); }
  uint64_t cached() const { return cached_; }

  // A sequence's pages are numbered by position / page_tokens. A step that begins at `length` reads
  // no older page than this one ...
  uint64_t first_page(uint64_t length) const {
    return keys_.window == 0 || length + 1 <= keys_.window
               ? 0
               : (length + 1 - keys_.window) / page_tokens_;
  }
  // ... and at `length` the pages end here.
  uint64_t end_page(uint64_t length) const {
    const uint64_t kept = keys_.limit != 0 && keys_.limit < length ? keys_.limit : length;
    return (kept + page_tokens_ - 1) / page_tokens_;
  }
  // As end_page, given the end page of a group without a limit.
  uint64_t end_page_of(uint64_t all_keys) const {
    return all_keys < limit_pages_ ? all_keys : limit_pages_;
  }
  // Whether a step that begins at `length` reads nothing of this page and of those before it.
  bool is_behind(uint64_t page, uint64_t length) const {
    return keys_.window != 0 && (page + 1) * page_tokens_ + keys_.window <= length + 1;
  }
  bool writes(uint64_t position) const { return keys_.limit == 0 || position < keys_.limit; }

  PageId take();  // a free one, there must be one; its first holder
  void retain(PageId page);
  void take_back(PageId page);  // that was released, and that nobody has written to since
  void release(PageId page);
  bool shared(PageId page) const { return page_[index(page)].holders > 1; }
  uint64_t holders(PageId page) const {  // sequences alone
    return page_[index(page)].holders - page_[index(page)].nodes;
  }

  // The prefix index's holds. Nodes that part behind the last sink token have one page of sinks.
  void cache(PageId page, uint32_t node);
  void uncache(PageId page, uint32_t other = kNoNode);  // `other`: a node that still has the page
  uint32_t node(PageId page) const { return page_[index(page)].node; }  // one of them
  uint32_t nodes(PageId page) const { return page_[index(page)].nodes; }
  PageId oldest_cached() const { return oldest_; }

 private:
  struct Page {
    uint32_t holders = 0;  // sequences and nodes
    uint32_t nodes = 0;    // of the prefix index
    uint32_t node = kNoNode;
    PageId older = kNoPage, newer = kNoPage;  // among the cached
  };

  static size_t index(PageId page) { return static_cast<size_t>(page); }
  static bool is_cached(const Page& page) { return page.nodes != 0 && page.holders == page.nodes; }
  void link(PageId page);
  void unlink(PageId page);

  GroupKeys keys_;
  uint64_t page_tokens_;
  uint64_t limit_pages_;
  std::vector<Page> page_;
  std::vector<PageId> free_;
  PageId oldest_ = kNoPage, newest_ = kNoPage;
  uint64_t cached_ = 0;
};

}  // namespace gyre
