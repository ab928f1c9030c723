// Names and grids of the kernels that code and decode rows: hadamard.cu, kv_dequantize.cu,
// kv_feedback.cu and kv_transform.cu.
#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/kernels/encode_work.cuh"
#include "cuda/names.h"

namespace gyre::cuda {

std::string name_hadamard(uint64_t spec) {
  const auto s = spec_from_key<abi::HadamardSpec>(spec);
  const std::string in = float_name(s.x_dtype), out = float_name(s.out_dtype);
  if (in.empty() || out.empty()) return {};
  return "gyre::cuda::hadamard<" + in + ", " + out + ">";
}

Launch launch_hadamard(const void* params, uint64_t /*spec*/, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::HadamardParams*>(params);
  const uint64_t rows = p.rows[0] * p.rows[1];
  const bool in_shared = p.head_dim > abi::kKvMaxHeadDim;
  const uint64_t each =
      in_shared ? 1 : (p.head_dim < kChunk ? kBlockThreads : rows_per_block(p.head_dim));
  return {{static_cast<uint32_t>(divide_up(rows, each)), 1, 1},
          kBlockThreads,
          in_shared ? static_cast<uint32_t>(p.head_dim * sizeof(float)) : 0};
}

std::string name_kv_dequantize(uint64_t spec) {
  const auto s = spec_from_key<abi::KvDequantizeSpec>(spec);
  const std::string out = float_name(s.out_dtype);
  if (out.empty() || !abi::kv_is_compressed(s.format)) return {};
  return "gyre::cuda::kv_dequantize<" + out + ", " + std::to_string(s.format) + ">";
}

Launch launch_kv_dequantize(const void* params, uint64_t /*spec*/, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::KvDequantizeParams*>(params);
  const uint64_t tiles =
      divide_up(p.first_slot + p.tokens, abi::kKvTile) - p.first_slot / abi::kKvTile;
  const uint64_t rows = tiles * abi::kKvTile * p.heads;
  return {{static_cast<uint32_t>(divide_up(rows, rows_per_block(p.cache.head_dim))), 1, 1},
          kBlockThreads,
          0};
}

std::string name_kv_feedback(uint64_t spec) {
  const auto s = spec_from_key<abi::KvFeedbackSpec>(spec);
  const std::string source = float_name(s.source_dtype);
  // 0: that stream is not there.
  const bool is_known = (s.k_format == 0 || abi::kv_is_native(s.k_format)) &&
                        (s.v_format == 0 || abi::kv_is_native(s.v_format));
  if (source.empty() || !is_known || s.k_format + s.v_format == 0) return {};
  return "gyre::cuda::kv_feedback<" + source + ", " + std::to_string(s.k_format) + ", " +
         std::to_string(s.v_format) + ">";
}

namespace {

// The most rows of a tile that fit; 0: none.
uint32_t tile_rows_within(const abi::KvFeedbackParams& p, uint32_t bytes) {
  uint32_t rows = kEncodeMaxTileRows;
  while (rows >= kEncodeLeastTileRows && encode_tile_bytes(p, rows) > bytes) rows /= 2;
  return rows >= kEncodeLeastTileRows ? rows : 0;
}

// Rows of a tile for one block or for two side by side, whichever takes more at a time.
uint32_t tile_rows(const abi::KvFeedbackParams& p, const CudaLimits& limits) {
  constexpr uint32_t kFixed = 1024, kReserved = 1024;  // in the kernel's text, by the driver
  const auto less = [](uint32_t bytes, uint32_t by) { return bytes > by ? bytes - by : 0; };
  const uint32_t one = tile_rows_within(p, less(limits.shared_bytes_per_block, kFixed));
  const uint32_t two =
      tile_rows_within(p, less(limits.shared_bytes_per_multiprocessor / 2, kFixed + kReserved));
  return std::max(2 * two >= one ? two : one, kEncodeLeastTileRows);
}

}  // namespace

Launch launch_kv_feedback(const void* params, uint64_t /*spec*/, const CudaLimits& limits) {
  const auto& p = *static_cast<const abi::KvFeedbackParams*>(params);
  if (encode_takes_tiles(p)) {
    const uint32_t rows = tile_rows(p, limits);
    return {{static_cast<uint32_t>(encode_blocks(p, 0, rows) + encode_blocks(p, 1, rows)), 1, 1},
            rows * kEncodeRowThreads,
            encode_tile_bytes(p, rows)};
  }
  uint32_t threads = 0;
  for (const abi::KvFeedbackStream& s : p.stream) {
    if (s.head_dim != 0) threads = std::max(threads, encode_threads(s));
  }
  return {{static_cast<uint32_t>(encode_blocks(p, 0, 0) + encode_blocks(p, 1, 0)), 1, 1},
          threads,
          sizeof(EncodeShared)};
}

std::string name_kv_transform(uint64_t spec) {
  const auto s = spec_from_key<abi::KvTransformSpec>(spec);
  const std::string x = float_name(s.x_dtype), out = float_name(s.out_dtype);
  if (x.empty() || out.empty()) return {};
  return "gyre::cuda::kv_transform<" + x + ", " + out + ">";
}

Launch launch_kv_transform(const void* params, uint64_t /*spec*/, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::KvTransformParams*>(params);
  const TransformShape shape = transform_shape(p);
  const uint32_t each =
      transform_block_rows(transform_lanes(p.head_dim, shape.columns), shape.rows);
  return {{static_cast<uint32_t>(divide_up(p.tokens * p.group, each)),
           static_cast<uint32_t>(p.heads / p.group), 1},
          kBlockThreads,
          transform_shared_bytes(p.head_dim, each, shape.rows == 1)};
}

}  // namespace gyre::cuda
