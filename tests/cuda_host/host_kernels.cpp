#include "cuda_host/host_kernels.h"

#include <charconv>
#include <map>

namespace gyre::cuda_host {
namespace {

std::map<std::string_view, const HostKernel*>& all_kernels() {
  static std::map<std::string_view, const HostKernel*> all;
  return all;
}

}  // namespace

HostKernels::HostKernels(std::span<const HostKernel> list) {
  for (const HostKernel& kernel : list) all_kernels()[kernel.name] = &kernel;
}

const HostKernel* find_host_kernel(std::string_view name) {
  const auto found = all_kernels().find(name);
  return found != all_kernels().end() ? found->second : nullptr;
}

bool has_host_kernels() { return !all_kernels().empty(); }

// attention_decode has them as its fifth template argument, no other kernel has any.
uint32_t HostKernel::cluster() const {
  if (!name.starts_with("gyre::cuda::attention_decode<")) return 1;
  size_t at = 0;
  for (int comma = 0; comma < 4; ++comma) at = name.find(", ", at) + 2;
  uint32_t blocks = 1;
  std::from_chars(name.data() + at, name.data() + name.size(), blocks);
  return blocks;
}

}  // namespace gyre::cuda_host
