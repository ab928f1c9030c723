#include "cpu/device.h"
#include "cpu/kernels.h"

namespace gyre::cpu {

std::span<const CpuKernel> kernel_table() {
  static constexpr CpuKernel kTable[] = {
      {&kKvCopy.info, select_kv_copy, kv_copy_tasks},
      {&kRope.info, select_rope, rope_tasks},
  };
  return kTable;
}

}  // namespace gyre::cpu
