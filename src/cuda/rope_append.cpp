// Names and grids of kernels/rope_append.cu.
#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/kernels/block_work.cuh"
#include "cuda/names.h"
#include "gyre/dtype.h"

namespace gyre::cuda {
namespace {

const char* where_name(uint32_t slot_bytes) {
  if (slot_bytes == 0) return "gyre::abi::KvState";
  return slot_bytes == 4 ? "int32_t" : "int64_t";
}

}  // namespace

std::string name_rope_append(uint64_t spec) {
  const auto s = spec_from_key<abi::RopeAppendSpec>(spec);
  const std::string type = float_name(s.dtype);
  const auto is_known = [](uint32_t format) {
    return is_dense(format) || abi::kv_is_native(format);
  };
  if (type.empty() || !is_known(s.k_format) || !is_known(s.v_format)) return {};
  if (s.lane_quads == 0) return {};  // many: rope, then kv_append or kv_write, are as fast
  if (s.slot_bytes != 0 && s.slot_bytes != 4 && s.slot_bytes != 8) return {};
  const auto flag = [](uint32_t set) { return set != 0 ? ", true" : ", false"; };
  return "gyre::cuda::rope_append<" + type + ", " + std::to_string(s.k_format) + ", " +
         std::to_string(s.v_format) + flag(s.adjacent) + flag(s.norm) + ", " +
         where_name(s.slot_bytes) + ", " + std::to_string(s.lane_quads) + ">";
}

Launch launch_rope_append(const void* params, uint64_t spec, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::RopeAppendParams*>(params);
  const auto s = spec_from_key<abi::RopeAppendSpec>(spec);
  const auto bytes = static_cast<uint32_t>(size_bytes(static_cast<DType>(s.dtype)));
  const RopeAppendBlocks blocks(p, bytes);
  const uint64_t head_dim = p.rope.head_dim;
  uint32_t shared = kStoredRows * staged_stride(head_dim, bytes);
  if (blocks.q_x != 0)
    shared = std::max(
        shared, rope_shared_bytes(p.rope, RopeShare(p.rope, rope_lane_bits(head_dim, bytes))));
  const uint64_t grid = 2 * uint64_t{blocks.rows} + uint64_t{blocks.q_x} * blocks.q_y;
  return {{static_cast<uint32_t>(grid), 1, 1}, kBlockThreads, shared};
}

}  // namespace gyre::cuda
