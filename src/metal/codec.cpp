// Grids of the kernels that code and decode rows.
#include <algorithm>

#include "metal/kernels.h"
#include "metal/kernels/encode_work.h"
#include "metal/kernels/tile_work.h"

namespace gyre::metal {
namespace {

constexpr uint32_t kSimdgroups = 4;  // of a group whose simdgroups have a row each

uint32_t groups(uint64_t items, uint64_t each) {
  return static_cast<uint32_t>(divide_up(items, each));
}

}  // namespace

Launch launch_hadamard(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::HadamardParams*>(params);
  const uint64_t rows = p.rows[0] * p.rows[1];
  if (p.head_dim <= abi::kKvMaxHeadDim)
    return {{groups(rows, kSimdgroups), 1, 1}, kSimdgroups * kLanes, 0};
  // A group to a row, a simdgroup to 1024 points.
  return {{groups(rows, 1), 1, 1},
          p.head_dim / abi::kKvMaxHeadDim * kLanes,
          static_cast<uint32_t>(p.head_dim * sizeof(float))};
}

Launch launch_write(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::WriteParams*>(params);
  const uint32_t bytes = tile_bytes(p), simdgroups = tile_simdgroups(bytes);
  return {{groups(write_tile_count(p), simdgroups), static_cast<uint32_t>(p.heads), p.streams},
          simdgroups * kLanes,
          simdgroups * bytes};
}

Launch launch_kv_dequantize(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvDequantizeParams*>(params);
  return {
      {groups(p.tokens, kSimdgroups), static_cast<uint32_t>(p.heads), 1}, kSimdgroups * kLanes, 0};
}

Launch launch_kv_feedback(const void* params, uint64_t spec) {
  const auto& p = *static_cast<const abi::KvFeedbackParams*>(params);
  const auto s = spec_from_key<abi::KvFeedbackSpec>(spec);
  uint32_t gains = 0, head_dim = 0;
  for (const abi::KvFeedbackStream& stream : p.stream) {
    if (stream.head_dim == 0) continue;
    gains = std::max(gains, stream.gains);
    head_dim = std::max(head_dim, stream.head_dim);
  }
  const uint32_t streams = (s.k_format != 0 ? 1 : 0) + (s.v_format != 0 ? 1 : 0);
  return {{groups(p.tokens, 1), static_cast<uint32_t>(p.heads), streams},
          encode_simdgroups(gains) * kLanes,
          encode_bytes(head_dim)};
}

Launch launch_kv_transform(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvTransformParams*>(params);
  return {{groups(p.tokens * p.group, kTransformRows), static_cast<uint32_t>(p.heads / p.group), 1},
          kTransformThreads,
          static_cast<uint32_t>(divide_up(kTransformRows * p.head_dim * sizeof(float), 16) * 16)};
}

}  // namespace gyre::metal
