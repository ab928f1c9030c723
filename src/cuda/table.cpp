#include "cuda/kernels.h"

namespace gyre::cuda {

std::span<const CudaKernel> kernel_table() {
  static constexpr CudaKernel kTable[] = {
      {&kKvCopy.info, "kv_copy.cu", name_kv_copy, launch_kv_copy},
      {&kKvExtend.info, "cache.cu", name_kv_extend, launch_kv_extend},
      {&kBytesCopy.info, "cache.cu", name_bytes_copy, launch_bytes_copy},
  };
  return kTable;
}

}  // namespace gyre::cuda
