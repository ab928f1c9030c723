// What ggml's loader calls.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "attention.h"
#include "backend.h"
#include "isa/kernels.h"

namespace gyre::ggml {
namespace {

enum class Way : uint8_t { accelerator, wrap, off, unknown };

Way chosen_way() {
  const char* const value = std::getenv("GYRE_GGML");
  if (value == nullptr || std::strcmp(value, "accel") == 0) return Way::accelerator;
  if (std::strcmp(value, "wrap") == 0) return Way::wrap;
  return std::strcmp(value, "off") == 0 ? Way::off : Way::unknown;
}

// What was found stays for the life of the process, and so does this library: ggml's tables point
// into it.
struct Loaded {
  Host host;
  Way way = Way::off;
  abi::Registry registry{};
};
Loaded& loaded() {
  static auto& all = *new Loaded;
  return all;
}

void stay_loaded() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<void*>(&stay_loaded), &self) != 0)
    dlopen(self.dli_fname, RTLD_NOW | RTLD_NODELETE | RTLD_NOLOAD);
}

const char* registry_name(abi::Registry*) { return "GYRE"; }
size_t device_count(abi::Registry*) { return loaded().way == Way::accelerator ? 1 : 0; }
abi::Device* device(abi::Registry* registry, size_t index) {
  return index < device_count(registry) ? accelerator_device(loaded().host, registry) : nullptr;
}
void* function(abi::Registry*, const char* name) {
  return loaded().way == Way::accelerator ? accelerator_function(name) : nullptr;
}

abi::Registry* stand_aside(const std::string& reason) {
  say("standing aside: " + reason);
  return nullptr;
}

abi::Registry* load(const void* caller) {
  const Way way = chosen_way();
  if (way == Way::off) return stand_aside("GYRE_GGML=off");
  if (way == Way::unknown) return stand_aside("GYRE_GGML is none of accel, wrap, off");
  Host host;
  const std::string reason = find_host(caller, host);
  if (!reason.empty()) return stand_aside(reason);
  Loaded& all = loaded();
  if (all.registry.api_version == 0) {
    stay_loaded();
    all.host = host;
    all.way = way;
    all.registry.api_version = abi::kBackendApiVersion;
    all.registry.table = {registry_name, device_count, device, function};
    if (way == Way::wrap) wrap_cpu_device(all.host);
  }
  // Loaded again: ggml keeps one entry per registry, and has none after ggml_backend_unload.
  if (host.cpu != all.host.cpu) return stand_aside("another ggml of this process has loaded it");
  if (way != all.way)
    return stand_aside(std::string("already loaded with GYRE_GGML=") +
                       (all.way == Way::wrap ? "wrap" : "accel"));
  std::string instructions = instruction_set();
  if (matrix_kernels() != nullptr) instructions += std::string(", ") + matrix_kernels()->name;
  if (level_kernels() != nullptr) instructions += std::string(", ") + level_kernels()->name;
  say(std::string("active, ") + (way == Way::wrap ? "CPU device wrapped" : "accelerator device") +
      " (gyre " GYRE_VERSION_STRING ", ggml " + host.version + ", " + instructions + ")");
  return &all.registry;
}

}  // namespace
}  // namespace gyre::ggml

extern "C" __attribute__((visibility("default"))) gyre::ggml::abi::Registry* ggml_backend_init() {
  return gyre::ggml::load(__builtin_return_address(0));
}
