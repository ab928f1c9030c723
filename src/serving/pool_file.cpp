#include "serving/pool_file.h"

#include <algorithm>

namespace gyre {
namespace {

constexpr FileKind kKind{"GYREPOOL", kPoolFileVersion, "a file of a pool"};
constexpr uint64_t kFixedBytes = 40;  // before the rows
constexpr uint64_t kRowBytes = 32;

// Rows that the pool has pages for: a group without a window and a limit has a page of each.
uint64_t max_rows(const KvPoolState& pool) {
  constexpr uint64_t kMaxTokens = uint64_t{1} << 31;
  uint64_t limit = kMaxTokens / pool.options.page_tokens;
  for (const PageGroup& group : pool.groups) {
    if (group.keys().window == 0 && group.keys().limit == 0) limit = std::min(limit, group.pages());
  }
  return limit;
}

// Blocks lie one after the other: every number follows from the rows' sizes.
void check_row(const Source& source, PoolFileKind kind, uint64_t index, const PoolFileRow& row,
               uint64_t max_bytes) {
  const std::string& where = source.where();
  const bool chain = kind == PoolFileKind::sequence;
  check_file(row.bytes <= max_bytes, where, "row ", index, " has a page of ", row.bytes,
             " bytes, at most ", max_bytes, " are possible");
  check_file(chain ? row.parent == index - 1 : row.parent == kNoRow || row.parent < index, where,
             "row ", index, " cannot follow row ", row.parent);
  check_file(!chain || row.tokens_checksum == 0, where, "row ", index, " has no tokens");
}

}  // namespace

uint64_t pool_file_header_bytes(uint64_t rows) {
  return kFixedBytes + rows * kRowBytes + kSealBytes;
}

uint64_t pool_file_tokens_bytes(const KvPoolState& pool, PoolFileKind kind) {
  return kind == PoolFileKind::prefixes ? pool.options.page_tokens * sizeof(int32_t) : 0;
}

std::string row_where(const Source& source, uint64_t row) {
  return join(source.where(), ": row ", row);
}

std::vector<std::byte> pool_file_header(const KvPoolState& pool, const PoolFile& file,
                                        uint64_t file_bytes) {
  FieldWriter out(kKind);
  out.put(file.kind, pool.geometry, uint64_t{file.rows.size()}, file_bytes);
  for (const PoolFileRow& row : file.rows)
    out.put(row.offset, row.bytes, row.parent, row.tokens_checksum);
  return out.seal();
}

PoolFile read_pool_file(const Source& source, const KvPoolState& pool, PoolFileKind kind) {
  const std::string& where = source.where();
  check_file(source.size() >= pool_file_header_bytes(0), where, "has ", source.size(),
             " bytes, a file of a pool begins with ", pool_file_header_bytes(0));
  PoolFile file;
  uint64_t geometry = 0, count = 0, file_bytes = 0, expected = 0;
  const std::vector<std::byte> fixed = source.read(0, kFixedBytes);
  FieldReader head(where, fixed);
  head.check_kind(kKind);
  head.get(file.kind, geometry, count, file_bytes);
  check_file(file_bytes == source.size(), where, "has ", source.size(), " bytes, its header says ",
             file_bytes);
  check_file(count <= source.size() / kRowBytes && pool_file_header_bytes(count) <= source.size(),
             where, "has ", source.size(), " bytes, too few for ", count, " rows");
  check_file(file.kind == kind, where,
             kind == PoolFileKind::sequence ? "holds no sequence" : "holds no prefixes");
  check_file(geometry == pool.geometry, where,
             "is of a pool with other layers, heads, formats or page_tokens");
  // Rows that the pool cannot hold take no memory, and a wrong row ends the reading.
  constexpr uint64_t kChunkRows = kFileChunkBytes / kRowBytes;
  const uint64_t limit = max_rows(pool), known = std::min(count, limit);
  uint64_t at = pool_file_header_bytes(count);
  std::vector<std::byte> rows;
  for (uint64_t i = 0; i < known; ++i) {
    const uint64_t offset = kFixedBytes + i * kRowBytes;
    if (i % kChunkRows == 0)
      rows = source.read(offset, std::min(kChunkRows, known - i) * kRowBytes);
    PoolFileRow row;
    FieldReader(where, std::span(rows).subspan(i % kChunkRows * kRowBytes))
        .get(row.offset, row.bytes, row.parent, row.tokens_checksum);
    check_row(source, kind, i, row, max_record_bytes(pool));
    check_file(row.offset == at, where, "row ", i, " must be at ", at, ", the header says ",
               row.offset);
    at += pool_file_tokens_bytes(pool, kind) + row.bytes;
    file.rows.push_back(row);
  }
  const uint64_t seal_at = pool_file_header_bytes(count) - kSealBytes;
  const std::vector<std::byte> seal = source.read(seal_at, kSealBytes);
  FieldReader(where, seal).get(expected);
  check_checksum(where, "the header", source.checksum(0, seal_at), expected);
  if (count > limit) {
    fail(ErrorCode::invalid_argument, where, ": can never fit: it needs ", count,
         " pages, and the pool has ", limit);
  }
  check_file(at == source.size(), where, "has ", source.size(), " bytes, its rows have ", at);
  return file;
}

std::vector<std::byte> read_record(const Source& source, const KvPoolState& pool,
                                   const PoolFile& file, uint64_t row) {
  return source.read(file.rows[row].offset + pool_file_tokens_bytes(pool, file.kind),
                     file.rows[row].bytes);
}

std::vector<int32_t> read_tokens(const Source& source, const KvPoolState& pool,
                                 const PoolFile& file, uint64_t row) {
  std::vector<int32_t> tokens(pool.options.page_tokens);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(tokens));
  source.read(file.rows[row].offset, bytes);
  check_checksum(source.where(), join("row ", row, ": tokens"), checksum_of(bytes),
                 file.rows[row].tokens_checksum);
  return tokens;
}

}  // namespace gyre
