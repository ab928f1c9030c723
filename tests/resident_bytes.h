#pragma once

#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace gyre::test {

// Memory of this process that has pages; 0 where /proc does not say.
inline uint64_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  uint64_t all = 0, resident = 0;
  in >> all >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace gyre::test
