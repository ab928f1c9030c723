// The CPU device, wrapped: attention nodes of its backends' graphs are computed here.
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "backend.h"
#include "graph_runner.h"

namespace gyre::ggml {
namespace {

struct Wrapped {
  explicit Wrapped(const Host& host) : runner(host) {}
  GraphRunner runner;
  bool is_reference = false;  // a test suite's: must run ggml's own kernels
};

using SetReference = void (*)(abi::Backend*, bool);

// What was there before, and the backends that were made since. Never destroyed: backends may
// outlive static objects.
struct State {
  const Host& host;
  abi::Backend* (*make)(abi::Device*, const char*) = nullptr;
  void* (*find_function)(abi::Registry*, const char*) = nullptr;
  void (*free)(abi::Backend*) = nullptr;
  abi::ComputeGraph compute = nullptr;
  SetReference set_reference = nullptr;
  std::mutex lock;
  std::map<abi::Backend*, std::unique_ptr<Wrapped>> backends;

  Wrapped* find(abi::Backend* backend) {
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = backends.find(backend);
    return found == backends.end() ? nullptr : found->second.get();
  }
};
State* state = nullptr;

abi::Status compute(abi::Backend* backend, abi::Graph* graph) {
  Wrapped* const wrapped = state->find(backend);
  if (wrapped == nullptr || wrapped->is_reference) return state->compute(backend, graph);
  return wrapped->runner.run(backend, state->compute, graph);
}

void free_backend(abi::Backend* backend) {
  std::unique_ptr<Wrapped> last;
  {
    const std::lock_guard<std::mutex> guard(state->lock);
    const auto found = state->backends.find(backend);
    if (found != state->backends.end()) {
      last = std::move(found->second);
      state->backends.erase(found);
    }
  }
  state->free(backend);
}

abi::Backend* make_backend(abi::Device* device, const char* params) {
  abi::Backend* const backend = state->make(device, params);
  if (backend == nullptr) return nullptr;
  try {
    auto wrapped = std::make_unique<Wrapped>(state->host);
    const std::lock_guard<std::mutex> guard(state->lock);
    if (state->compute == nullptr) {  // all backends of a device have the same
      state->free = backend->table.free;
      state->compute = backend->table.graph_compute;
    }
    state->backends.emplace(backend, std::move(wrapped));
  } catch (const std::bad_alloc&) {
    return backend;  // as ggml made it
  }
  backend->table.free = free_backend;
  backend->table.graph_compute = compute;
  return backend;
}

void set_reference(abi::Backend* backend, bool is_reference) {
  if (Wrapped* const wrapped = state->find(backend)) wrapped->is_reference = is_reference;
  state->set_reference(backend, is_reference);
}

void* find_function(abi::Registry* registry, const char* name) {
  void* const found = state->find_function(registry, name);
  if (found == nullptr || std::strcmp(name, "ggml_backend_cpu_set_use_ref") != 0) return found;
  state->set_reference = reinterpret_cast<SetReference>(found);
  return reinterpret_cast<void*>(set_reference);
}

}  // namespace

void wrap_cpu_device(const Host& host) {
  state = new State{host};
  state->make = host.cpu->table.init_backend;
  state->find_function = host.cpu->registry->table.get_proc_address;
  host.cpu->table.init_backend = make_backend;
  host.cpu->registry->table.get_proc_address = find_function;
}

}  // namespace gyre::ggml
