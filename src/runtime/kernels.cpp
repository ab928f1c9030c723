#include "runtime/kernels.h"

#include <array>

namespace gyre {

std::span<const KernelInfo* const> all_kernels() {
  static constexpr std::array kAll = {
      &kKvCopy.info,       &kRope.info,      &kHadamard.info,        &kKvQuantize.info,
      &kKvDequantize.info, &kAttention.info, &kAttentionDecode.info, &kAttentionMerge.info,
      &kKvExtend.info,     &kKvAppend.info,  &kBytesCopy.info};
  return kAll;
}

}  // namespace gyre
