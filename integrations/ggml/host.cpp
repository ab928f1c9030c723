#include "host.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace gyre::ggml {
namespace {

// Versions whose nodes and structures were tested with `make llama`. Any other may have moved what
// cannot be verified from outside, the order of FLASH_ATTN_EXT's parameters.
constexpr const char* kKnownVersions[] = {"0.25."};

bool is_known(const std::string& version) {
  const char* const also = std::getenv("GYRE_GGML_VERSION");
  if (also != nullptr && version == also) return true;
  for (const char* const known : kKnownVersions) {
    if (version.rfind(known, 0) == 0) return true;
  }
  return false;
}

struct Library {
  void* handle = nullptr;

  template <class F>
  bool find(const char* name, F& function) const {
    void* found = handle != nullptr ? dlsym(handle, name) : nullptr;
    if (found == nullptr) found = dlsym(RTLD_DEFAULT, name);
    function = reinterpret_cast<F>(found);
    return found != nullptr;
  }
};

// The number whose name is `name`, among the first `count`.
template <class NameOf>
int find_number(const char* name, int count, const NameOf& name_of) {
  for (int i = 0; i < count; ++i) {
    const char* const found = name_of(i);
    if (found != nullptr && std::strcmp(found, name) == 0) return i;
  }
  return -1;
}

std::string find_ops(const Library& library, Host& host) {
  const char* (*name_of)(int) = nullptr;
  if (!library.find("ggml_op_name", name_of)) return "ggml_op_name is missing";
  // Every version that is_known() has 96 ops or more; CUSTOM is among the last.
  constexpr int kOps = 96;
  const auto op = [&](const char* name) { return find_number(name, kOps, name_of); };
  host.op_attention = op("FLASH_ATTN_EXT");
  host.op_custom = op("CUSTOM");
  constexpr const char* kViews[] = {"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"};
  for (size_t i = 0; i < 5; ++i) host.view_ops[i] = op(kViews[i]);
  for (const int view : host.view_ops) {
    if (view < 0) return "a view op is missing";
  }
  return host.op_attention < 0 || host.op_custom < 0 ? "FLASH_ATTN_EXT or CUSTOM is missing" : "";
}

std::string find_types(const Library& library, Host& host) {
  const char* (*name_of)(int) = nullptr;
  int64_t (*block_of)(int) = nullptr;
  size_t (*bytes_of)(int) = nullptr;
  if (!library.find("ggml_type_name", name_of) || !library.find("ggml_blck_size", block_of) ||
      !library.find("ggml_type_size", bytes_of))
    return "functions on types are missing";
  for (size_t i = 0; i < kRowTypes; ++i) {
    const RowFormat& format = kRowFormats[i];
    const int type = find_number(format.name, 31, name_of);  // bf16 is 30
    if (type < 0 || block_of(type) != int64_t{format.block} || bytes_of(type) != format.block_bytes)
      return std::string("type ") + format.name + " is not the one that is known";
    host.type[i] = type;
  }
  return "";
}

// Whether the tables of the CPU device and of a backend of it are as declared: which entries are
// there, and that what follows the tables is what it should be.
std::string check_tables(const Library& library, Host& host) {
  abi::Device* (*by_type)(int) = nullptr;
  abi::Registry* (*registry_of)(abi::Device*) = nullptr;
  if (!library.find("ggml_backend_dev_by_type", by_type) ||
      !library.find("ggml_backend_dev_backend_reg", registry_of))
    return "functions on devices are missing";
  abi::Device* const cpu = by_type(abi::device_cpu);
  if (cpu == nullptr) return "there is no CPU device yet";
  const abi::DeviceTable& d = cpu->table;
  if (cpu->registry != registry_of(cpu) || cpu->registry->api_version != abi::kBackendApiVersion ||
      d.init_backend == nullptr || d.get_props == nullptr || d.buffer_from_host_ptr == nullptr ||
      d.get_buffer_type == nullptr || d.get_host_buffer_type != nullptr || d.offload_op != nullptr)
    return "the CPU device's table is not the one that is known";
  abi::Backend* const backend = d.init_backend(cpu, nullptr);
  if (backend == nullptr) return "the CPU device makes no backend";
  const abi::BackendTable& t = backend->table;
  bool same = backend->device == cpu && t.get_name != nullptr && t.free != nullptr &&
              t.plan_create != nullptr && t.plan_free != nullptr && t.plan_update == nullptr &&
              t.plan_compute != nullptr && t.graph_compute != nullptr && t.events[0] == nullptr &&
              t.events[1] == nullptr && t.graph_optimize == nullptr;
  for (const void* const optional : t.optional) same = same && optional == nullptr;
  // If `device` is where it should be, so is what lies before it.
  if (same) t.free(backend);
  if (!same) return "the CPU backend's table is not the one that is known";
  host.cpu = cpu;
  return "";
}

}  // namespace

std::string find_host(const void* caller, Host& host) {
  Library library;
  Dl_info where{};
  if (dladdr(caller, &where) != 0 && where.dli_fname != nullptr)
    library.handle = dlopen(where.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  const char* (*version)() = nullptr;
  if (!library.find("ggml_version", version)) return "ggml's version is unknown";
  host.version = version();
  if (!is_known(host.version))
    return "ggml " + host.version + " is not known; GYRE_GGML_VERSION=" + host.version +
           " accepts it";
  size_t (*tensor_overhead)() = nullptr;
  if (!library.find("ggml_tensor_overhead", tensor_overhead) ||
      tensor_overhead() != abi::kTensorOverhead)
    return "tensors have another size than is known";
  if (!library.find("ggml_graph_n_nodes", host.graph_n_nodes) ||
      !library.find("ggml_graph_node", host.graph_node) ||
      !library.find("ggml_backend_buft_is_host", host.buft_is_host) ||
      !library.find("ggml_backend_buffer_is_host", host.buffer_is_host))
    return "functions on graphs and buffers are missing";
  for (const auto& find : {find_ops, find_types, check_tables}) {
    std::string reason = find(library, host);
    if (!reason.empty()) return reason;
  }
  return "";
}

void* cpu_function(const Host& host, const char* name) {
  const auto get = host.cpu->registry->table.get_proc_address;
  return get != nullptr ? get(host.cpu->registry, name) : nullptr;
}

void say(const std::string& text) { std::fprintf(stderr, "ggml-gyre: %s\n", text.c_str()); }

}  // namespace gyre::ggml
