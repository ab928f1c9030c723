#include "release.h"

#include <unistd.h>

#include <mutex>
#include <vector>

namespace gyre::python {
namespace {

struct Pending {
  void (*release)(void*);
  void* object;
};

struct Queue {
  std::mutex mutex;
  std::vector<Pending> pending;
  bool scheduled = false;
};

Queue& queue() {
  static auto* const kQueue = new Queue;  // outlives whatever is destroyed at exit
  return *kQueue;
}

// Releasing an object may run Python code; an error that is on its way must survive it.
void run(const Pending& one) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  one.release(one.object);
  PyErr_Restore(type, value, trace);
}

int run_all(void* /*unused*/) {
  std::vector<Pending> taken;
  {
    const std::lock_guard lock(queue().mutex);
    taken.swap(queue().pending);
    queue().scheduled = false;
  }
  for (const Pending& one : taken) run(one);
  return 0;
}

void let_go(const Pending& one) {
  if (Py_IsInitialized() == 0) return;  // the interpreter is gone, and with it what was held
  if (PyGILState_Check() != 0) return run(one);
  Queue& all = queue();
  bool schedule = false;
  {
    const std::lock_guard lock(all.mutex);
    all.pending.push_back(one);
    schedule = !std::exchange(all.scheduled, true);
  }
  if (schedule && Py_AddPendingCall(run_all, nullptr) != 0) {
    const std::lock_guard lock(all.mutex);  // full: the next call of ours runs the queue
    all.scheduled = false;
  }
}

}  // namespace

ReleasedGil::~ReleasedGil() {
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {  // the unwinding of pthread_exit(), which a handler may hold up but not end
    for (;;) pause();
  }
}

std::shared_ptr<void> hold(void* object, void (*release)(void*)) {
  return {object, [release](void* held) { let_go({release, held}); }};
}

std::shared_ptr<void> hold(nb::object object) {
  return hold(object.release().ptr(), [](void* held) { Py_DECREF(static_cast<PyObject*>(held)); });
}

void release_pending() {
  {
    const std::lock_guard lock(queue().mutex);
    if (queue().pending.empty()) return;
  }
  run_all(nullptr);
}

}  // namespace gyre::python
