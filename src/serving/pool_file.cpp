#include "serving/pool_file.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "runtime/require.h"

namespace gyre {
namespace {

constexpr std::string_view kMagic = "GYREPOOL";

struct Head {
  char magic[8];
  uint32_t version;
  uint32_t kind;
  uint64_t geometry;
  uint64_t rows;
  uint64_t file_bytes;
};
static_assert(sizeof(Head) == 40 && sizeof(PoolFileRow) == 32);

template <class... Parts>
void demand(bool holds, const SnapshotSource& source, const Parts&... parts) {
  if (!holds) fail(ErrorCode::io, source.where(), ": ", parts...);
}

// Blocks lie one after the other: every number follows from the rows' sizes.
void check_rows(const SnapshotSource& source, const KvPool::State& pool, const PoolFile& file) {
  uint64_t at = pool_file_header_bytes(file.rows.size());
  const uint64_t most = most_record_bytes(pool);
  for (uint64_t i = 0; i < file.rows.size(); ++i) {
    const PoolFileRow& row = file.rows[i];
    demand(row.bytes <= most, source, "row ", i, " has a page of ", row.bytes, " bytes, at most ",
           most, " are possible");
    demand(row.offset == at, source, "row ", i, " must be at ", at, ", the header says ",
           row.offset);
    at += pool_file_tokens_bytes(pool, file.kind) + row.bytes;
    const bool chain = file.kind == PoolFileKind::sequence;
    demand(chain ? row.parent == i - 1 : row.parent == kNoRow || row.parent < i, source, "row ", i,
           " cannot follow row ", row.parent);
    demand(!chain || row.tokens_checksum == 0, source, "row ", i, " has no tokens");
  }
  demand(at == source.size(), source, "has ", source.size(), " bytes, its rows have ", at);
}

}  // namespace

uint64_t pool_file_header_bytes(uint64_t rows) {
  return sizeof(Head) + rows * sizeof(PoolFileRow) + sizeof(uint64_t);
}

uint64_t pool_file_tokens_bytes(const KvPool::State& pool, PoolFileKind kind) {
  return kind == PoolFileKind::prefixes ? pool.options.page_tokens * sizeof(int32_t) : 0;
}

std::string row_where(const SnapshotSource& source, uint64_t row) {
  return join(source.where(), ": row ", row);
}

std::vector<std::byte> pool_file_header(const KvPool::State& pool, const PoolFile& file,
                                        uint64_t file_bytes) {
  std::vector<std::byte> bytes(pool_file_header_bytes(file.rows.size()));
  Head head{};
  std::ranges::copy(kMagic, head.magic);
  head.version = kPoolFileVersion;
  head.kind = static_cast<uint32_t>(file.kind);
  head.geometry = pool.geometry;
  head.rows = file.rows.size();
  head.file_bytes = file_bytes;
  std::memcpy(bytes.data(), &head, sizeof(head));
  const std::span<const std::byte> rows = std::as_bytes(std::span(file.rows));
  std::ranges::copy(rows, bytes.begin() + sizeof(head));
  const uint64_t covered = bytes.size() - sizeof(uint64_t);
  const uint64_t checksum = checksum_of(std::span(bytes).first(covered));
  std::memcpy(bytes.data() + covered, &checksum, sizeof(checksum));
  return bytes;
}

PoolFile read_pool_file(const SnapshotSource& source, const KvPool::State& pool,
                        PoolFileKind kind) {
  demand(source.size() >= pool_file_header_bytes(0), source, "has ", source.size(),
         " bytes, a file of a pool begins with ", pool_file_header_bytes(0));
  Head head{};
  source.read(0, std::as_writable_bytes(std::span(&head, 1)));
  demand(std::string_view(head.magic, sizeof(head.magic)) == kMagic, source, "does not begin with ",
         kMagic, ", it is not a file of a pool");
  demand(head.version == kPoolFileVersion, source, "is a file of version ", head.version,
         ", this library reads version ", kPoolFileVersion);
  demand(head.file_bytes == source.size(), source, "has ", source.size(),
         " bytes, its header says ", head.file_bytes);
  demand(head.rows <= source.size() / sizeof(PoolFileRow) &&
             pool_file_header_bytes(head.rows) <= source.size(),
         source, "has ", source.size(), " bytes, too few for ", head.rows, " rows");
  std::vector<std::byte> bytes(pool_file_header_bytes(head.rows));
  source.read(0, bytes);
  const uint64_t covered = bytes.size() - sizeof(uint64_t);
  uint64_t expected = 0;
  std::memcpy(&expected, bytes.data() + covered, sizeof(expected));
  const uint64_t is = checksum_of(std::span(bytes).first(covered));
  demand(is == expected, source, "the header's checksum is ", is, ", expected ", expected);
  demand(head.kind == static_cast<uint32_t>(kind), source,
         kind == PoolFileKind::sequence ? "holds no sequence" : "holds no prefixes");
  demand(head.geometry == pool.geometry, source,
         "is of a pool with other layers, heads, formats or page_tokens");
  PoolFile file{kind, std::vector<PoolFileRow>(head.rows)};
  if (head.rows != 0)
    std::memcpy(file.rows.data(), bytes.data() + sizeof(head), head.rows * sizeof(PoolFileRow));
  check_rows(source, pool, file);
  return file;
}

std::vector<std::byte> read_record(const SnapshotSource& source, const KvPool::State& pool,
                                   const PoolFile& file, uint64_t row) {
  std::vector<std::byte> bytes(file.rows[row].bytes);
  source.read(file.rows[row].offset + pool_file_tokens_bytes(pool, file.kind), bytes);
  return bytes;
}

std::vector<int32_t> read_tokens(const SnapshotSource& source, const KvPool::State& pool,
                                 const PoolFile& file, uint64_t row) {
  std::vector<int32_t> tokens(pool.options.page_tokens);
  source.read(file.rows[row].offset, std::as_writable_bytes(std::span(tokens)));
  const uint64_t is = checksum_of(std::as_bytes(std::span(tokens)));
  demand(is == file.rows[row].tokens_checksum, source, "row ", row, ": the tokens' checksum is ",
         is, ", expected ", file.rows[row].tokens_checksum);
  return tokens;
}

}  // namespace gyre
