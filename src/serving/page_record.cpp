#include "serving/page_record.h"

#include <algorithm>

#include "files/container.h"

namespace gyre {
namespace {

constexpr FileKind kPageKind{"GYREPAGE", kPageRecordVersion, "a page"};
constexpr uint64_t kPageFixedBytes = 48;  // numbers of groups follow, pages and a checksum
constexpr uint64_t kGroupBytes = 16;

struct GroupHead {
  uint64_t present = 0;  // 0 or 1
  uint64_t begin = 0;
};

uint64_t head_bytes(const KvPoolState& pool) {
  return kPageFixedBytes + pool.groups.size() * kGroupBytes;
}

uint64_t record_bytes(const KvPoolState& pool, const std::vector<PageId>& ids) {
  uint64_t bytes = head_bytes(pool) + kSealBytes;
  for (size_t i = 0; i < ids.size(); ++i) bytes += ids[i] != kNoPage ? pool.page_bytes(i) : 0;
  return bytes;
}

// visit(view of one layer of the page, its bytes in `bytes`)
template <class Byte, class Visit>
void for_layers(const KvPoolState& pool, size_t group, PageId page, std::span<Byte> bytes,
                const Visit& visit) {
  pool.for_stores(group, [&](const KvPoolState::Store& store, uint64_t) {
    const Tensor view = store.pages.bytes.slice(0, static_cast<uint64_t>(page), 1);
    visit(view, bytes.first(view.elements()));
    bytes = bytes.subspan(view.elements());
  });
}

uint64_t group_offset(const KvPoolState& pool, const std::vector<PageId>& ids, size_t group) {
  uint64_t at = head_bytes(pool);
  for (size_t i = 0; i < group; ++i) at += ids[i] != kNoPage ? pool.page_bytes(i) : 0;
  return at;
}

void read_layer(const Tensor& layer, std::span<std::byte> bytes) {
  layer.read_to(std::span(reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()));
}

// Whether a group can have, or must have, such a page.
void check_group(const std::string& where, const KvPoolState& pool, size_t index,
                 const PageRecord& record, const GroupHead& head) {
  const PageGroup& group = pool.groups[index];
  const uint64_t page_tokens = pool.options.page_tokens;
  const uint64_t first = record.page * page_tokens, end = first + record.tokens;
  const std::string name = pool.group_name(index);
  check_file(head.present <= 1, where, "the page of ", name, " is there or not, 0 or 1, got ",
             head.present);
  const bool kept = group.writes(first);
  check_file(kept || head.present == 0, where, "page ", record.page, " of ", name,
             " cannot be there");
  // A query sees a key of a page that is not full, if it sees any but its own.
  const bool window = group.keys().window != 0;
  const bool may_miss =
      window && (group.keys().f16 || group.keys().window == 1 || record.tokens == page_tokens);
  check_file(head.present == 1 || !kept || may_miss, where, "page ", record.page, " of ", name,
             " is missing");
  check_file(group.keys().f16 && window ? head.begin <= end : head.begin == 0, where,
             "the keys of ", name, " begin at ", head.begin, " in a page that ends at ", end);
}

}  // namespace

uint64_t max_record_bytes(const KvPoolState& pool) {
  return record_bytes(pool, std::vector<PageId>(pool.groups.size(), 0));
}

std::vector<std::byte> page_record(const KvPoolState& pool, const PageRecord& from) {
  const uint64_t size = record_bytes(pool, from.ids);
  FieldWriter out(kPageKind);
  out.bytes().reserve(size);
  out.put(static_cast<uint32_t>(pool.groups.size()), pool.geometry, from.page, from.tokens, size);
  for (size_t i = 0; i < from.ids.size(); ++i)
    out.put(uint64_t{from.ids[i] != kNoPage ? 1u : 0u}, from.begin[i]);
  out.bytes().resize(size - kSealBytes);
  for (size_t i = 0; i < from.ids.size(); ++i) {
    if (from.ids[i] == kNoPage) continue;
    const std::span<std::byte> bytes(out.bytes());
    for_layers(pool, i, from.ids[i], bytes.subspan(group_offset(pool, from.ids, i)), read_layer);
  }
  return out.seal();
}

PageRecord read_page_record(const std::string& where, const KvPoolState& pool,
                            std::span<const std::byte> bytes) {
  check_file(bytes.size() >= head_bytes(pool) + kSealBytes, where, "a page has at least ",
             head_bytes(pool) + kSealBytes, " bytes, got ", bytes.size());
  FieldReader in(where, bytes);
  in.check_kind(kPageKind);
  PageRecord record;
  uint32_t groups = 0;
  uint64_t geometry = 0, size = 0;
  in.get(groups, geometry, record.page, record.tokens, size);
  check_file(size == bytes.size(), where, "the page has ", bytes.size(), " bytes, it says ", size);
  check_seal(where, "the page", bytes);
  check_file(geometry == pool.geometry && groups == pool.groups.size(), where,
             "the page is of a pool with other layers, heads, formats or page_tokens");
  const uint64_t page_tokens = pool.options.page_tokens;
  constexpr uint64_t kMaxTokens = uint64_t{1} << 31;
  check_file(
      record.tokens != 0 && record.tokens <= page_tokens && record.page < kMaxTokens / page_tokens,
      where, "page ", record.page, " cannot have ", record.tokens, " tokens");
  for (size_t i = 0; i < pool.groups.size(); ++i) {
    GroupHead group;
    in.get(group.present, group.begin);
    check_group(where, pool, i, record, group);
    record.ids.push_back(group.present != 0 ? 0 : kNoPage);
    record.begin.push_back(group.begin);
  }
  check_file(record_bytes(pool, record.ids) == bytes.size(), where, "the page must have ",
             record_bytes(pool, record.ids), " bytes, got ", bytes.size());
  return record;
}

std::span<const std::byte> group_bytes(const KvPoolState& pool, const PageRecord& record,
                                       size_t group, std::span<const std::byte> bytes) {
  return bytes.subspan(group_offset(pool, record.ids, group), pool.page_bytes(group));
}

void write_page(const KvPoolState& pool, size_t group, PageId page,
                std::span<const std::byte> bytes) {
  for_layers(pool, group, page, bytes, [](const Tensor& layer, std::span<const std::byte> from) {
    layer.write_from(std::span(reinterpret_cast<const uint8_t*>(from.data()), from.size()));
  });
}

bool page_equals(const KvPoolState& pool, size_t group, PageId page,
                 std::span<const std::byte> bytes) {
  bool equal = true;
  std::vector<std::byte> held;
  for_layers(pool, group, page, bytes, [&](const Tensor& layer, std::span<const std::byte> other) {
    held.resize(other.size());
    read_layer(layer, held);
    equal = equal && std::ranges::equal(held, other);
  });
  return equal;
}

}  // namespace gyre
