// kv_dequantize: see abi/kv_dequantize.h. y is the head, x tokens, one to a simdgroup.
#include "abi/kv_dequantize.h"
#include "metal/kernels/mlx_native_codes.h"
#include "metal/kernels/planes.h"

namespace gyre {
namespace metal {

// A slot of a cache as rotated coordinates. codes, scales: the tile's.
struct StoredRow {
  const device uchar* codes;
  const device uchar* scales;
  constant abi::KvCacheLayout* layout;
  uint format, slot;

  float norm(uint coordinate) const {
    constant abi::KvCacheLayout& cache = *layout;
    const ulong row = slot * (cache.scales_tile_stride / abi::kKvTile);
    const uint half_row = cache.head_dim == 512 ? coordinate / 256 : 0;
    return read_cache<float>(scales + row + 4 * half_row);
  }
  // Its bits where a float's exponent and mantissa are: the scale times 2^31.
  float raw_scale(uint coordinate) const {
    constant abi::KvCacheLayout& cache = *layout;
    const uint points = min(block_points(coordinate, cache.head_dim), abi::kKvScaleBlock);
    const uint number = scale_number(coordinate / points * points, cache.head_dim);
    const device uchar* const at = scales + 2 * (number * abi::kKvTile + slot);
    const uint bits = read_cache<uchar>(at) | static_cast<uint>(read_cache<uchar>(at + 1)) << 8;
    return as_type<float>(bits << 15);
  }
  float get(uint coordinate) const {
    constant abi::KvCacheLayout& cache = *layout;
    const uint code = stored_code(codes, cache, format, slot, coordinate);
    if (abi::kv_is_mlx_native(format)) return decode_mlx_native(cache, format, code, norm(coordinate));
    const float level = static_cast<float>(abi::kv_level(format, code)),
                raw = raw_scale(coordinate);
    // Exact unless the result is subnormal; then the bias comes off last.
    const float scale = raw * 0x1p-31f;
    return scale < 0x1p-126f ? level * raw * 0x1p-31f : level * scale;
  }
};

}  // namespace metal
}  // namespace gyre

kernel void kv_dequantize(constant gyre::abi::KvDequantizeParams& p [[buffer(0)]],
                          const device uchar* codes [[buffer(1)]],
                          const device uchar* scales [[buffer(2)]], device uchar* out [[buffer(3)]],
                          GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const ulong token = ulong(group.x) * (threads.x / kLanes) + simdgroup;
  if (token >= p.tokens) return;
  constant gyre::abi::KvCacheLayout& cache = p.cache;
  const ulong slot = p.first_slot + token, tile = slot / gyre::abi::kKvTile;
  const StoredRow from = {
      codes + group.y * cache.codes_head_stride + tile * cache.codes_tile_stride,
      scales + group.y * cache.scales_head_stride + tile * cache.scales_tile_stride, &cache,
      spec_byte(1), static_cast<uint>(slot % gyre::abi::kKvTile)};
  Row row;
  load_row(from, cache.head_dim, lane, row);
  if (p.rotated == 0) restore_row(row, from.format, cache.head_dim, lane);
  store_row(row, cache.head_dim, lane,
            out + token * p.out_token_stride + group.y * p.out_head_stride, spec_byte(0));
}
