#include "serving/page_record.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "cache/snapshot.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr std::string_view kMagic = "GYREPAGE";

// The fixed part; two numbers per group follow, then the pages, then a checksum of all of it.
struct Head {
  char magic[8];
  uint32_t version;
  uint32_t groups;
  uint64_t geometry;
  uint64_t page;
  uint64_t tokens;
  uint64_t bytes;  // of the record
};
static_assert(sizeof(Head) == 48);

struct GroupHead {
  uint64_t present;  // 0 or 1
  uint64_t begin;
};

uint64_t head_bytes(const KvPool::State& pool) {
  return sizeof(Head) + pool.groups.size() * sizeof(GroupHead);
}

uint64_t record_bytes(const KvPool::State& pool, const std::vector<PageId>& ids) {
  uint64_t bytes = head_bytes(pool) + sizeof(uint64_t);
  for (size_t i = 0; i < ids.size(); ++i) bytes += ids[i] != kNoPage ? pool.page_bytes(i) : 0;
  return bytes;
}

// visit(view of one page of one layer, offset in the record)
template <class Visit>
void for_pages(const KvPool::State& pool, const std::vector<PageId>& ids, const Visit& visit) {
  uint64_t at = head_bytes(pool);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == kNoPage) continue;
    pool.for_stores(i, [&](const KvPool::State::Store& store) {
      visit(store.pages.bytes.slice(0, static_cast<uint64_t>(ids[i]), 1), at);
      at += store.pages.bytes.shape(1);
    });
  }
}

template <class... Parts>
void demand(bool holds, const std::string& where, const Parts&... parts) {
  if (!holds) fail(ErrorCode::io, where, ": ", parts...);
}

// Whether a group can have, or must have, such a page.
void check_group(const std::string& where, const KvPool::State& pool, size_t index,
                 const PageRecord& record, const GroupHead& head) {
  const PageGroup& group = pool.groups[index];
  const uint64_t page_tokens = pool.options.page_tokens;
  const uint64_t first = record.page * page_tokens, end = first + record.tokens;
  const std::string name = pool.group_name(index);
  demand(head.present <= 1, where, "the page of ", name, " is there or not, 0 or 1, got ",
         head.present);
  const bool kept = group.writes(first);
  demand(kept || head.present == 0, where, "page ", record.page, " of ", name, " cannot be there");
  const bool window = group.keys().window != 0;
  const bool may_miss = window && (group.keys().near || record.tokens == page_tokens);
  demand(head.present == 1 || !kept || may_miss, where, "page ", record.page, " of ", name,
         " is missing");
  demand(group.keys().near && window ? head.begin <= end : head.begin == 0, where, "the keys of ",
         name, " begin at ", head.begin, " in a page that ends at ", end);
}

}  // namespace

uint64_t most_record_bytes(const KvPool::State& pool) {
  return record_bytes(pool, std::vector<PageId>(pool.groups.size(), 0));
}

std::vector<std::byte> page_record(const KvPool::State& pool, const PageRecord& from) {
  std::vector<std::byte> bytes(record_bytes(pool, from.ids));
  Head head{};
  std::ranges::copy(kMagic, head.magic);
  head.version = kPageRecordVersion;
  head.groups = static_cast<uint32_t>(pool.groups.size());
  head.geometry = pool.geometry;
  head.page = from.page;
  head.tokens = from.tokens;
  head.bytes = bytes.size();
  std::memcpy(bytes.data(), &head, sizeof(head));
  for (size_t i = 0; i < from.ids.size(); ++i) {
    const GroupHead group{from.ids[i] != kNoPage ? 1u : 0u, from.begin[i]};
    std::memcpy(bytes.data() + sizeof(head) + i * sizeof(group), &group, sizeof(group));
  }
  for_pages(pool, from.ids, [&](const Tensor& page, uint64_t at) {
    page.read_to(std::span(reinterpret_cast<uint8_t*>(bytes.data() + at), page.elements()));
  });
  const uint64_t covered = bytes.size() - sizeof(uint64_t);
  const uint64_t checksum = checksum_of(std::span(bytes).first(covered));
  std::memcpy(bytes.data() + covered, &checksum, sizeof(checksum));
  return bytes;
}

PageRecord read_page_record(const std::string& where, const KvPool::State& pool,
                            std::span<const std::byte> bytes) {
  demand(bytes.size() >= head_bytes(pool) + sizeof(uint64_t), where, "a page has at least ",
         head_bytes(pool) + sizeof(uint64_t), " bytes, got ", bytes.size());
  Head head{};
  std::memcpy(&head, bytes.data(), sizeof(head));
  demand(std::string_view(head.magic, sizeof(head.magic)) == kMagic, where, "does not begin with ",
         kMagic, ", it is not a page");
  demand(head.version == kPageRecordVersion, where, "is a page of version ", head.version,
         ", this library reads version ", kPageRecordVersion);
  demand(head.bytes == bytes.size(), where, "the page has ", bytes.size(), " bytes, it says ",
         head.bytes);
  uint64_t expected = 0;
  const uint64_t covered = bytes.size() - sizeof(uint64_t);
  std::memcpy(&expected, bytes.data() + covered, sizeof(expected));
  const uint64_t is = checksum_of(bytes.first(covered));
  demand(is == expected, where, "the page's checksum is ", is, ", expected ", expected);
  demand(head.geometry == pool.geometry && head.groups == pool.groups.size(), where,
         "the page is of a pool with other layers, heads, formats or page_tokens");
  const uint64_t page_tokens = pool.options.page_tokens;
  constexpr uint64_t kMostTokens = uint64_t{1} << 31;
  demand(head.tokens != 0 && head.tokens <= page_tokens && head.page < kMostTokens / page_tokens,
         where, "page ", head.page, " cannot have ", head.tokens, " tokens");
  PageRecord record{head.page, head.tokens, {}, {}};
  for (size_t i = 0; i < pool.groups.size(); ++i) {
    GroupHead group{};
    std::memcpy(&group, bytes.data() + sizeof(head) + i * sizeof(group), sizeof(group));
    check_group(where, pool, i, record, group);
    record.ids.push_back(group.present != 0 ? 0 : kNoPage);
    record.begin.push_back(group.begin);
  }
  demand(record_bytes(pool, record.ids) == bytes.size(), where, "the page must have ",
         record_bytes(pool, record.ids), " bytes, got ", bytes.size());
  return record;
}

void write_pages(const KvPool::State& pool, const PageRecord& to,
                 std::span<const std::byte> bytes) {
  for_pages(pool, to.ids, [&](const Tensor& page, uint64_t at) {
    page.write_from(
        std::span(reinterpret_cast<const uint8_t*>(bytes.data() + at), page.elements()));
  });
}

}  // namespace gyre
