#pragma once
// The kernels that the stand-in driver launches: instances of the CUDA kernels' text, compiled for
// the host. A list of them registers itself where its file is linked.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

namespace gyre::cuda_host {

struct HostShape {
  uint32_t grid[3];
  uint32_t threads, shared_bytes;
};

struct HostKernel {
  std::string_view name;  // the name expression that the backend asks NVRTC for
  uint32_t params;        // how many
  size_t param_bytes[3];
  bool reads_early;  // before pdl_wait, what EarlyBits allow
  // Throws if the kernel does what it must not. `ahead` runs at its first pdl_wait, if not null.
  void (*run)(const HostShape& shape, uint32_t cluster, const void* const* params,
              const std::function<void()>& ahead);

  uint32_t cluster() const;  // blocks, by the kernel's name
};

// Null: there is no such instance.
const HostKernel* find_host_kernel(std::string_view name);
bool has_host_kernels();

struct HostKernels {
  explicit HostKernels(std::span<const HostKernel> list);
};

}  // namespace gyre::cuda_host
