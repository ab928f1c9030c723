#pragma once
// Tells the sanitizers that a thread goes on with another stack.

#include <cstddef>

#if defined(__has_feature)
#define GYRE_FIBERS_FEATURE(name) __has_feature(name)
#else
#define GYRE_FIBERS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || GYRE_FIBERS_FEATURE(address_sanitizer)
#define GYRE_FIBERS_ADDRESS 1
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__) || GYRE_FIBERS_FEATURE(thread_sanitizer)
#define GYRE_FIBERS_THREAD 1
#include <sanitizer/tsan_interface.h>
#endif

// What leaves a stack without returning, or comes back to it: the sanitizers would forget the whole
// stack at each jump, and count calls that never end.
#if defined(GYRE_FIBERS_ADDRESS)
#define GYRE_SWITCHES_STACKS gnu::no_sanitize_address
#elif defined(GYRE_FIBERS_THREAD)
#define GYRE_SWITCHES_STACKS gnu::no_sanitize_thread
#else
#define GYRE_SWITCHES_STACKS
#endif

namespace gyre::fibers {

struct KnownStack {
  const void* bottom = nullptr;
  size_t bytes = 0;
  void* frames = nullptr;  // the address sanitizer's own, while the stack is left
  void* fiber = nullptr;   // the thread sanitizer's
};

#if defined(GYRE_FIBERS_ADDRESS)

inline void make_known(KnownStack& /*stack*/) {}
inline void forget(KnownStack& /*stack*/) {}
inline void begin_switch(KnownStack& from, const KnownStack& to) {
  __sanitizer_start_switch_fiber(&from.frames, to.bottom, to.bytes);
}
inline void end_switch(const KnownStack& here, KnownStack& from) {
  __sanitizer_finish_switch_fiber(here.frames, &from.bottom, &from.bytes);
}

#elif defined(GYRE_FIBERS_THREAD)

inline void make_known(KnownStack& stack) { stack.fiber = __tsan_create_fiber(0); }
inline void forget(KnownStack& stack) { __tsan_destroy_fiber(stack.fiber); }
[[GYRE_SWITCHES_STACKS]] inline void begin_switch(KnownStack& from, const KnownStack& to) {
  from.fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.fiber, 0);
}
inline void end_switch(const KnownStack& /*here*/, KnownStack& /*from*/) {}

#else

inline void make_known(KnownStack& /*stack*/) {}
inline void forget(KnownStack& /*stack*/) {}
inline void begin_switch(KnownStack& /*from*/, const KnownStack& /*to*/) {}
inline void end_switch(const KnownStack& /*here*/, KnownStack& /*from*/) {}

#endif

}  // namespace gyre::fibers
