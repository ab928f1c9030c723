#include "c_api/structs.h"

#include <algorithm>

namespace gyre::c_api {
namespace {

// No struct will be that large: a size above it was never set.
constexpr uint64_t kMaxBytes = 4096;

uint64_t checked_size(const void* given, const char* name) {
  uint64_t size = 0;
  std::memcpy(&size, given, sizeof size);
  if (size < sizeof size || size > kMaxBytes || size % 8 != 0)
    refuse(name, ".size must be sizeof the struct, got ", size);
  return size;
}

}  // namespace

void copy_in(void* to, uint64_t known, const void* from, const char* name) {
  const uint64_t size = checked_size(from, name);
  const auto* bytes = static_cast<const unsigned char*>(from);
  const auto* const unknown = std::find_if(bytes + std::min(size, known), bytes + size,
                                           [](unsigned char byte) { return byte != 0; });
  if (unknown != bytes + size) {
    refuse(name, " has ", size, " bytes, this library (", gyre_version(), ") knows ", known,
           " of them, and byte ", unknown - bytes, " is not 0");
  }
  std::memcpy(to, from, std::min(size, known));
}

void copy_out(void* to, uint64_t known, const void* from, const char* name) {
  const uint64_t size = checked_size(to, name);
  auto* bytes = static_cast<unsigned char*>(to);
  std::memset(bytes + sizeof size, 0, size - sizeof size);
  std::memcpy(bytes + sizeof size, static_cast<const unsigned char*>(from) + sizeof size,
              std::min(size, known) - sizeof size);
}

}  // namespace gyre::c_api
