#pragma once
// Files of a pool: a sequence, or the prefix index. A header with a row for each page, then blocks:
// the tokens of the page (prefixes), and its record. docs/serving.md draws the bytes.

#include <cstdint>
#include <string>
#include <vector>

#include "files/container.h"
#include "serving/page_record.h"

namespace gyre {

constexpr uint32_t kPoolFileVersion = 1;

enum class PoolFileKind : uint32_t { sequence, prefixes };

struct PoolFileRow {
  uint64_t offset = 0;  // of the block
  uint64_t bytes = 0;   // of the record in it
  uint64_t parent = 0;  // row of the page before this one; ~0: there is none
  uint64_t tokens_checksum = 0;
};

struct PoolFile {
  PoolFileKind kind = PoolFileKind::sequence;
  std::vector<PoolFileRow> rows{};
};

constexpr uint64_t kNoRow = ~uint64_t{0};

// The header as bytes, and the bytes of a header with `rows` rows.
std::vector<std::byte> pool_file_header(const KvPoolState& pool, const PoolFile& file,
                                        uint64_t file_bytes);
uint64_t pool_file_header_bytes(uint64_t rows);
uint64_t pool_file_tokens_bytes(const KvPoolState& pool, PoolFileKind kind);  // of a block

// The header, checked in itself, against the source's size and the pool.
PoolFile read_pool_file(const Source& source, const KvPoolState& pool, PoolFileKind kind);
std::vector<std::byte> read_record(const Source& source, const KvPoolState& pool,
                                   const PoolFile& file, uint64_t row);
std::vector<int32_t> read_tokens(const Source& source, const KvPoolState& pool,
                                 const PoolFile& file, uint64_t row);
std::string row_where(const Source& source, uint64_t row);

}  // namespace gyre
