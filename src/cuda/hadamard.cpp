#include "cuda/kernels.h"
#include "cuda/kernels/block_work.cuh"
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

}  // namespace gyre::cuda
