#pragma once
// Snapshots in three steps that know nothing of each other's means: plan (which sections, where),
// header bytes, and a source of bytes that a reader checks. docs/snapshots.md draws the file.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "gyre/kv_snapshot.h"

namespace gyre {

constexpr uint64_t kSnapshotAlign = 64;                // of sections: a cache line
constexpr uint64_t kSnapshotPieceBytes = 1u << 20;     // staged at a time
constexpr uint64_t kSnapshotFixedBytes = 104;          // of the header, before the layers
constexpr uint64_t kSnapshotLayerBytes = 136;          // per layer
constexpr uint64_t kSnapshotSectionBytes = 40;         // per row of the table of sections
constexpr uint64_t kSnapshotMostSectionsPerLayer = 8;  // body: 4; sinks and tail, dense: 2 each

// XXH3, 64 bits.
class Checksum {
 public:
  Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  ~Checksum();
  void add(std::span<const std::byte> bytes);
  uint64_t value() const;

 private:
  void* state_;
};

uint64_t checksum_of(std::span<const std::byte> bytes);

// Fills in sections (but for their checksums), header_bytes and file_bytes. Refuses to plan a file
// of more than `most_bytes`, so that no number of the file is used before it was compared.
void plan_snapshot(KvSnapshotInfo& info, uint64_t most_bytes);
std::vector<std::byte> snapshot_header(const KvSnapshotInfo& info);  // planned, with checksums
std::string section_text(const KvSnapshotSection& section);          // "layer 0 body V codes"

// Bytes to read, of a file or of memory.
class SnapshotSource {
 public:
  explicit SnapshotSource(std::string where) : where_(std::move(where)) {}
  SnapshotSource(const SnapshotSource&) = delete;
  SnapshotSource& operator=(const SnapshotSource&) = delete;
  virtual ~SnapshotSource() = default;

  virtual uint64_t size() const = 0;
  virtual void read(uint64_t offset, std::span<std::byte> to) const = 0;
  const std::string& where() const { return where_; }  // opens messages: the call and the file

 private:
  std::string where_;
};

class BytesSource final : public SnapshotSource {
 public:
  BytesSource(std::string where, std::span<const std::byte> bytes)
      : SnapshotSource(std::move(where)), bytes_(bytes) {}
  uint64_t size() const override { return bytes_.size(); }
  void read(uint64_t offset, std::span<std::byte> to) const override;

 private:
  std::span<const std::byte> bytes_;
};

// The header, checked in itself and against the size of the source.
KvSnapshotInfo read_snapshot_header(const SnapshotSource& source);
// Everything behind the header: checksums, and zeros between the sections.
void verify_snapshot(const SnapshotSource& source, const KvSnapshotInfo& info);
void check_section(const SnapshotSource& source, const KvSnapshotInfo& info, size_t index,
                   uint64_t checksum);
// Refuses a snapshot that a cache of this geometry cannot take.
void check_snapshot_fits(const std::string& where, const KvSnapshotInfo& snapshot,
                         const KvSnapshotInfo& cache);

}  // namespace gyre
