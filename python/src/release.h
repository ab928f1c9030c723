#pragma once

#include <nanobind/nanobind.h>

#include <memory>

namespace gyre::python {

namespace nb = nanobind;

// Keeps something of Python's alive from C++. The last copy may go on any thread, with or without
// the GIL, under any lock: without the GIL the release is queued, because waiting for the GIL there
// could wait for a thread that waits for the lock.
std::shared_ptr<void> hold(void* object, void (*release)(void*));
std::shared_ptr<void> hold(nb::object object);

void release_pending();  // runs what is queued; needs the GIL

// Without the GIL as long as it lives. While the interpreter ends, a thread that wants the GIL back
// does not get it: Python unwinds its stack, which the frames of C++ around it do not allow. Such a
// thread (a daemon's) stays here instead, until the process is gone.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;
  ~ReleasedGil();

 private:
  PyThreadState* state_;
};

// Runs `action` with the GIL released, then what it let go of.
template <class Action>
auto without_gil(Action&& action) {
  if constexpr (std::is_void_v<decltype(action())>) {
    {
      const ReleasedGil released;
      action();
    }
    release_pending();
  } else {
    auto result = [&] {
      const ReleasedGil released;
      return action();
    }();
    release_pending();
    return result;
  }
}

}  // namespace gyre::python
