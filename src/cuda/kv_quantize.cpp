#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/kernels/block_work.cuh"
#include "cuda/names.h"

namespace gyre::cuda {

std::string name_kv_quantize(uint64_t spec) {
  const auto s = spec_from_key<abi::KvQuantizeSpec>(spec);
  const WriterSource source = writer_source(s.source_dtype, s.calibrated, s.k_format, s.v_format);
  // 0: that half of the cache is not written.
  const bool is_known = (s.k_format == 0 || abi::kv_is_compressed(s.k_format)) &&
                        (s.v_format == 0 || abi::kv_is_compressed(s.v_format));
  if (source.type.empty() || !is_known || s.k_format + s.v_format == 0) return {};
  return "gyre::cuda::kv_quantize<" + source.type + ", " + std::to_string(s.k_format) + ", " +
         std::to_string(s.v_format) + source.suffix + ">";
}

Launch launch_kv_quantize(const void* params, uint64_t /*spec*/, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::KvQuantizeParams*>(params);
  uint64_t blocks = 0;
  uint32_t shared = 0;
  for (uint32_t i = p.first_stream; i < p.first_stream + p.streams; ++i) {
    const uint32_t head_dim = p.stream[i].cache.head_dim;
    blocks += quantize_blocks(p, i);
    shared = std::max(shared, long_row_bytes(head_dim));
  }
  return {{static_cast<uint32_t>(blocks), 1, 1}, kBlockThreads, shared};
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

}  // namespace gyre::cuda
