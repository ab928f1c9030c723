#pragma once
// What the writer and the reader of a header must agree on.

#include <array>
#include <cstdint>
#include <string_view>

#include "gyre/kv_format.h"

namespace gyre {

constexpr std::string_view kSnapshotMagic = "GYREKV";
constexpr size_t kSnapshotMagicBytes = 8;  // the rest is zero
constexpr size_t kSnapshotNameBytes = 16;

// All of a format's descriptor but its name, in the order of the file.
std::array<uint32_t, 8> snapshot_format_fields(const KvFormatInfo& info);

}  // namespace gyre
