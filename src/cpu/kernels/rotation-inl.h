// Into and out of the domain in which a compressed format stores a head: signs, then the
// orthonormal Walsh-Hadamard transform of each block. Dense formats have none.

#if defined(GYRE_CPU_ROTATION_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ROTATION_INL_H
#undef GYRE_CPU_ROTATION_INL_H
#else
#define GYRE_CPU_ROTATION_INL_H
#endif

#include <cmath>

#include "abi/kv_codec.h"
#include "cpu/kernels/hadamard-inl.h"
#include "cpu/kernels/kv_mlx_native.h"
#include "cpu/kernels/kv_signs.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

HWY_INLINE void FlipSigns(uint32_t format, uint32_t head_dim, float* x) {
  const bool native = abi::kv_is_native(format);
  if (!native && !mlx_native_is_signed(format, head_dim)) return;
  const SignMasks& signs = native ? native_signs() : mlx_native_signs();
  const DHadamard d;
  const hn::RebindToUnsigned<DHadamard> du;
  for (uint32_t i = 0; i < head_dim; i += 4) {
    hn::Store(hn::Xor(hn::Load(d, x + i), hn::BitCast(d, hn::LoadU(du, signs.data() + i))), d,
              x + i);
  }
}

HWY_NOINLINE inline void TransformBlocks(uint32_t head_dim, float* x) {
  const DHadamard d;
  const abi::KvBlocks blocks = abi::kv_blocks(head_dim);
  for (uint32_t b = 0; b < blocks.count; ++b) {
    float* const block = x + blocks.begin[b];
    Hadamard(block, blocks.size[b]);
    const auto factor = hn::Set(d, 1.0f / std::sqrt(static_cast<float>(blocks.size[b])));
    for (uint32_t i = 0; i < blocks.size[b]; i += 4)
      hn::Store(hn::Mul(hn::Load(d, block + i), factor), d, block + i);
  }
}

HWY_INLINE void Rotate(uint32_t format, uint32_t head_dim, float* x) {
  if (!abi::kv_is_native(format) && !abi::kv_is_mlx_native(format)) return;
  FlipSigns(format, head_dim, x);
  TransformBlocks(head_dim, x);
}

HWY_INLINE void Restore(uint32_t format, uint32_t head_dim, float* x) {
  if (!abi::kv_is_native(format) && !abi::kv_is_mlx_native(format)) return;
  TransformBlocks(head_dim, x);
  FlipSigns(format, head_dim, x);
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
