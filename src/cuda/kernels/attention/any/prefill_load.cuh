#pragma once
// Prefill attention: K and V of a stage to shared memory, as they are stored, while earlier stages
// are worked on.
#include "cuda/kernels/attention/any/prefill_problem.cuh"

namespace gyre::cuda {

struct RowCopy {
  const uint8_t* from;
  uint64_t stride;  // of a tile
  uint64_t slot_stride;
  uint32_t slots;  // rows in a tile: 8, or 1 for whole tiles
  uint32_t rows, bytes, pitch;
  bool exact;  // rows without a key become zeros, and are never read
};

// Lanes per row, as a power of two, and the lane's share.
struct RowLanes {
  uint32_t shift, lane;
  explicit RowLanes(uint32_t chunks)
      : shift(chunks <= 1 ? 0 : (chunks > 16 ? 5 : 32 - __clz(static_cast<int>(chunks - 1)))),
        lane(threadIdx.x & ((1u << shift) - 1)) {}
};

// Tiles of a walk, one behind the other or in pages.
struct CacheTiles {
  const abi::KvWalk<uint64_t>& walk;

  bool has(uint64_t index) const { return index < walk.tiles; }
  uint64_t offset(uint64_t index, uint64_t stride) const { return walk.tile(index) * stride; }
};
struct PoolTiles {
  const PrefillProblem& problem;
  const abi::KvWalk<uint64_t>& walk;

  // Those before the first key may have no page.
  bool has(uint64_t index) const {
    return index < walk.tiles && (index + 1) * abi::kKvTile > walk.skip;
  }
  uint64_t offset(uint64_t index, uint64_t stride) const {
    const PrefillProblem::TileAt at = problem.page_tile(index);
    return at.offset + at.tile * stride;
  }
};

// Rows of a stage, `kUnit` bytes at a time.
template <uint32_t kUnit, class Tiles>
inline void copy_rows(const RowCopy& c, const Tiles& tiles, uint64_t first_tile,
                      unsigned char* to) {
  const uint32_t chunks = c.bytes / kUnit;
  const RowLanes by(chunks);
#pragma unroll 1
  for (uint32_t row = threadIdx.x >> by.shift; row < c.rows; row += blockDim.x >> by.shift) {
    const uint64_t index = first_tile + row / c.slots;
    const uint32_t slot = row % c.slots;
    const bool present =
        tiles.has(index) && (!c.exact || tiles.walk.valid(index * abi::kKvTile + slot));
    if (!present && !c.exact) continue;
    const uint8_t* const source =
        present ? c.from + tiles.offset(index, c.stride) + slot * c.slot_stride : c.from;
    unsigned char* const target = to + row * c.pitch;
#pragma unroll 1
    for (uint32_t chunk = by.lane; chunk < chunks; chunk += 1u << by.shift) {
      if constexpr (kUnit == 1) {
        target[chunk] = present ? source[chunk] : 0;
      } else {
        copy_async<kUnit>(shared_address(target + chunk * kUnit),
                          source + (present ? chunk * kUnit : 0), present);
      }
    }
  }
}

// Every row holds a key, in consecutive slots.
inline void copy_whole(const RowCopy& c, uint64_t offset, unsigned char* to) {
  const uint32_t chunks = c.bytes / 16;
  const RowLanes by(chunks);
  const uint32_t first = threadIdx.x >> by.shift, step = blockDim.x >> by.shift;
  const uint64_t stride = c.slots == 1 ? c.stride : c.slot_stride, jump = step * stride;
  const uint8_t* from = c.from + offset + first * stride;
  to += first * c.pitch;
#pragma unroll 2
  for (uint32_t row = first; row < c.rows; row += step, from += jump, to += step * c.pitch) {
#pragma unroll 1
    for (uint32_t chunk = by.lane; chunk < chunks; chunk += 1u << by.shift)
      copy_async<16>(shared_address(to + chunk * 16), from + chunk * 16, true);
  }
}

// `together`: a stage's tiles lie side by side if all of them hold keys.
template <class Tiles>
inline void copy_rows_any(const RowCopy& c, const Tiles& tiles, bool together, uint64_t first_tile,
                          unsigned char* to) {
  const uint64_t all =
      reinterpret_cast<uint64_t>(c.from) | c.stride | c.slot_stride | uint64_t{c.bytes};
  if (all % 16 == 0 && together && tiles.walk.whole(first_tile * abi::kKvTile)) {
    copy_whole(c, tiles.offset(first_tile, c.stride), to);
  } else if (all % 16 == 0) {
    copy_rows<16>(c, tiles, first_tile, to);
  } else if (all % 4 == 0) {
    copy_rows<4>(c, tiles, first_tile, to);
  } else {
    copy_rows<1>(c, tiles, first_tile, to);
  }
}

template <uint32_t kFormat, bool kValues>
inline RowCopy codes_copy(const PrefillProblem& problem, const abi::KvCacheLayout& layout) {
  const uint8_t* const from = kValues ? problem.v_codes : problem.k_codes;
  const uint32_t pitch = kValues ? problem.layout.v_pitch : problem.layout.k_pitch;
  const uint64_t tile = layout.codes_tile_stride;
  if constexpr (kValues && abi::kv_is_native(kFormat)) {
    const uint32_t tiles = problem.layout.stage_keys / abi::kKvTile;
    return {from, tile, 0, 1, tiles, layout.head_dim * abi::kv_bits(kFormat), pitch, false};
  }
  constexpr bool kNative = abi::kv_is_native(kFormat);
  const uint32_t bytes =
      kNative ? layout.head_dim * abi::kv_bits(kFormat) / 8 : layout.head_dim * 2;
  const uint64_t slot = tile / abi::kKvTile;
  return {from, tile, slot, abi::kKvTile, problem.layout.stage_keys, bytes, pitch, !kNative};
}

// The loads of a stage, whichever of K and V are staged at all.
template <uint32_t kK, uint32_t kV, class Tiles>
inline void copy_stage(const PrefillProblem& problem, const Tiles& all, bool together,
                       uint64_t first, unsigned char* to) {
  const abi::AttentionParams& p = problem.params;
  const uint32_t tiles = problem.layout.stage_keys / abi::kKvTile;
  const auto scales = [&](const uint8_t* from, uint64_t stride, uint32_t blocks, uint32_t at) {
    copy_rows_any({from, stride, 0, 1, tiles, blocks * 16, blocks * 16, false}, all, together,
                  first, to + at);
  };
  if constexpr (is_staged(kK))
    copy_rows_any(codes_copy<kK, false>(problem, p.k), all, together, first, to);
  if constexpr (abi::kv_is_native(kK))
    scales(problem.k_scales, p.k.scales_tile_stride, problem.layout.k_blocks,
           problem.layout.k_scales);
  if constexpr (is_staged(kV))
    copy_rows_any(codes_copy<kV, true>(problem, p.v), all, together, first,
                  to + problem.layout.v_codes);
  if constexpr (abi::kv_is_native(kV))
    scales(problem.v_scales, p.v.scales_tile_stride, problem.layout.v_blocks,
           problem.layout.v_scales);
}

// Over pages. A function of its own: NVRTC would spend minutes on one with both.
template <uint32_t kK, uint32_t kV>
__noinline__ void copy_paged_stage(uint32_t index) {
  const PrefillProblem& problem = PrefillProblem::of_block();
  // Stages begin at multiples: in one page if pages do, too.
  const bool together = problem.params.table.page_tokens % problem.layout.stage_keys == 0;
  copy_stage<kK, kV>(problem, PoolTiles{problem, problem.walk}, together,
                     uint64_t{index} * (problem.layout.stage_keys / abi::kKvTile),
                     problem.stage(index));
}

// Issues the loads of a stage, if there is one.
template <uint32_t kK, uint32_t kV>
inline void load_stage(const PrefillProblem& problem, uint32_t index) {
  const uint64_t first = uint64_t{index} * (problem.layout.stage_keys / abi::kKvTile);
  if (first < problem.walk.tiles) {
    if (problem.paged()) {
      copy_paged_stage<kK, kV>(index);
    } else {
      copy_stage<kK, kV>(problem, CacheTiles{problem.walk}, true, first, problem.stage(index));
    }
  }
  copy_commit();
}

inline void wait_for_load(uint32_t stages) {
  if (stages == 3) {
    copy_wait<1>();
  } else {
    copy_wait<0>();
  }
}

}  // namespace gyre::cuda
