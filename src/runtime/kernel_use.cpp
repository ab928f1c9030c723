#include "runtime/kernel_use.h"

#include <algorithm>

namespace gyre {

std::string shape_of(std::span<const KernelUse> uses, const KernelInfo& kernel,
                     const void* params) {
  const auto use = std::find_if(uses.begin(), uses.end(),
                                [&](const KernelUse& u) { return u.kernel == &kernel; });
  return use != uses.end() ? use->shape(params) : std::string();
}

}  // namespace gyre
