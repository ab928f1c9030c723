#pragma once

#include <cstdint>

namespace gyre {

// Lists of which this thread has had a first command run, or enter a queue. Where the number is the
// same after a submit that failed, nothing of the list has run, whatever the error is.
inline thread_local uint64_t launches_of_thread = 0;

inline uint64_t launches() { return launches_of_thread; }
inline void note_launch() noexcept { ++launches_of_thread; }

}  // namespace gyre
