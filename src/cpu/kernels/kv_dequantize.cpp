// kv_dequantize on the CPU. A task is an equal share of the tiles: 8 slots of one head.
#include "abi/kv_dequantize.h"

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/kv_dequantize.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/rotation-inl.h"
#include "cpu/kernels/unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

template <class Out>
void KvDequantize(const void* params, const uint64_t* args, uint32_t task,
                  uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::KvDequantizeParams*>(params);
  const uint64_t head_dim = p.cache.head_dim, last_slot = p.first_slot + p.tokens;
  const uint64_t first_tile = p.first_slot / abi::kKvTile;
  const uint64_t tiles = (last_slot + abi::kKvTile - 1) / abi::kKvTile - first_tile;
  alignas(64) float rows[abi::kKvTile * abi::kKvMaxHeadDim];
  const Share share = share_of(tiles * p.heads, task, tasks);
  for (uint64_t index = share.begin; index < share.end; ++index) {
    const uint64_t tile = first_tile + index / p.heads, head = index % p.heads;
    const uint64_t tile_slot = tile * abi::kKvTile;
    const Share slots{std::max(p.first_slot, tile_slot) - tile_slot,
                      std::min(last_slot, tile_slot + abi::kKvTile) - tile_slot};
    UnpackTile(p.cache,
               pointer<const uint8_t>(args[0]) + head * p.cache.codes_head_stride +
                   tile * p.cache.codes_tile_stride,
               pointer<const uint8_t>(args[1]) + head * p.cache.scales_head_stride +
                   tile * p.cache.scales_tile_stride,
               slots, rows);
    for (uint64_t slot = slots.begin; slot < slots.end; ++slot) {
      float* const row = rows + slot * head_dim;
      if (p.rotated == 0) Restore(p.cache.format, p.cache.head_dim, row);
      auto* out = pointer<std::byte>(args[2]) +
                  (tile_slot + slot - p.first_slot) * p.out_token_stride + head * p.out_head_stride;
      CopyRow(static_cast<const float*>(row), reinterpret_cast<Out*>(out), head_dim);
    }
  }
}

TaskFn SelectKvDequantize(uint64_t key) {
  return select_float(spec_from_key<abi::KvDequantizeSpec>(key).out_dtype,
                      [](auto out) -> TaskFn { return KvDequantize<decltype(out)>; });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectKvDequantize);

TaskFn select_kv_dequantize(uint64_t spec) {
  return HWY_DYNAMIC_DISPATCH(SelectKvDequantize)(spec);
}

uint32_t kv_dequantize_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kCoordinatesPerTask = 8 << 10;  // some microseconds
  const auto& p = *static_cast<const abi::KvDequantizeParams*>(params);
  const uint64_t rows = p.tokens * p.heads;
  const uint64_t tiles = (rows + abi::kKvTile - 1) / abi::kKvTile;
  return task_count(rows * p.cache.head_dim / kCoordinatesPerTask, tiles);
}

}  // namespace gyre::cpu
#endif
