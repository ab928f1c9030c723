// kv_quantize and kv_dequantize on the CPU. A task is an equal share of the work tiles: 8 slots of
// one head of K or V (kv_tile-inl.h).
#include "abi/kv_quantize.h"

#include <algorithm>

#include "abi/kv_codec.h"
#include "abi/kv_dequantize.h"
#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/kv_quantize.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/kv_tile-inl.h"
#include "cpu/kernels/rotation-inl.h"
#include "cpu/kernels/unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// Work tile `index`. Heads come before tiles: a token's heads usually lie together in memory.
inline KvTileJob FindTile(const abi::KvQuantizeParams& p, const uint64_t* args, uint64_t index) {
  const uint64_t head = index % p.heads;
  const uint64_t tile = (p.first_tile + index / p.heads % p.tiles) % p.all_tiles;
  KvTileJob job;
  job.stream = p.first_stream + index / p.heads / p.tiles;
  const abi::KvQuantizeStream& s = p.stream[job.stream];
  const uint64_t* const stream_args = args + 3 * job.stream;
  job.codes = pointer<uint8_t>(stream_args[1]) + head * s.cache.codes_head_stride +
              tile * s.cache.codes_tile_stride;
  job.scales = pointer<uint8_t>(stream_args[2]) + head * s.cache.scales_head_stride +
               tile * s.cache.scales_tile_stride;
  for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
    const uint64_t at = tile * abi::kKvTile + slot;
    if (at >= p.capacity) break;
    const uint64_t token = at >= p.first_slot ? at - p.first_slot : at + p.capacity - p.first_slot;
    if (token >= p.tokens) continue;
    job.mask |= 1u << slot;
    job.source[slot] = pointer<const std::byte>(stream_args[0]) + token * s.source_token_stride +
                       head * s.source_head_stride;
  }
  return job;
}

template <class Source, uint32_t kCalibrated>
void KvQuantize(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::KvQuantizeParams*>(params);
  const KvHead heads[2] = {MakeHead(p.stream[0].cache), MakeHead(p.stream[1].cache)};
  KvScratch scratch;
  scratch.facts.Clear(std::max(heads[0].scales.count, heads[1].scales.count));
  const Share share = share_of(p.streams * p.heads * p.tiles, task, tasks);
  KvTileJob next;
  if (share.begin < share.end) {
    next = FindTile(p, args, share.begin);
    for (const std::byte* row : next.source) {
      PrefetchRow<Source>(row, p.stream[next.stream].cache.head_dim);
    }
  }
  for (uint64_t index = share.begin; index < share.end; ++index) {
    KvTileJob job = next;
    if (index + 1 < share.end) next = FindTile(p, args, index + 1);
    for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) job.next[slot] = next.source[slot];
    job.head = &heads[job.stream];
    WriteTile<Source, kCalibrated>(p.stream[job.stream].cache, job, scratch);
  }
}

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

TaskFn SelectKvQuantize(uint64_t key) {
  const auto spec = spec_from_key<abi::KvQuantizeSpec>(key);
  return select_source(spec.source_dtype, spec.calibrated,
                       [](auto source, auto calibrated) -> TaskFn {
                         return KvQuantize<decltype(source), decltype(calibrated)::value>;
                       });
}

TaskFn SelectKvDequantize(uint64_t key) {
  return select_float(spec_from_key<abi::KvDequantizeSpec>(key).out_dtype,
                      [](auto out) -> TaskFn { return KvDequantize<decltype(out)>; });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectKvQuantize);
HWY_EXPORT(SelectKvDequantize);

TaskFn select_kv_quantize(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectKvQuantize)(spec); }
TaskFn select_kv_dequantize(uint64_t spec) {
  return HWY_DYNAMIC_DISPATCH(SelectKvDequantize)(spec);
}

namespace {
constexpr uint64_t kCoordinatesPerTask = 8 << 10;  // some microseconds
}  // namespace

uint32_t kv_quantize_tasks(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvQuantizeParams*>(params);
  const uint64_t tiles = p.streams * p.heads * p.tiles;
  const uint64_t head_dims = uint64_t{p.stream[0].cache.head_dim} + p.stream[1].cache.head_dim;
  const uint64_t coordinates = p.heads * p.tokens * head_dims;  // 0 for a stream that is not there
  return task_count(coordinates / kCoordinatesPerTask, tiles);
}

uint32_t kv_dequantize_tasks(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvDequantizeParams*>(params);
  const uint64_t rows = p.tokens * p.heads;
  const uint64_t tiles = (rows + abi::kKvTile - 1) / abi::kKvTile;
  return task_count(rows * p.cache.head_dim / kCoordinatesPerTask, tiles);
}

}  // namespace gyre::cpu
#endif
