#pragma once

#include <cstdint>

namespace gyre {

// Grows in a child of fork(), where the threads of the parent are missing and a lock that one of
// them held is never opened.
uint64_t process_generation();

}  // namespace gyre
