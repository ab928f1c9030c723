#include "metal_host/host_kernel.h"

#include <cstring>
#include <vector>

namespace gyre::metal_host {
namespace {

std::vector<HostKernel>& kernels() {
  static std::vector<HostKernel> all;
  return all;
}

}  // namespace

bool register_kernel(const HostKernel& kernel) {
  kernels().push_back(kernel);
  return true;
}

const HostKernel* find_kernel(const char* name) {
  for (const HostKernel& kernel : kernels()) {
    if (std::strcmp(kernel.name, name) == 0) return &kernel;
  }
  return nullptr;
}

}  // namespace gyre::metal_host
