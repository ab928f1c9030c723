// The reader of snapshots over any bytes: it throws gyre::Error or describes a snapshot that is
// consistent with itself. The header's checksum is made right first, so that what it says is read.
#include <cstdint>
#include <cstdlib>

#include "cache/snapshot_seed.h"
#include "gyre/error.h"

namespace {

using namespace gyre;

void expect(bool holds) {
  if (!holds) std::abort();
}

void read_snapshot(std::span<const std::byte> bytes) {
  const BytesSource source("snapshot_fuzz", bytes);
  const KvSnapshotInfo info = read_snapshot_header(source);
  uint64_t end = info.header_bytes;
  for (const KvSnapshotSection& section : info.sections) {
    expect(section.offset >= end && section.bytes <= bytes.size() - section.offset);
    end = section.offset + section.bytes;
  }
  expect(end == bytes.size());
  // What was read is what a writer would have written.
  const std::vector<std::byte> header = snapshot_header(info);
  expect(std::ranges::equal(header, bytes.first(header.size())));
  check_snapshot_fits(source.where(), info, test::seed_info(info.version));
  verify_snapshot(source, info);
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto raw = std::as_bytes(std::span(data, size));
  std::vector<std::byte> bytes(raw.begin(), raw.end());
  for (const bool sign : {false, true}) {
    if (sign) test::sign_header(bytes);
    try {
      read_snapshot(bytes);
    } catch (const Error&) {
    }
  }
  return 0;
}
