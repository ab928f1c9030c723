#include "cpu/kernels/kv_signs.h"

namespace gyre::cpu {

const SignMasks& native_signs() {
  static const SignMasks kMasks = [] {
    SignMasks masks{};
    for (uint32_t j = 0; j < masks.size(); ++j) masks[j] = abi::kv_sign_bit(j) << 31;
    return masks;
  }();
  return kMasks;
}

const SignMasks& mlx_native_signs() {
  static const SignMasks kMasks = [] {
    SignMasks masks{};
    for (uint32_t j = 0; j < 8 * sizeof(abi::kMlxNativeSigns); ++j) {
      masks[j] = static_cast<uint32_t>(abi::kMlxNativeSigns[j / 8] >> (j % 8) & 1) << 31;
    }
    return masks;
  }();
  return kMasks;
}

}  // namespace gyre::cpu
