#include "cuda/kernels.h"
#include "cuda/kernels/block_work.cuh"
#include "cuda/names.h"
#include "gyre/dtype.h"

namespace gyre::cuda {

std::string name_rope(uint64_t spec) {
  const auto s = spec_from_key<abi::RopeSpec>(spec);
  const std::string in = float_name(s.x_dtype), out = float_name(s.out_dtype);
  if (in.empty() || out.empty()) return {};
  return "gyre::cuda::rope<" + in + ", " + out + (s.adjacent != 0 ? ", true" : ", false") +
         (s.norm != 0 ? ", true>" : ", false>");
}

Launch launch_rope(const void* params, uint64_t spec, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::RopeParams*>(params);
  const auto bytes = static_cast<uint32_t>(
      size_bytes(static_cast<DType>(spec_from_key<abi::RopeSpec>(spec).x_dtype)));
  const RopeWork work(p, rope_lane_bits(p.head_dim, bytes));
  return {{static_cast<uint32_t>(divide_up(p.tokens, work.tokens)),
           static_cast<uint32_t>(divide_up(work.groups, work.items)), 1},
          kBlockThreads,
          rope_shared_bytes(p, work)};
}

}  // namespace gyre::cuda
