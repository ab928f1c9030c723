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

// Rows that the pool has pages for: a group without a window and a limit has a page of each.
uint64_t most_rows(const KvPool::State& pool) {
  constexpr uint64_t kMostTokens = uint64_t{1} << 31;
  uint64_t most = kMostTokens / pool.options.page_tokens;
  for (const PageGroup& group : pool.groups) {
    if (group.keys().window == 0 && group.keys().limit == 0) most = std::min(most, group.pages());
  }
  return most;
}

// Takes the rows of a file in order, and keeps as many as the pool can need. Blocks lie one after
// the other: every number follows from the rows' sizes.
class Rows {
 public:
  Rows(const SnapshotSource& source, const KvPool::State& pool, PoolFileKind kind, uint64_t count)
      : source_(source), pool_(pool), count_(count), at_(pool_file_header_bytes(count)) {
    file_.kind = kind;
  }
  void add(const PoolFileRow& row) {
    const uint64_t i = next_++;
    demand(row.bytes <= most_bytes_, source_, "row ", i, " has a page of ", row.bytes,
           " bytes, at most ", most_bytes_, " are possible");
    demand(row.offset == at_, source_, "row ", i, " must be at ", at_, ", the header says ",
           row.offset);
    at_ += pool_file_tokens_bytes(pool_, file_.kind) + row.bytes;
    const bool chain = file_.kind == PoolFileKind::sequence;
    demand(chain ? row.parent == i - 1 : row.parent == kNoRow || row.parent < i, source_, "row ", i,
           " cannot follow row ", row.parent);
    demand(!chain || row.tokens_checksum == 0, source_, "row ", i, " has no tokens");
    if (i < most_) file_.rows.push_back(row);
  }
  PoolFile finish() {
    demand(at_ == source_.size(), source_, "has ", source_.size(), " bytes, its rows have ", at_);
    if (count_ > most_) {
      fail(ErrorCode::out_of_memory, source_.where(), ": ", count_ - most_,
           " pages are missing: ", count_, " are needed, the pool has ", most_);
    }
    return std::move(file_);
  }

 private:
  const SnapshotSource& source_;
  const KvPool::State& pool_;
  const uint64_t count_;
  const uint64_t most_ = most_rows(pool_), most_bytes_ = most_record_bytes(pool_);
  PoolFile file_{};
  uint64_t next_ = 0, at_;
};

// In pieces: what the header says about their number takes no memory.
void read_rows(const SnapshotSource& source, Checksum& checksum, uint64_t count, Rows& rows) {
  std::vector<PoolFileRow> piece(std::min(count, kSnapshotPieceBytes / sizeof(PoolFileRow)));
  for (uint64_t done = 0; done < count; done += piece.size()) {
    piece.resize(std::min<uint64_t>(piece.size(), count - done));
    const std::span<std::byte> bytes = std::as_writable_bytes(std::span(piece));
    source.read(sizeof(Head) + done * sizeof(PoolFileRow), bytes);
    checksum.add(bytes);
    for (const PoolFileRow& row : piece) rows.add(row);
  }
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
  demand(head.kind == static_cast<uint32_t>(kind), source,
         kind == PoolFileKind::sequence ? "holds no sequence" : "holds no prefixes");
  demand(head.geometry == pool.geometry, source,
         "is of a pool with other layers, heads, formats or page_tokens");
  Checksum checksum;
  checksum.add(std::as_bytes(std::span(&head, 1)));
  Rows rows(source, pool, kind, head.rows);
  read_rows(source, checksum, head.rows, rows);
  uint64_t expected = 0;
  source.read(pool_file_header_bytes(head.rows) - sizeof(expected),
              std::as_writable_bytes(std::span(&expected, 1)));
  demand(checksum.value() == expected, source, "the header's checksum is ", checksum.value(),
         ", expected ", expected);
  return rows.finish();
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
