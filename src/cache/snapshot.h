#pragma once
// Snapshots in three parts that know nothing of each other's means: plan (which sections, where),
// header bytes, and a source of bytes that is checked. docs/snapshots.md draws the file.

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "files/container.h"
#include "gyre/snapshot.h"

namespace gyre {

constexpr uint64_t kSnapshotAlign = 64;          // of sections: a cache line
constexpr uint64_t kSnapshotFixedBytes = 104;    // of the header, before the layers
constexpr uint32_t kSnapshotUniformVersion = 3;  // the layers' heads and dims are in the fixed part
constexpr uint64_t kSnapshotSectionBytes = 40;   // per row of the table of sections
constexpr uint64_t kSnapshotMaxSectionsPerLayer =
    8;  // body: 4; sink tokens and tail, dense: 2 each

// A format's descriptor without its name, in the order of the file.
std::array<uint32_t, 8> snapshot_format_fields(const KvFormatInfo& info);

// The oldest version that can say what these resolved layers are, and its bytes per layer.
uint32_t snapshot_version(std::span<const KvLayer> layers);
constexpr uint64_t snapshot_layer_bytes(uint32_t version) {
  return version == kSnapshotUniformVersion ? 136 : 168;
}

// Fills in sections (but for their checksums), header_bytes and file_bytes. Refuses to plan a file
// of more than `max_bytes`, so that no number of the file is used before it was compared.
void plan_snapshot(KvSnapshotInfo& info, uint64_t max_bytes);
std::vector<std::byte> snapshot_header(const KvSnapshotInfo& info);  // planned, with checksums
std::string section_text(const KvSnapshotSection& section);          // "layer 0 body V codes"

// The header, checked in itself and against the size of the source.
KvSnapshotInfo read_snapshot_header(const Source& source);
// Everything behind the header: checksums, and zeros between the sections.
void verify_snapshot(const Source& source, const KvSnapshotInfo& info);
void check_section(const Source& source, const KvSnapshotInfo& info, size_t index,
                   uint64_t checksum);
// Refuses a snapshot that a cache of this geometry cannot take.
void check_snapshot_fits(const std::string& where, const KvSnapshotInfo& snapshot,
                         const KvSnapshotInfo& cache);

}  // namespace gyre
