#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/kernels/block_work.cuh"
#include "cuda/names.h"

namespace gyre::cuda {

std::string name_kv_append(uint64_t spec) {
  const auto s = spec_from_key<abi::KvAppendSpec>(spec);
  const WriterSource source = writer_source(s.source_dtype, s.calibrated, s.k_format, s.v_format);
  const auto is_known = [](uint32_t format) {
    return is_dense(format) || abi::kv_is_compressed(format);
  };
  if (source.type.empty() || !is_known(s.k_format) || !is_known(s.v_format)) return {};
  return "gyre::cuda::kv_append<" + source.type + ", " + std::to_string(s.k_format) + ", " +
         std::to_string(s.v_format) + source.suffix + ">";
}

Launch launch_kv_append(const void* params, uint64_t /*spec*/, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::KvAppendParams*>(params);
  const uint64_t blocks =
      append_body_blocks(p, 0) + append_body_blocks(p, 1) + append_near_blocks(p);
  const uint32_t shared = std::max(long_row_bytes(p.stream[0].body.head_dim),
                                   long_row_bytes(p.stream[1].body.head_dim));
  return {{static_cast<uint32_t>(blocks), 1, 1}, kBlockThreads, shared};
}

}  // namespace gyre::cuda
