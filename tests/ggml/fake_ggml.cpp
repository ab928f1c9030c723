#include "ggml/fake_ggml.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>

namespace gyre::ggml::test {
namespace {

// ggml's numbers of the row types, in the order of RowType.
constexpr int kTypes[kRowTypes] = {0, 1, 30, 2, 3, 6, 7, 8};

void run_custom(abi::Tensor* node, int threads) {
  abi::CustomOp custom{};
  std::memcpy(&custom, node->op_params, sizeof(custom));
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i)
    others.emplace_back([=] { custom.run(node, i, threads, custom.data); });
  custom.run(node, 0, threads, custom.data);
  for (std::thread& other : others) other.join();
}

struct CpuContext {
  int threads = fake().threads;
};

abi::Status compute(abi::Backend* backend, abi::Graph* graph) {
  const int threads = static_cast<CpuContext*>(backend->context)->threads;
  for (abi::Tensor* const node : graph->nodes) {
    if (node->op == kOpCustom) run_custom(node, threads);
    if (node->op == kOpAttention) ++fake().left;
  }
  return fake().fails ? abi::status_failed : abi::status_success;
}

const char* cpu_name(abi::Backend*) { return "CPU"; }
void free_cpu(abi::Backend* backend) {
  --fake().backends;
  delete static_cast<CpuContext*>(backend->context);
  delete backend;
}
void set_threads(abi::Backend* backend, int threads) {
  static_cast<CpuContext*>(backend->context)->threads = threads;
}
void set_reference(abi::Backend*, bool) { ++fake().reference_calls; }

abi::Backend* make_cpu(abi::Device* device, const char*) {
  static int entry = 0;  // what an entry that the library does not call points to
  auto* const backend = new abi::Backend();
  backend->table.get_name = cpu_name;
  backend->table.free = free_cpu;
  backend->table.plan_create = backend->table.plan_free = backend->table.plan_compute = &entry;
  backend->table.graph_compute = compute;
  if (fake().moved_tables) backend->table.optional[5] = backend->table.events[0] = &entry;
  backend->device = device;
  backend->context = new CpuContext;
  ++fake().backends;
  if (fake().moved_tables) fake().moved = backend;
  return backend;
}

void cpu_props(abi::Device*, abi::DeviceProps* props) {
  *reinterpret_cast<abi::DevicePropsHead*>(props) = {"CPU", "a processor", 1, 1, abi::device_cpu};
}
abi::BufferType* cpu_buffer_type(abi::Device*) {
  static abi::BufferType type;
  return &type;
}
abi::Buffer* from_host(abi::Device*, void*, size_t, size_t) { return nullptr; }
void* cpu_function(abi::Registry*, const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0)
    return reinterpret_cast<void*>(set_threads);
  if (std::strcmp(name, "ggml_backend_cpu_set_use_ref") == 0)
    return reinterpret_cast<void*>(set_reference);
  return nullptr;
}

// [values, rows, heads, streams]
void describe(const Rows& rows, uint64_t values, uint64_t count, abi::Tensor& tensor) {
  static abi::Buffer host;
  tensor.type = kTypes[static_cast<size_t>(rows.type)];
  tensor.buffer = &host;
  tensor.data = const_cast<uint8_t*>(rows.data);
  const uint64_t ne[] = {values, count, rows.heads, rows.streams};
  for (size_t i = 0; i < 4; ++i) tensor.ne[i] = static_cast<int64_t>(ne[i]);
  tensor.nb[0] = row_format(rows.type).block_bytes;
  for (size_t i = 0; i < 3; ++i) tensor.nb[i + 1] = rows.strides[i];
}

}  // namespace

FakeGgml& fake() {
  static FakeGgml& ggml = *new FakeGgml;
  return ggml;
}

void reset_fake() {
  std::destroy_at(&fake());
  FakeGgml& ggml = *std::construct_at(&fake());
  ggml.registry.api_version = abi::kBackendApiVersion;
  ggml.registry.table.get_proc_address = cpu_function;
  ggml.cpu.registry = &ggml.registry;
  ggml.cpu.table.init_backend = make_cpu;
  ggml.cpu.table.get_props = cpu_props;
  ggml.cpu.table.get_buffer_type = cpu_buffer_type;
  ggml.cpu.table.buffer_from_host_ptr = from_host;
  ggml.second_cpu = ggml.cpu;
}

Node::Node(const Shape& shape) : memory(shape) {
  const Problem& p = memory.problem;
  describe(p.q, p.k_dim, p.tokens, q);
  describe(p.k, p.k_dim, p.cells, k);
  describe(p.v, p.v_dim, p.cells, v);
  Rows rows;
  rows.data = p.out;
  rows.heads = p.tokens, rows.streams = p.streams;
  rows.strides[0] = p.out_strides[1], rows.strides[1] = p.out_strides[0];
  rows.strides[2] = p.out_strides[2];
  describe(rows, p.v_dim, p.heads, out);
  out.op = kOpAttention;
  out.src[0] = &q, out.src[1] = &k, out.src[2] = &v;
  if (p.mask.data != nullptr) {
    Rows of_mask = p.mask;
    of_mask.type = RowType::f16;
    describe(of_mask, p.cells, p.tokens, mask);
    out.src[3] = &mask;
  }
  if (p.sinks != nullptr) {
    Rows of_sinks;
    of_sinks.data = reinterpret_cast<const uint8_t*>(p.sinks);
    for (uint64_t& stride : of_sinks.strides) stride = 4 * p.heads;
    describe(of_sinks, p.heads, 1, sinks);
    out.src[4] = &sinks;
  }
  const float parameters[] = {p.scale, p.max_bias, p.soft_cap};
  std::memcpy(out.op_params, parameters, sizeof(parameters));
  out.op_params[3] = 10;  // GGML_PREC_F32
  graph.nodes = {&q, &out};
}

double Node::error() {
  const double result = nmse(memory.out, memory.expected());
  std::fill(memory.out.begin(), memory.out.end(), std::numeric_limits<float>::quiet_NaN());
  return result;
}

}  // namespace gyre::ggml::test

// What the library finds with dlsym.
namespace ggml_abi = gyre::ggml::abi;  // `abi` is the C++ runtime's
using gyre::ggml::test::fake;
extern "C" {
__attribute__((visibility("default"))) const char* ggml_version() { return fake().version.c_str(); }
__attribute__((visibility("default"))) size_t ggml_tensor_overhead() {
  return fake().tensor_overhead;
}
__attribute__((visibility("default"))) const char* ggml_op_name(int op) {
  constexpr const char* kFirst[] = {"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"};
  if (op < 5) return kFirst[op];
  if (op == gyre::ggml::test::kOpAttention) return "FLASH_ATTN_EXT";
  return op == gyre::ggml::test::kOpCustom ? fake().custom_name : "OTHER";
}
__attribute__((visibility("default"))) const char* ggml_type_name(int type) {
  for (size_t i = 0; i < gyre::ggml::kRowTypes; ++i) {
    if (gyre::ggml::test::kTypes[i] == type) return gyre::ggml::kRowFormats[i].name;
  }
  return nullptr;
}
__attribute__((visibility("default"))) int64_t ggml_blck_size(int type) {
  return type == 0 || type == 1 || type == 30 ? 1 : 32;
}
__attribute__((visibility("default"))) size_t ggml_type_size(int type) {
  for (size_t i = 0; i < gyre::ggml::kRowTypes; ++i) {
    if (gyre::ggml::test::kTypes[i] == type)
      return type == 2 ? fake().q4_0_bytes : gyre::ggml::kRowFormats[i].block_bytes;
  }
  return 0;
}
__attribute__((visibility("default"))) int ggml_graph_n_nodes(ggml_abi::Graph* graph) {
  return static_cast<int>(graph->nodes.size());
}
__attribute__((visibility("default"))) ggml_abi::Tensor* ggml_graph_node(ggml_abi::Graph* graph,
                                                                         int i) {
  return graph->nodes[static_cast<size_t>(i)];
}
__attribute__((visibility("default"))) bool ggml_backend_buft_is_host(ggml_abi::BufferType* type) {
  return type->is_host;
}
__attribute__((visibility("default"))) bool ggml_backend_buffer_is_host(ggml_abi::Buffer* buffer) {
  return buffer->is_host;
}
__attribute__((visibility("default"))) ggml_abi::Device* ggml_backend_dev_by_type(int type) {
  if (type != ggml_abi::device_cpu || !fake().has_cpu) return nullptr;
  return fake().is_second ? &fake().second_cpu : &fake().cpu;
}
__attribute__((visibility("default"))) ggml_abi::Registry* ggml_backend_dev_backend_reg(
    ggml_abi::Device* device) {
  return device->registry;
}
}
