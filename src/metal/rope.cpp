// Grids of rope and rope_append.
#include "metal/kernels.h"
#include "metal/kernels/rope_append_work.h"

namespace gyre::metal {

Launch launch_rope(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::RopeParams*>(params);
  uint64_t items = 0;
  for (uint32_t i = 0; i < p.streams; ++i) items += rope_items(p, p.stream[i]);
  return {{static_cast<uint32_t>(p.tokens),
           static_cast<uint32_t>(divide_up(items, kRopeSimdgroups)), 1},
          kRopeSimdgroups * kLanes,
          0};
}

Launch launch_rope_append(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::RopeAppendParams*>(params);
  const uint32_t bytes = rope_append_bytes(p), simdgroups = tile_simdgroups(bytes);
  uint64_t groups = 2 * p.rope.stream[1].heads * stored_groups(p, simdgroups);
  if (p.rope.streams != 0)
    groups += p.rope.tokens * divide_up(rope_items(p.rope, p.rope.stream[0]), simdgroups);
  return {{static_cast<uint32_t>(groups), 1, 1}, simdgroups * kLanes, simdgroups * bytes};
}

}  // namespace gyre::metal
