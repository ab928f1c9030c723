#pragma once
// A page of all layers as bytes: what export_page() gives, and what files of a pool are made of.
// Little endian; docs/serving.md has the fields. Everything read may be anything: it is compared
// with what it must be before it is used.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "serving/pool_state.h"

namespace gyre {

constexpr uint32_t kPageRecordVersion = 1;

// Where the bytes of a page come from, or go to: a page of each group, or kNoPage.
struct PageRecord {
  uint64_t page = 0;    // of its sequence
  uint64_t tokens = 0;  // that it holds
  std::vector<PageId> ids{};
  std::vector<uint64_t> begin{};  // per group: Pages::begin
};

std::vector<std::byte> page_record(const KvPoolState& pool, const PageRecord& from);
// The largest a record of this pool can be.
uint64_t max_record_bytes(const KvPoolState& pool);

// Checks a record. In the result, ids are 0 where the record has the page of a group. `where` opens
// messages.
PageRecord read_page_record(const std::string& where, const KvPoolState& pool,
                            std::span<const std::byte> bytes);
// The bytes of a group's page in a record that has one.
std::span<const std::byte> group_bytes(const KvPoolState& pool, const PageRecord& record,
                                       size_t group, std::span<const std::byte> bytes);
void write_page(const KvPoolState& pool, size_t group, PageId page,
                std::span<const std::byte> bytes);
bool page_equals(const KvPoolState& pool, size_t group, PageId page,
                 std::span<const std::byte> bytes);

}  // namespace gyre
