#include "metal/kernels.h"

namespace gyre::metal {

std::span<const MetalKernel> kernel_table() { return {}; }

}  // namespace gyre::metal
