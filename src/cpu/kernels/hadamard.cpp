// hadamard on the CPU: a row is widened to f32, flipped, transformed, scaled and stored. A task is
// a share of the rows.
#include "abi/hadamard.h"

#include <bit>
#include <cmath>

#include "abi/kv_codec.h"
#include "cpu/kernels.h"
#include "cpu/kernels/kv_signs.h"
#include "cpu/kernels/select.h"
#include "gyre/quantize.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/hadamard.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/hadamard-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

constexpr uint32_t kMaxPoints = 8192;

inline const SignMasks* SignsOf(uint32_t signs) {
  switch (static_cast<HadamardSigns>(signs)) {
    case HadamardSigns::native:
      return &native_signs();
    case HadamardSigns::mlx_native:
      return &mlx_native_signs();
    default:
      return nullptr;
  }
}

void Flip(const SignMasks* signs, uint32_t count, float* y) {
  if (signs == nullptr) return;
  for (uint32_t i = 0; i < count; ++i) {
    y[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(y[i]) ^ (*signs)[i]);
  }
}

void TransformScaled(float* y, uint32_t n) {
  Hadamard(y, n);
  const float factor = 1.0f / std::sqrt(static_cast<float>(n));
  for (uint32_t i = 0; i < n; ++i) y[i] *= factor;
}

void TransformRow(const abi::HadamardParams& p, float* y) {
  const SignMasks* signs = SignsOf(p.signs);
  if (p.inverse == 0) Flip(signs, p.head_dim, y);
  if (std::has_single_bit(p.head_dim)) {
    TransformScaled(y, p.head_dim);
  } else {
    const abi::KvBlocks blocks = abi::kv_blocks(p.head_dim);
    for (uint32_t b = 0; b < blocks.count; ++b)
      TransformScaled(y + blocks.begin[b], blocks.size[b]);
  }
  if (p.inverse != 0) Flip(signs, p.head_dim, y);
}

template <class In, class Out>
void HadamardTask(const void* params, const uint64_t* args, uint32_t task,
                  uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::HadamardParams*>(params);
  alignas(64) float y[kMaxPoints];
  const Share share = share_of(p.rows[0] * p.rows[1], task, tasks);
  for (uint64_t row = share.begin; row < share.end; ++row) {
    const uint64_t outer = row / p.rows[1], inner = row % p.rows[1];
    CopyRow(pointer<const In>(args[0] + outer * p.x_stride[0] + inner * p.x_stride[1]), y,
            p.head_dim);
    TransformRow(p, y);
    CopyRow(static_cast<const float*>(y),
            pointer<Out>(args[1] + outer * p.out_stride[0] + inner * p.out_stride[1]), p.head_dim);
  }
}

TaskFn SelectHadamard(uint64_t key) {
  const auto spec = spec_from_key<abi::HadamardSpec>(key);
  return select_float(spec.x_dtype, [&](auto x) {
    return select_float(spec.out_dtype, [](auto out) -> TaskFn {
      return HadamardTask<decltype(x), decltype(out)>;
    });
  });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectHadamard);

TaskFn select_hadamard(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectHadamard)(spec); }

uint32_t hadamard_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kPointsPerTask = 16 << 10;  // some microseconds
  const auto& p = *static_cast<const abi::HadamardParams*>(params);
  const uint64_t rows = p.rows[0] * p.rows[1];
  return task_count(rows * p.head_dim / kPointsPerTask, rows);
}

}  // namespace gyre::cpu
#endif
