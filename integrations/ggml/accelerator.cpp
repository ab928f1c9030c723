// The accelerator device. Its backends hold a CPU backend of their own, whose threads compute.
#include <cstring>
#include <memory>
#include <new>

#include "backend.h"
#include "graph_runner.h"
#include "node.h"

namespace gyre::ggml {
namespace {

const Host* the_host = nullptr;

// The backend of the context that this thread is making. With `-fa auto` llama.cpp first asks where
// the attention of a graph of one token per sequence would run, and turns flash attention off if
// that is not the CPU. So this device supports nothing in the first graph that it is asked about.
// A graph with another number of tokens ends that, and so does the first one that is computed.
struct BeingMade {
  const abi::Backend* backend = nullptr;
  int64_t tokens = 0;  // of the first graph; 0: no graph yet
};
thread_local BeingMade being_made;

bool is_of_first_graph(const abi::Tensor& node) {
  if (being_made.backend == nullptr) return false;
  const abi::Tensor* const q = node.src[0];
  const int64_t tokens = q == nullptr ? 0 : q->ne[1] * q->ne[3];
  if (being_made.tokens == 0) being_made.tokens = tokens;
  if (being_made.tokens != tokens) being_made = {};
  return being_made.backend != nullptr;
}

struct Context {
  explicit Context(const Host& host) : runner(host) {}
  GraphRunner runner;
  abi::Backend* cpu = nullptr;
};

Context& context_of(abi::Backend* backend) { return *static_cast<Context*>(backend->context); }

const char* backend_name(abi::Backend*) { return "GYRE"; }
void free_backend(abi::Backend* backend) {
  Context& context = context_of(backend);
  if (being_made.backend == backend) being_made = {};
  context.cpu->table.free(context.cpu);
  delete &context;
  delete backend;
}
abi::Status compute(abi::Backend* backend, abi::Graph* graph) {
  Context& context = context_of(backend);
  return context.runner.run(context.cpu, context.cpu->table.graph_compute, graph);
}

using SetThreads = void (*)(abi::Backend*, int);
void set_threads(abi::Backend* backend, int threads) {
  // llama.cpp tells the threads whenever it computes a graph.
  being_made = {};
  const auto set =
      reinterpret_cast<SetThreads>(cpu_function(*the_host, "ggml_backend_set_n_threads"));
  if (set != nullptr) set(context_of(backend).cpu, threads);
}

using SetAbort = void (*)(abi::Backend*, bool (*callback)(void*), void* data);
void set_abort(abi::Backend* backend, bool (*callback)(void*), void* data) {
  const auto set =
      reinterpret_cast<SetAbort>(cpu_function(*the_host, "ggml_backend_set_abort_callback"));
  if (set != nullptr) set(context_of(backend).cpu, callback, data);
}

const char* device_name(abi::Device*) { return "GYRE"; }
const char* device_description(abi::Device*) { return "Gyre attention on the CPU"; }
void device_memory(abi::Device*, size_t* free, size_t* total) { *free = *total = 0; }
int device_type(abi::Device*) { return abi::device_accel; }
void device_props(abi::Device* device, abi::DeviceProps* props) {
  // The CPU's, of whatever size they are.
  the_host->cpu->table.get_props(the_host->cpu, props);
  auto* const head = reinterpret_cast<abi::DevicePropsHead*>(props);
  head->name = device_name(device);
  head->description = device_description(device);
  head->memory_free = head->memory_total = 0;
  head->type = abi::device_accel;
}

abi::Backend* make_backend(abi::Device* device, const char* /*params*/) {
  static uint8_t guid[16] = {'g', 'y', 'r', 'e', 'g', 'g', 'm', 'l', 1};
  auto context = std::unique_ptr<Context>(new (std::nothrow) Context(*the_host));
  auto backend = std::unique_ptr<abi::Backend>(new (std::nothrow) abi::Backend());
  if (context == nullptr || backend == nullptr) return nullptr;
  context->cpu = the_host->cpu->table.init_backend(the_host->cpu, nullptr);
  if (context->cpu == nullptr) return nullptr;
  backend->guid = guid;
  backend->table.get_name = backend_name;
  backend->table.free = free_backend;
  backend->table.graph_compute = compute;
  backend->device = device;
  backend->context = context.release();
  being_made = {backend.get()};
  return backend.release();
}

abi::BufferType* buffer_type(abi::Device*) {
  return the_host->cpu->table.get_buffer_type(the_host->cpu);
}
abi::Buffer* buffer_from_host(abi::Device*, void* memory, size_t size, size_t largest) {
  return the_host->cpu->table.buffer_from_host_ptr(the_host->cpu, memory, size, largest);
}
bool supports_buffers(abi::Device*, abi::BufferType* type) { return the_host->buft_is_host(type); }
bool supports(abi::Device*, const abi::Tensor* node) {
  for (const int view : the_host->view_ops) {
    if (node->op == view) return true;
  }
  if (node->op != the_host->op_attention || is_of_first_graph(*node)) return false;
  Problem problem;
  return read_node(*the_host, *node, problem) == nullptr;
}

}  // namespace

abi::Device* accelerator_device(const Host& host, abi::Registry* registry) {
  // Made once: one thread may ask for it while another computes.
  static abi::Device device = [&] {
    the_host = &host;
    abi::Device made{};
    abi::DeviceTable& table = made.table;
    table.get_name = device_name;
    table.get_description = device_description;
    table.get_memory = device_memory;
    table.get_type = device_type;
    table.get_props = device_props;
    table.init_backend = make_backend;
    table.get_buffer_type = buffer_type;
    table.buffer_from_host_ptr = buffer_from_host;
    table.supports_op = supports;
    table.supports_buft = supports_buffers;
    made.registry = registry;
    return made;
  }();
  return &device;
}

void* accelerator_function(const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0)
    return reinterpret_cast<void*>(set_threads);
  if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0)
    return reinterpret_cast<void*>(set_abort);
  return nullptr;
}

}  // namespace gyre::ggml
