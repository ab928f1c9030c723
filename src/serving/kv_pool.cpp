#include "gyre/kv_pool.h"

#include <algorithm>
#include <utility>

#include "runtime/require.h"
#include "serving/pool_state.h"

namespace gyre {
namespace {

// How deep a path of the index can be resumed, page by page from the root.
class Resumable {
 public:
  explicit Resumable(const KvPoolState& pool) : pool_(pool), missing_(pool.groups.size(), 0) {}

  // The path goes on to `node`.
  void add(uint32_t node) {
    for (size_t i = 0; i < missing_.size(); ++i) {
      const bool kept = pool_.groups[i].writes(depth_ * pool_.options.page_tokens);
      if (kept && pool_.index.page(node, i) == kNoPage) missing_[i] = depth_ + 1;
    }
    ++depth_;
    const uint64_t length = depth_ * pool_.options.page_tokens;
    bool whole = true;
    for (size_t i = 0; i < missing_.size(); ++i)
      whole = whole && missing_[i] <= pool_.groups[i].first_page(length);
    if (whole) deepest_ = depth_;
  }
  uint64_t deepest() const { return deepest_; }  // pages

 private:
  const KvPoolState& pool_;
  std::vector<uint64_t> missing_;  // pages up to here are not all there
  uint64_t depth_ = 0, deepest_ = 0;
};

// Whether the index can have the sequence's page of a group: not one where a tail begins inside.
bool can_publish(const KvSequenceState& from, size_t group, uint64_t page) {
  return from.groups[group].has(page) &&
         from.oldest(group) <= page * from.pool->options.page_tokens;
}

// How many of the first `count` pages the index gets: up to the last of which it has something. A
// node without a page, and with none behind it, is of no use, and no eviction would take it.
uint64_t pages_to_publish(const KvSequenceState& from, uint64_t count) {
  const auto has_any = [&](uint64_t page) {
    for (size_t i = 0; i < from.groups.size(); ++i)
      if (can_publish(from, i, page)) return true;
    return false;
  };
  while (count != 0 && !has_any(count - 1)) --count;
  return count;
}

// Whether a page of sink tokens may be under `node` and under another node with the parent
// `parent`: the tokens that the page keeps are the same.
bool same_sinks(const KvPoolState& pool, uint32_t node, uint32_t parent,
                std::span<const int32_t> kept) {
  return !kept.empty() && pool.index.parent(node) == parent &&
         std::ranges::equal(pool.index.tokens(node).first(kept.size()), kept);
}

}  // namespace

KvPool::KvPool(Device device, const KvPoolOptions& options) try
    : state_(std::make_shared<KvPoolState>(std::move(device), options)) {
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pool");
}

KvPoolState& KvPool::state() const {
  require(state_ != nullptr, "kv_pool: used after it was moved from");
  return *state_;
}

const KvPoolOptions& KvPool::options() const { return state().options; }
const std::vector<KvLayer>& KvPool::layers() const { return state().resolved; }

KvPoolInfo KvPool::describe() const try {
  const KvPoolState& s = state();
  const StepsUse use(*s.steps, "kv_pool.describe");
  KvPoolInfo info;
  info.sequences = s.sequences;
  info.prefixes = s.index.size();
  info.evictions = s.evictions;
  info.calibration = s.calibration;
  for (size_t i = 0; i < s.groups.size(); ++i) {
    const PageGroup& group = s.groups[i];
    KvGroupInfo row;
    row.name = s.group_name(i);
    row.page_bytes = s.page_bytes(i);
    row.pages = group.pages();
    row.free = group.free();
    row.cached = group.cached();
    row.used = row.pages - row.free - row.cached;
    for (uint64_t page = 0; page < row.pages; ++page)
      row.shared += group.holders(static_cast<PageId>(page)) > 1 ? 1 : 0;
    s.for_stores(i,
                 [&](const KvPoolState::Store&, uint64_t layer) { row.layers.push_back(layer); });
    info.bytes += row.pages * row.page_bytes;
    info.used_bytes += row.used * row.page_bytes;
    info.groups.push_back(std::move(row));
  }
  return info;
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pool.describe");
}

KvSequence KvPool::sequence() const try {
  const StepsUse use(*state().steps, "kv_pool.sequence");
  return KvSequence(std::make_shared<KvSequenceState>(state_));
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pool.sequence");
}

void KvPool::publish(const KvSequence& sequence, std::span<const int32_t> tokens) const try {
  constexpr const char* kOp = "kv_pool.publish";
  KvPoolState& s = state();
  const StepsUse use(*s.steps, kOp);
  const KvSequenceState& from = sequence.state(kOp);
  require(from.pool.get() == &s, kOp, ": the sequence belongs to another pool");
  from.require_no_step(kOp);
  from.require_submitted(kOp);
  require(tokens.size() <= from.length, kOp, ": the sequence has ", from.length, " tokens, got ",
          tokens.size());
  const uint64_t page_tokens = s.options.page_tokens, count = tokens.size() / page_tokens;
  const auto page_of = [&](uint64_t page) {
    return tokens.subspan(page * page_tokens, page_tokens);
  };
  // A page that the index has under other tokens: the sequence cannot have both.
  uint32_t known = kNoNode;
  bool on_path = true;
  for (uint64_t page = 0; page < count; ++page) {
    const uint32_t parent = known;
    const bool parent_known = on_path;
    known = on_path ? s.index.find(known, page_of(page)) : kNoNode;
    on_path = known != kNoNode;
    for (size_t i = 0; i < s.groups.size(); ++i) {
      if (!from.groups[i].has(page)) continue;
      const uint32_t node = s.groups[i].node(from.groups[i].at(page));
      const uint64_t sinks = s.sink_tokens_in(i, page);
      const bool same = node == kNoNode || node == known ||
                        (parent_known && same_sinks(s, node, parent, page_of(page).first(sinks)));
      require(same, kOp, ": tokens ", page * page_tokens, " to ", (page + 1) * page_tokens - 1,
              " are not those that the pages were published with");
    }
  }
  const uint64_t kept = pages_to_publish(from, count);
  std::vector<uint32_t> path(kept, kNoNode), added;
  added.reserve(kept);
  try {
    for (uint64_t page = 0; page < kept; ++page) {
      const uint32_t parent = page == 0 ? kNoNode : path[page - 1];
      path[page] = s.index.find(parent, page_of(page));
      if (path[page] != kNoNode) continue;
      path[page] = s.index.insert(parent, page_of(page));
      added.push_back(path[page]);
    }
  } catch (...) {  // no memory for all of them: none stays
    for (; !added.empty(); added.pop_back()) s.index.erase(added.back());
    throw;
  }
  for (uint64_t page = 0; page < kept; ++page) {
    const uint32_t node = path[page];
    for (size_t i = 0; i < s.groups.size(); ++i) {
      if (!can_publish(from, i, page) || s.index.page(node, i) != kNoPage) continue;
      s.index.set_page(node, i, from.groups[i].at(page));
      s.groups[i].cache(from.groups[i].at(page), node);
    }
  }
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pool.publish");
}

KvSequence KvPool::match(std::span<const int32_t> tokens) const try {
  KvPoolState& s = state();
  const StepsUse use(*s.steps, "kv_pool.match");
  const uint64_t page_tokens = s.options.page_tokens;
  std::vector<uint32_t> path;
  Resumable resumable(s);
  for (uint64_t page = 0; page < tokens.size() / page_tokens; ++page) {
    const uint32_t node = s.index.find(path.empty() ? kNoNode : path.back(),
                                       tokens.subspan(page * page_tokens, page_tokens));
    if (node == kNoNode) break;
    path.push_back(node);
    resumable.add(node);
  }
  KvSequence made = sequence();
  KvSequenceState& to = *made.state_;
  const uint64_t length = resumable.deepest() * page_tokens;
  for (size_t i = 0; i < s.groups.size(); ++i) {
    KvSequenceState::Pages& pages = to.groups[i];
    pages.first = s.groups[i].first_page(length);
    for (uint64_t page = pages.first; page < s.groups[i].end_page(length); ++page) {
      pages.ids.push_back(s.index.page(path[page], i));
      s.groups[i].retain(pages.ids.back());
    }
  }
  to.length = length;
  return made;
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pool.match");
}

void KvPool::forget() const {
  KvPoolState& s = state();
  const StepsUse use(*s.steps, "kv_pool.forget");
  while (s.index.size() != 0) s.erase_prefix(s.index.first_root());
}

}  // namespace gyre
