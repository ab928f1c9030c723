// Names and grids of kernels/kv_write.cu, and kv_page_copy's of cache.cu.
#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/kernels/block_work.cuh"
#include "cuda/names.h"

namespace gyre::cuda {

std::string name_kv_write(uint64_t spec) {
  const auto s = spec_from_key<abi::KvWriteSpec>(spec);
  const WriterSource source = writer_source(s.source_dtype, s.calibrated, s.k_format, s.v_format);
  const auto is_known = [](uint32_t format) {
    return is_dense(format) || abi::kv_is_compressed(format);
  };
  if (source.type.empty() || !is_known(s.k_format) || !is_known(s.v_format)) return {};
  if (s.slot_bytes != 4 && s.slot_bytes != 8) return {};
  const std::string slot = s.slot_bytes == 4 ? "int32_t" : "int64_t";
  if (s.lane_quads != 0) {
    const bool has_rows = s.calibrated == 0 && !abi::kv_is_mlx_native(s.k_format) &&
                          !abi::kv_is_mlx_native(s.v_format) && s.lane_quads <= 4;
    if (!has_rows) return {};
    return "gyre::cuda::kv_write_rows<" + source.type + ", " + std::to_string(s.k_format) + ", " +
           std::to_string(s.v_format) + ", " + slot + ", " + std::to_string(s.lane_quads) + ">";
  }
  return "gyre::cuda::kv_write<" + source.type + ", " + std::to_string(s.k_format) + ", " +
         std::to_string(s.v_format) + ", " + slot + source.suffix + ">";
}

Launch launch_kv_write(const void* params, uint64_t spec, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::KvWriteParams*>(params);
  if (spec_from_key<abi::KvWriteSpec>(spec).lane_quads != 0)
    return {{static_cast<uint32_t>(write_row_blocks(p)), 1, 1}, 32 * kWriteRows, 0};
  const uint64_t blocks = write_blocks(p, 0) + write_blocks(p, 1);
  const uint32_t shared = std::max(long_row_bytes(p.stream[0].cache.head_dim),
                                   long_row_bytes(p.stream[1].cache.head_dim));
  return {{static_cast<uint32_t>(blocks), 1, 1}, kBlockThreads, shared};
}

std::string name_kv_page_copy(uint64_t /*spec*/) { return "gyre::cuda::kv_page_copy"; }

Launch launch_kv_page_copy(const void* params, uint64_t /*spec*/, const CudaLimits& limits) {
  const auto& p = *static_cast<const abi::KvPageCopyParams*>(params);
  constexpr uint64_t kBlocksAtOnce = 8;
  const uint64_t most = std::max<uint64_t>(limits.multiprocessors * kBlocksAtOnce, 1);
  return {{static_cast<uint32_t>(std::min(p.count * page_copy_parts(p), most)), 1, 1},
          kBlockThreads,
          0};
}

}  // namespace gyre::cuda
