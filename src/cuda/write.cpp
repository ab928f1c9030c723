// Names and grids of the writers: kernels/write.cu and kernels/rope_append.cu.
#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/kernels/block_work.cuh"
#include "cuda/names.h"
#include "gyre/dtype.h"

namespace gyre::cuda {
namespace {

bool is_known(uint32_t format) { return is_dense(format) || abi::kv_is_compressed(format); }
bool is_in_rows(uint32_t format) { return is_dense(format) || abi::kv_is_native(format); }
std::string slot_name(uint32_t slot_bytes) { return slot_bytes == 4 ? "int32_t" : "int64_t"; }

template <class Spec>
std::string formats(const Spec& s) {
  return ", " + std::to_string(s.k_format) + ", " + std::to_string(s.v_format);
}

}  // namespace

std::string name_kv_quantize(uint64_t spec) {
  const auto s = spec_from_key<abi::WriteSpec>(spec);
  const WriterSource source = writer_source(s);
  // 0: that half of the cache is not written.
  const bool is_stored = (s.k_format == 0 || abi::kv_is_compressed(s.k_format)) &&
                         (s.v_format == 0 || abi::kv_is_compressed(s.v_format));
  if (source.type.empty() || !is_stored || s.k_format + s.v_format == 0) return {};
  return "gyre::cuda::kv_quantize<" + source.type + formats(s) + source.suffix + ">";
}

std::string name_kv_append(uint64_t spec) {
  const auto s = spec_from_key<abi::WriteSpec>(spec);
  const WriterSource source = writer_source(s);
  if (source.type.empty() || !is_known(s.k_format) || !is_known(s.v_format)) return {};
  return "gyre::cuda::kv_append<" + source.type + formats(s) + source.suffix + ">";
}

std::string name_kv_write(uint64_t spec) {
  const auto s = spec_from_key<abi::WriteSpec>(spec);
  const WriterSource source = writer_source(s);
  if (source.type.empty() || !is_known(s.k_format) || !is_known(s.v_format)) return {};
  if (s.slot_bytes != 4 && s.slot_bytes != 8) return {};
  const std::string slot = ", " + slot_name(s.slot_bytes);
  if (s.lane_quads == 0)
    return "gyre::cuda::kv_write<" + source.type + formats(s) + slot + source.suffix + ">";
  const bool has_rows =
      s.calibrated == 0 && is_in_rows(s.k_format) && is_in_rows(s.v_format) && s.lane_quads <= 4;
  if (!has_rows) return {};
  return "gyre::cuda::kv_write_rows<" + source.type + formats(s) + slot + ", " +
         std::to_string(s.lane_quads) + ">";
}

Launch launch_write(const void* params, uint64_t spec, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::WriteParams*>(params);
  if (spec_from_key<abi::WriteSpec>(spec).lane_quads != 0)
    return {{static_cast<uint32_t>(write_row_blocks(p)), 1, 1}, 32 * kWriteRows, 0};
  uint64_t blocks = p.where == abi::kWriteState ? append_f16_blocks(p) : 0;
  uint32_t shared = 0;
  for (uint32_t i = p.first_stream; i < p.first_stream + p.streams; ++i) {
    blocks += write_blocks(p, i, write_tile_count(p.where, p));
    shared = std::max(shared, long_row_bytes(p.stream[i].cache.head_dim));
  }
  return {{static_cast<uint32_t>(blocks), 1, 1}, kBlockThreads, shared};
}

std::string name_rope_append(uint64_t spec) {
  const auto s = spec_from_key<abi::RopeAppendSpec>(spec);
  const std::string type = float_name(s.dtype);
  // Many tokens: rope, then kv_append or kv_write, are as fast.
  const bool has_rows = s.lane_quads != 0 && is_in_rows(s.k_format) && is_in_rows(s.v_format);
  const bool is_slot = s.slot_bytes == 0 || s.slot_bytes == 4 || s.slot_bytes == 8;
  if (type.empty() || !has_rows || !is_slot) return {};
  const auto flag = [](uint32_t set) { return set != 0 ? ", true" : ", false"; };
  return "gyre::cuda::rope_append<" + type + formats(s) + flag(s.adjacent) + flag(s.norm) + ", " +
         (s.slot_bytes == 0 ? "gyre::abi::KvState" : slot_name(s.slot_bytes)) + ", " +
         std::to_string(s.lane_quads) + ">";
}

Launch launch_rope_append(const void* params, uint64_t spec, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::RopeAppendParams*>(params);
  const auto s = spec_from_key<abi::RopeAppendSpec>(spec);
  const auto bytes = static_cast<uint32_t>(size_bytes(static_cast<DType>(s.dtype)));
  const RopeAppendBlocks blocks(p, bytes);
  const uint64_t head_dim = p.rope.head_dim;
  uint32_t shared = kStoredRows * staged_stride(head_dim, bytes);
  if (blocks.q_x != 0)
    shared = std::max(shared,
                      rope_shared_bytes(p.rope, RopeWork(p.rope, rope_lane_bits(head_dim, bytes))));
  const uint64_t grid = 2 * uint64_t{blocks.rows} + uint64_t{blocks.q_x} * blocks.q_y;
  return {{static_cast<uint32_t>(grid), 1, 1}, kBlockThreads, shared};
}

}  // namespace gyre::cuda
