// Pages as bytes, and files of sequences and prefixes.
#include <algorithm>
#include <set>
#include <tuple>

#include "runtime/require.h"
#include "serving/pool_file.h"
#include "serving/pool_state.h"

namespace gyre {
namespace {

using Pages = KvSequenceState::Pages;

PageRecord record_of(const KvSequenceState& sequence, uint64_t page) {
  const uint64_t page_tokens = sequence.pool->options.page_tokens;
  PageRecord record{page, std::min(page_tokens, sequence.length - page * page_tokens), {}, {}};
  const uint64_t end = page * page_tokens + record.tokens;
  for (const Pages& pages : sequence.groups) {
    record.ids.push_back(pages.has(page) ? pages.at(page) : kNoPage);
    record.begin.push_back(std::min(pages.begin, end));
  }
  return record;
}

uint64_t pages_of(const KvSequenceState& sequence) {
  const uint64_t page_tokens = sequence.pool->options.page_tokens;
  return (sequence.length + page_tokens - 1) / page_tokens;
}

// How many pages of each group records need, against what there is.
class Needed {
 public:
  explicit Needed(const KvPoolState& pool) : pool_(pool), count_(pool.groups.size()) {}
  void add(const PageRecord& record) {
    for (size_t i = 0; i < count_.size(); ++i) add(i, record);
  }
  void add(size_t group, const PageRecord& record) {
    count_[group] += record.ids[group] != kNoPage ? 1 : 0;
  }
  // `to`: the sequence that goes on with the pages.
  void check(const std::string& where, bool evict, const KvSequenceState* to = nullptr) const {
    for (size_t i = 0; i < count_.size(); ++i) {
      const uint64_t has = evict ? pool_.available(i) : pool_.groups[i].free();
      if (count_[i] <= has) continue;
      const uint64_t needed = count_[i] + (to != nullptr ? to->groups[i].ids.size() : 0);
      require(needed <= pool_.groups[i].pages(), where, ": can never fit: it needs ", needed,
              " pages of ", pool_.group_name(i), ", and the pool has ", pool_.groups[i].pages());
      fail(ErrorCode::out_of_memory, where, ": ", count_[i] - has,
           " pages are missing: ", count_[i], " of group \"", pool_.group_name(i),
           "\" are needed, where ", has, " of ", pool_.groups[i].pages(),
           evict ? " are free or cached" : " are free");
    }
  }

 private:
  const KvPoolState& pool_;
  std::vector<uint64_t> count_;
};

void check_next(const std::string& where, const KvSequenceState& sequence,
                const PageRecord& record) {
  const uint64_t page_tokens = sequence.pool->options.page_tokens;
  if (sequence.length != record.page * page_tokens) {
    fail(ErrorCode::invalid_argument, where, ": page ", record.page, " comes after ",
         record.page * page_tokens, " tokens, the sequence has ", sequence.length);
  }
}

// The sequence goes on with the record's page, which was checked and for which there is room.
void add_page(KvSequenceState& sequence, const PageRecord& record,
              std::span<const std::byte> bytes) {
  KvPoolState& pool = *sequence.pool;
  for (Pages& pages : sequence.groups) pages.ids.reserve(pages.ids.size() + 1);
  std::vector<PageId> taken(record.ids.size(), kNoPage);
  for (size_t i = 0; i < taken.size(); ++i)
    if (record.ids[i] != kNoPage) taken[i] = pool.take(i);
  try {
    for (size_t i = 0; i < taken.size(); ++i)
      if (taken[i] != kNoPage) write_page(pool, i, taken[i], group_bytes(pool, record, i, bytes));
  } catch (...) {
    for (size_t i = 0; i < taken.size(); ++i)
      if (taken[i] != kNoPage) pool.groups[i].release(taken[i]);
    throw;
  }
  sequence.length += record.tokens;
  for (size_t i = 0; i < taken.size(); ++i) {
    Pages& pages = sequence.groups[i];
    const bool kept = pool.groups[i].writes(record.page * pool.options.page_tokens);
    if (taken[i] != kNoPage) {
      pages.ids.push_back(taken[i]);
      pages.begin = std::max(pages.begin, record.begin[i]);
    } else if (kept) {  // fallen off the front: so have those before it
      for (; !pages.ids.empty(); pages.ids.pop_back()) pool.groups[i].release(pages.ids.back());
      pages.first = sequence.length / pool.options.page_tokens;
      // A tail begins anew; a window of one key has none of a page that it goes on in.
      if (record.tokens != pool.options.page_tokens && pool.groups[i].keys().f16)
        pages.begin = sequence.length;
      pages.changed(0);
    }
  }
}

// Siblings whose pages begin with the same sink tokens share the page of these, if its bytes are
// equal. Finds rows of a file that will do so before any of them is a node.
class SharedSinkPages {
 public:
  // Whether a row before this one has the page. `parent`: what tells parents apart.
  bool has(uint64_t parent, size_t group, std::span<const int32_t> kept,
           std::span<const std::byte> page) {
    const auto key = std::make_tuple(parent, group, checksum_of(page));
    return !kept.empty() && !seen_.emplace(key, std::vector(kept.begin(), kept.end())).second;
  }

 private:
  std::set<std::pair<std::tuple<uint64_t, size_t, uint64_t>, std::vector<int32_t>>> seen_;
};

// Writes blocks one after the other; the header comes last.
class PoolFileWriter {
 public:
  PoolFileWriter(const char* op, const std::string& path, const KvPoolState& pool,
                 PoolFileKind kind, uint64_t rows)
      : pool_(pool), file_(op, path), at_(pool_file_header_bytes(rows)) {
    made_.kind = kind;
    made_.rows.reserve(rows);
  }
  void add(std::span<const int32_t> tokens, uint64_t parent, const PageRecord& record) {
    const std::vector<std::byte> bytes = page_record(pool_, record);
    const std::span<const std::byte> head = std::as_bytes(tokens);
    made_.rows.push_back({at_, bytes.size(), parent, tokens.empty() ? 0 : checksum_of(head)});
    file_.write_at(at_, head);
    file_.write_at(at_ + head.size(), bytes);
    at_ += head.size() + bytes.size();
  }
  void commit() {
    file_.write_at(0, pool_file_header(pool_, made_, at_));
    file_.commit();
  }

 private:
  const KvPoolState& pool_;
  NewFile file_;
  PoolFile made_;
  uint64_t at_;
};

}  // namespace

std::vector<std::byte> KvPool::export_page(const KvSequence& sequence, uint64_t page) const try {
  constexpr const char* kOp = "kv_pool.export_page";
  state().require_same_process(kOp);
  const StepsUse use(*state().steps, kOp);
  const KvSequenceState& from = sequence.state(kOp);
  require(from.pool == state_, kOp, ": the sequence belongs to another pool");
  from.require_no_step(kOp);
  from.require_submitted(kOp);
  require(page < pages_of(from), kOp, ": the sequence has ", pages_of(from), " pages, got page ",
          page);
  return page_record(state(), record_of(from, page));
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pool.export_page");
}

void KvPool::import_page(KvSequence& sequence, std::span<const std::byte> bytes) const try {
  const std::string op = "kv_pool.import_page";
  state().require_same_process(op.c_str());
  const StepsUse use(*state().steps, op.c_str());
  KvSequenceState& to = sequence.state(op.c_str());
  require(to.pool == state_, op, ": the sequence belongs to another pool");
  to.require_no_step(op.c_str());
  state().steps->require_submitted(op.c_str());
  const PageRecord record = read_page_record(op, state(), bytes);
  check_next(op, to, record);
  Needed needed(state());
  needed.add(record);
  needed.check(op, true, &to);
  add_page(to, record, bytes);
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pool.import_page");
}

void KvPool::save(const KvSequence& sequence, const std::string& path) const try {
  constexpr const char* kOp = "kv_pool.save";
  state().require_same_process(kOp);
  const StepsUse use(*state().steps, kOp);
  const KvSequenceState& from = sequence.state(kOp);
  require(from.pool == state_, kOp, ": the sequence belongs to another pool");
  from.require_no_step(kOp);
  from.require_submitted(kOp);
  from.check_shorter(kOp, from.length);  // load() would refuse a sequence that lacks keys
  PoolFileWriter file(kOp, path, state(), PoolFileKind::sequence, pages_of(from));
  for (uint64_t page = 0; page < pages_of(from); ++page)
    file.add({}, page - 1, record_of(from, page));
  file.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pool.save");
}

KvSequence KvPool::load(const std::string& path) const try {
  constexpr const char* kOp = "kv_pool.load";
  state().require_same_process(kOp);
  const StepsUse use(*state().steps, kOp);
  state().steps->require_submitted(kOp);
  const FileSource source(kOp, path);
  const PoolFile file = read_pool_file(source, state(), PoolFileKind::sequence);
  // All that can be wrong with the file is found before a page is taken and a prefix evicted.
  Needed needed(state());
  uint64_t length = 0;
  std::vector<uint64_t> first_page(state().groups.size());
  for (uint64_t row = 0; row < file.rows.size(); ++row) {
    const std::string where = row_where(source, row);
    const PageRecord record =
        read_page_record(where, state(), read_record(source, state(), file, row));
    const bool last = row + 1 == file.rows.size();
    if (record.page != row || (!last && record.tokens != state().options.page_tokens))
      fail(ErrorCode::io, where, ": page ", record.page, " of ", record.tokens,
           " tokens cannot be there");
    needed.add(record);
    length += record.tokens;
    for (size_t i = 0; i < first_page.size(); ++i)
      if (record.ids[i] == kNoPage) first_page[i] = row + 1;
  }
  needed.check(source.where(), true);
  for (size_t i = 0; i < first_page.size(); ++i)
    state().check_window(kOp, i, first_page[i], length);
  // The file is read twice, so it is checked twice: it may change in between.
  KvSequence made = sequence();
  for (uint64_t row = 0; row < file.rows.size(); ++row) {
    const std::vector<std::byte> bytes = read_record(source, state(), file, row);
    const PageRecord record = read_page_record(row_where(source, row), state(), bytes);
    check_next(row_where(source, row), *made.state_, record);
    Needed one(state());
    one.add(record);
    one.check(source.where(), true);
    add_page(*made.state_, record, bytes);
  }
  made.state_->check_shorter(kOp, made.length());
  return made;
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pool.load");
}

void KvPool::save_prefixes(const std::string& path) const try {
  const KvPoolState& s = state();
  s.require_same_process("kv_pool.save_prefixes");
  const StepsUse use(*s.steps, "kv_pool.save_prefixes");
  PoolFileWriter file("kv_pool.save_prefixes", path, s, PoolFileKind::prefixes, s.index.size());
  std::vector<uint64_t> rows(s.index.max_nodes(), kNoRow), depth(s.index.max_nodes());
  uint64_t row = 0;
  s.index.for_each([&](uint32_t node) {
    const uint32_t parent = s.index.parent(node);
    depth[node] = parent == kNoNode ? 0 : depth[parent] + 1;
    PageRecord record{depth[node], s.options.page_tokens, {}, {}};
    for (size_t i = 0; i < s.groups.size(); ++i) {
      record.ids.push_back(s.index.page(node, i));
      record.begin.push_back(0);
    }
    file.add(s.index.tokens(node), parent == kNoNode ? kNoRow : rows[parent], record);
    rows[node] = row++;
  });
  file.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pool.save_prefixes");
}

// Rows in order: a parent is there before its children. What is known already stays as it is.
uint64_t KvPool::load_prefixes(const std::string& path) const try {
  KvPoolState& s = state();
  s.require_same_process("kv_pool.load_prefixes");
  const StepsUse use(*s.steps, "kv_pool.load_prefixes");
  s.steps->require_submitted("kv_pool.load_prefixes");
  const FileSource source("kv_pool.load_prefixes", path);
  const PoolFile file = read_pool_file(source, s, PoolFileKind::prefixes);
  std::vector<uint32_t> nodes(file.rows.size(), kNoNode);
  std::vector<uint64_t> depth(file.rows.size());
  Needed needed(s);
  SharedSinkPages shared;
  for (uint64_t row = 0; row < file.rows.size(); ++row) {
    const std::string where = row_where(source, row);
    const std::vector<std::byte> bytes = read_record(source, s, file, row);
    const PageRecord record = read_page_record(where, s, bytes);
    const std::vector<int32_t> tokens = read_tokens(source, s, file, row);
    const uint64_t parent = file.rows[row].parent;
    depth[row] = parent == kNoRow ? 0 : depth[parent] + 1;
    if (record.page != depth[row] || record.tokens != s.options.page_tokens)
      fail(ErrorCode::io, where, ": page ", record.page, " of ", record.tokens,
           " tokens cannot be there");
    const bool parent_known = parent == kNoRow || nodes[parent] != kNoNode;
    const uint32_t above = parent == kNoRow ? kNoNode : nodes[parent];
    if (parent_known) nodes[row] = s.index.find(above, tokens);
    if (nodes[row] != kNoNode) continue;
    for (size_t i = 0; i < s.groups.size(); ++i) {
      if (record.ids[i] == kNoPage) continue;
      const std::span<const std::byte> page = group_bytes(s, record, i, bytes);
      const auto kept = std::span(tokens).first(s.sink_tokens_in(i, record.page));
      if (parent_known && s.sink_page(above, i, kept, page) != kNoPage) continue;
      if (!shared.has(parent, i, kept, page)) needed.add(i, record);
    }
  }
  // Nothing that is cached makes room: it might be what the new pages follow.
  needed.check(source.where(), false);
  std::vector<uint32_t> added;
  try {
    for (uint64_t row = 0; row < file.rows.size(); ++row) {
      if (nodes[row] != kNoNode) continue;
      nodes[row] = s.load_prefix(source, file, row, nodes, added);
    }
  } catch (...) {
    while (!added.empty()) {
      s.erase_prefix(added.back());
      added.pop_back();
    }
    throw;
  }
  return added.size();
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pool.load_prefixes");
}

uint32_t KvPoolState::load_prefix(const Source& source, const PoolFile& file, uint64_t row,
                                  std::span<const uint32_t> nodes, std::vector<uint32_t>& added) {
  const std::vector<std::byte> bytes = read_record(source, *this, file, row);
  const PageRecord record = read_page_record(row_where(source, row), *this, bytes);
  const std::vector<int32_t> tokens = read_tokens(source, *this, file, row);
  const uint64_t parent_row = file.rows[row].parent;
  const uint32_t parent = parent_row == kNoRow ? kNoNode : nodes[parent_row];
  const uint32_t known = index.find(parent, tokens);
  if (known != kNoNode) return known;  // twice in the file
  Needed one(*this);
  std::vector<PageId> pages(groups.size(), kNoPage);
  for (size_t i = 0; i < groups.size(); ++i) {
    if (record.ids[i] == kNoPage) continue;
    pages[i] = sink_page(parent, i, std::span(tokens).first(sink_tokens_in(i, record.page)),
                         group_bytes(*this, record, i, bytes));
    if (pages[i] == kNoPage) one.add(i, record);
  }
  one.check(source.where(), false);
  added.reserve(added.size() + 1);
  const uint32_t node = index.insert(parent, tokens);
  added.push_back(node);
  for (size_t i = 0; i < groups.size(); ++i) {
    if (record.ids[i] == kNoPage) continue;
    const bool taken = pages[i] == kNoPage;
    if (taken) pages[i] = groups[i].take();
    index.set_page(node, i, pages[i]);
    groups[i].cache(pages[i], node);
    if (!taken) continue;
    groups[i].release(pages[i]);
    write_page(*this, i, pages[i], group_bytes(*this, record, i, bytes));
  }
  return node;
}

PageId KvPoolState::sink_page(uint32_t parent, size_t group, std::span<const int32_t> kept,
                              std::span<const std::byte> bytes) const {
  PageId found = kNoPage;
  if (kept.empty()) return found;
  index.for_children(parent, [&](uint32_t node) {
    const PageId page = index.page(node, group);
    if (found == kNoPage && page != kNoPage &&
        std::ranges::equal(index.tokens(node).first(kept.size()), kept) &&
        page_equals(*this, group, page, bytes))
      found = page;
  });
  return found;
}

}  // namespace gyre
