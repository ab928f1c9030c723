#pragma once
// Decode attention: the shared-memory layout of a block, and how many warps and stages it has. Host
// and kernel compute the same.
#include "abi/attention_schedule.h"
#include "cuda/kernels/attention/common/formats.cuh"

namespace gyre::cuda {

constexpr uint32_t kDecodeRows = 16;  // of a KV head, that a block takes at most
constexpr uint32_t kDecodeCluster = 8, kDecodePair = 2;
// In place of a cluster's size: keys in pages, no clusters, and blocks that go on to further work.
constexpr uint32_t kDecodePages = 0;

// A merged call's scratch begins with a counter for each row; the partials of clusters follow.
constexpr uint64_t kDecodeCounters = abi::kScratchCounterBytes / 4;

// Coordinates of a key and of a value.
struct HeadDims {
  uint32_t k, v;

  constexpr HeadDims(uint32_t dim) : k(dim), v(dim) {}  // NOLINT: one number mostly
  constexpr HeadDims(uint32_t of_k, uint32_t of_v) : k(of_k), v(of_v) {}
};

// Rows that a block takes at most; a KV head's other rows go to further blocks. An MMA over
// levels of V takes four rows, others take eight; the sums, and the weights of all scale blocks,
// must fit into registers.
constexpr uint64_t decode_block_rows(uint32_t v_format, uint64_t head_dim, uint64_t rows) {
  if (!abi::kv_is_native(v_format)) return rows <= 8 ? 8 : 16;
  const bool few = head_dim > 256 || count_scale_blocks(static_cast<uint32_t>(head_dim)) > 2;
  const uint64_t wanted = (rows + 3) / 4 * 4, limit = few ? 8 : 2048 / head_dim / 4 * 4;
  return wanted < limit ? wanted : limit;
}

// Bits of one code in a format's first and second plane; 16-bit floats are one plane.
constexpr uint32_t decode_plane_bits(uint32_t format, uint32_t plane) {
  if (is_float16_format(format)) return plane == 0 ? 16 : 0;
  return plane == 0 ? abi::kv_low_bits(format) : abi::kv_high_bits(format);
}

// A warp holds all coordinates of its keys up to head_dim 256. Stages of longer keys would leave
// shared memory for few warps only: neighbouring warps share a key, a slice of 128 coordinates
// each.
constexpr uint32_t decode_slice_dim(uint32_t head_dim) { return head_dim <= 256 ? head_dim : 128; }
constexpr uint32_t decode_warps_per_key(const HeadDims& dims) {
  return dims.v / decode_slice_dim(dims.v);
}
// The kernel has these, and multiples of 16 up to 256.
constexpr bool has_decode_dim(uint32_t dim) {
  return dim == 512 || (dim >= 32 && dim <= 256 && dim % 16 == 0);
}
// One scale block, and planes in whole groups of 16 bytes.
constexpr bool is_round_dim(uint32_t dim) {
  return dim == 64 || dim == 128 || dim == 256 || dim == 512;
}
// Coordinates of a row of sums while partial states are merged: whole vectors of every lane.
constexpr uint32_t decode_row_dim(uint32_t v_dim) {
  return v_dim <= 64 ? 64 : round_up(v_dim, 128);
}

// Levels go to shared memory plane by plane, rows of K reordered for the MMA, where dims are round.
// Elsewhere rows of K are no multiple of 16 bytes: whole tiles go as they are stored.
constexpr bool has_k_tiles(uint32_t k, uint32_t dim) {
  if (!abi::kv_is_native(k)) return false;
  return !is_round_dim(dim) || dim * abi::kv_low_bits(k) % 128 != 0 ||
         dim * abi::kv_high_bits(k) % 128 != 0;
}
constexpr bool has_v_tiles(uint32_t v, uint32_t dim) {
  return abi::kv_is_native(v) && !is_round_dim(dim);
}
// An MMA over levels takes 32 coordinates of K, eight from each of four lanes, for each scale block
// that has some of them.
constexpr uint32_t decode_key_steps(uint32_t dim) { return (dim + 31) / 32; }

// Tiles are padded so that what a warp reads at once lies in different banks: two neighbouring rows
// of each of four tiles (K), or eight coordinates of each of four tiles (V).
struct DecodePlane {
  uint32_t bytes;          // of a row (K, 16-bit V) or a tile (V in levels), of one slice
  uint32_t source_offset;  // of the plane's first slice in the stored row or tile
  uint32_t tile_pitch;     // bytes from tile to tile
  uint32_t offset;         // in the stage
  uint32_t row_pitch;      // bytes from row to row
};

// One stage: the bytes of the keys that a warp takes at a time.
struct DecodeStage {
  bool fits;                    // the kernel can work on these formats and this head dim
  uint32_t keys, tiles;         // of a stage
  uint32_t k_blocks, v_blocks;  // scale blocks; a warp holds the scales of all of them
  DecodePlane k[2], v[2];
  uint32_t k_row, v_tile;  // bytes of a stored row of K and tile of V, of levels
  bool k_tiles, v_tiles;   // see has_k_tiles; bytes of k[0] and v[0] are then those of a tile
  uint32_t k_scales, v_scales, bytes;
};

// Bits of one key's levels in a warp, K and V; 0 where they are not both levels.
constexpr uint32_t decode_bits(uint32_t k, uint32_t v, const HeadDims& dims) {
  const bool levels = abi::kv_is_native(k) && abi::kv_is_native(v);
  return levels ? decode_slice_dim(dims.k) * abi::kv_bits(k) +
                      decode_slice_dim(dims.v) * abi::kv_bits(v)
                : 0;
}
// Measured: eight warps with many registers each beat more warps with fewer, except around tq3 and
// tq4 at head_dim 128. Splits in a cluster of eight are short: there, twelve warps lose.
constexpr bool decode_twelve_warps(uint32_t k, uint32_t v, const HeadDims& dims, uint32_t rows,
                                   uint32_t cluster) {
  const uint32_t bits = decode_bits(k, v, dims);
  return cluster != kDecodePages && dims.k == 128 && dims.v == 128 && rows == 4 &&
         cluster < kDecodeCluster && bits >= 768 && bits <= 1024;
}

// An MMA over 16-bit values takes 16 keys, one over levels 32: a tile for each of four lanes. Two
// such MMAs per stage wait less but keep twice the bytes in flight; measured, that pays for small
// keys, for tq8 with tq4 where splits are long, and where warps that share keys wait for each
// other.
constexpr uint32_t decode_keys(uint32_t k, uint32_t v, const HeadDims& dims, uint32_t rows,
                               uint32_t cluster) {
  if (!abi::kv_is_native(v)) return 16;
  const uint32_t bits = decode_bits(k, v, dims), max_dim = dims.k > dims.v ? dims.k : dims.v;
  const bool alone = decode_warps_per_key(dims) == 1;
  const bool many_blocks = count_scale_blocks(dims.k) > 2 || count_scale_blocks(dims.v) > 2;
  if (bits == 0 || many_blocks || (alone && max_dim > 128) || rows != 4 ||
      decode_twelve_warps(k, v, dims, rows, cluster))
    return 32;
  if (!alone) return bits <= 1024 ? 64 : 32;
  const bool long_splits = cluster != kDecodePages && cluster < kDecodeCluster;
  return bits <= 768 || (bits == 1536 && max_dim == 128 && long_splits) ? 64 : 32;
}

// Bytes from tile to tile of K as it is stored. A warp reads 16 bytes at a time of eight rows: rows
// 0 and 2, or 0 and 4, of four tiles, or rows 0, 2, 4, 6 of two. As few as possible of them lie in
// the same banks.
constexpr uint32_t decode_k_pitch(uint32_t row, uint32_t v_format) {
  const bool two = !abi::kv_is_native(v_format);
  const uint32_t distance = two || abi::kv_has_magnitudes(v_format) ? 2 * row : 4 * row;
  uint32_t best = 0, least = ~0u;
  for (uint32_t pad = 0; pad < 128; pad += 16) {
    uint32_t starts[8] = {}, shared = 0;
    for (uint32_t g = 0; g < 8; ++g) {
      const uint32_t tile = two ? g / 4 : g / 2, place = two ? g % 4 : g % 2;
      starts[g] = (tile * (8 * row + pad) + place * distance) % 128;
      for (uint32_t other = 0; other < g; ++other) {
        const uint32_t apart = (starts[g] - starts[other] + 128) % 128;
        const uint32_t gap = apart < 64 ? apart : 128 - apart;
        shared += gap < 16 ? 16 - gap : 0;
      }
    }
    if (shared < least) least = shared, best = 8 * row + pad;
  }
  return best;
}

// Planes of K, of a slice. Rows of 16-bit keys that are no multiple of 128 bytes are padded: two
// neighbouring ones lie 64 bytes of banks apart.
constexpr void place_keys(uint32_t k, uint32_t v, uint32_t dim, DecodeStage& a, uint32_t& at) {
  const uint32_t slice = decode_slice_dim(dim), slices = dim / slice;
  a.k_tiles = has_k_tiles(k, dim);
  if (a.k_tiles) {
    a.k_row = dim * abi::kv_bits(k) / 8;
    const uint32_t pitch = decode_k_pitch(a.k_row, v);
    a.k[0] = {8 * a.k_row, 0, pitch, at, a.k_row};
    at = round_up(at + a.tiles * pitch, 128);
    return;
  }
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t bytes = slice * decode_plane_bits(k, i) / 8;
    const uint32_t row = abi::kv_is_native(k) || bytes % 128 == 0 ? bytes : padded(bytes, 128, 64);
    const uint32_t pad = bytes == 32 ? 64 : (bytes == 16 ? 32 : 0);
    a.k[i] = {bytes, a.k_row, 8 * row + pad, at, row};
    a.fits = a.fits && bytes % 16 == 0;  // cp.async copies 16 bytes: every row begins at a multiple
    a.k_row += slices * bytes;
    at = round_up(at + a.tiles * a.k[i].tile_pitch, 128);
  }
}

// Planes of V. Eight rows of 16-bit values are read at once, 16 bytes each: where they are no
// multiple of 128 bytes, they lie an odd multiple of 16 apart.
constexpr void place_values(uint32_t v, uint32_t dim, DecodeStage& a, uint32_t& at) {
  const bool levels = abi::kv_is_native(v);
  const uint32_t slice = decode_slice_dim(dim), slices = dim / slice;
  a.v_tiles = has_v_tiles(v, dim);
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t bits = a.v_tiles ? (i == 0 ? abi::kv_bits(v) : 0) : decode_plane_bits(v, i);
    const uint32_t bytes = levels ? slice * bits : slice * bits / 8;
    const uint32_t row = levels || bytes % 128 == 0 ? bytes : padded(bytes, 32, 16);
    const uint32_t pitch = levels ? round_up(bytes + 96, 128) - 96 : 8 * row;
    a.v[i] = {bytes, a.v_tile, bits == 0 ? 0 : pitch, at, row};
    a.v_tile += slices * bytes;
    at = round_up(at + a.tiles * a.v[i].tile_pitch, 128);
  }
  // The second plane lies in the same tiles.
  if (a.v_tiles)
    a.v[1].tile_pitch = a.v[0].tile_pitch,
    a.v[1].offset = a.v[0].offset + dim * abi::kv_low_bits(v);
}

// Rows whose sums and weights fit into registers where dims are not round, as compilers say.
constexpr uint32_t decode_rows_in_registers(uint32_t k, uint32_t v, uint32_t dim,
                                            uint32_t cluster) {
  if (cluster == kDecodePages) {
    // Beside the sums a warp holds the state of its loads, which run into other splits.
    if (!abi::kv_is_native(v)) return dim > 128 ? 8 : kDecodeRows;
    // At 256, and 12 and 16 rows at 128, some spill: it costs less than reading the keys again.
    if (count_scale_blocks(dim) > 2 || dim == 512 || !abi::kv_is_native(k)) return 4;
    return dim == 64 || dim == 128 ? kDecodeRows : 8;
  }
  if (is_round_dim(dim)) return kDecodeRows;
  if (!abi::kv_is_native(v)) return dim > 128 ? 8 : kDecodeRows;
  return abi::kv_is_native(k) ? kDecodeRows : 8;
}

constexpr DecodeStage decode_stage(uint32_t k, uint32_t v, const HeadDims& dims, uint32_t rows,
                                   uint32_t cluster) {
  DecodeStage a = {};
  a.keys = decode_keys(k, v, dims, rows, cluster);
  a.tiles = a.keys / abi::kKvTile;
  a.k_blocks = count_scale_blocks(dims.k);
  a.v_blocks = count_scale_blocks(dims.v);
  a.fits = is_staged(k) && is_staged(v) && has_decode_dim(dims.k) && has_decode_dim(dims.v) &&
           (dims.k == dims.v || (dims.k < 512 && dims.v < 512));
  a.fits = a.fits && rows <= decode_rows_in_registers(k, v, dims.v, cluster);
  uint32_t at = 0;
  place_keys(k, v, dims.k, a, at);
  place_values(v, dims.v, a, at);
  a.k_scales = at;
  if (abi::kv_is_native(k)) at += a.tiles * a.k_blocks * 16;
  a.v_scales = at;
  if (abi::kv_is_native(v)) at += a.tiles * a.v_blocks * 16;
  a.bytes = round_up(at, 128);
  return a;
}

constexpr uint32_t kDecodeMaxWarps = 12, kDecodeMaxRows = kDecodeRows;
constexpr uint32_t kDecodeFewestStages = 2, kDecodeMaxStages = 4;

constexpr uint32_t row_tiles(uint32_t rows) { return (rows + 7) / 8; }

// Pages: groups of splits of a sequence's keys (abi/attention_schedule.h), of a power of two of
// keys. A split is so many keys that what a warp does once for each row of them counts little, and
// so few that warps get equal shares.
constexpr uint64_t kDecodeGroups = 16;
constexpr abi::AttentionCut decode_cut(uint32_t rows) {
  const uint64_t split_keys = rows > 4 ? 512 : 256;
  return {split_keys << abi::kGroupSplitsShift, kDecodeGroups};
}

// Shared memory of a block, in this order: states, query operands, an f32 staging buffer (rows of
// the block, or what all blocks of a cluster store into it), a transpose buffer for scores per
// warp, an exchange buffer for the scores of warps that share keys, and a ring of stages per warp.
// A warp's partial sums overwrite its ring at the end.
struct DecodeSharedLayout {
  bool fits;                                             // as DecodeStage::fits
  uint32_t queries, staging, transpose, exchange, ring;  // offsets
  uint32_t transpose_bytes, exchange_bytes;              // of one warp
  uint32_t warps;                                        // that the registers are enough for
  uint32_t warps_per_key;
  bool deep;             // three stages pay: a byte costs many instructions
  uint32_t stage, sums;  // bytes of a stage, and of one warp's partial sums

  // Bytes of one warp's ring.
  constexpr uint32_t ring_bytes(uint32_t stages) const {
    const uint32_t all = stages * stage;
    return all > sums ? all : sums;
  }
};

constexpr uint32_t kDecodeStateBytes = 5248;
// Floats from row to row of a warp's partial sums: the four or eight rows that a warp stores at
// once lie in different banks.
constexpr uint32_t decode_sums_pitch(uint32_t v, uint32_t slice) {
  return slice < 128 && abi::kv_is_native(v) ? slice + 2 : slice + 4;
}

// Bytes of the queries of a block as operands.
constexpr uint32_t decode_query_bytes(uint32_t k, uint32_t dim, uint32_t rows) {
  if (!abi::kv_is_native(k)) return dim / 16 * row_tiles(rows) * 512;
  const uint32_t blocks = has_k_tiles(k, dim) ? count_scale_blocks(dim) : 1;
  return decode_key_steps(dim) * blocks * (rows / 4) * 256;
}

constexpr DecodeSharedLayout decode_shared_layout(uint32_t k, uint32_t v, const HeadDims& dims,
                                                  uint32_t rows, uint32_t cluster) {
  DecodeSharedLayout a = {};
  const bool k_levels = abi::kv_is_native(k), v_levels = abi::kv_is_native(v);
  const DecodeStage stage = decode_stage(k, v, dims, rows, cluster);
  const uint32_t row_dim = decode_row_dim(dims.v), query_dim = round_up(dims.k, 32);
  a.fits = stage.fits;
  a.queries = kDecodeStateBytes;
  a.staging = a.queries + decode_query_bytes(k, dims.k, rows);
  const uint32_t blocks = cluster > 1 ? cluster : 1;
  const uint32_t stored = (rows + blocks - 1) / blocks * blocks * (row_dim + 2);
  const uint32_t own = rows * (row_dim > query_dim ? row_dim : query_dim);
  a.transpose = round_up(a.staging + (cluster > 1 && stored > own ? stored : own) * 4, 16);
  a.transpose_bytes = k_levels == v_levels ? 0 : rows * (stage.keys + 4) * 4;
  a.warps = decode_twelve_warps(k, v, dims, rows, cluster) ? 12 : 8;
  a.exchange = a.transpose + a.warps * a.transpose_bytes;
  a.warps_per_key = decode_warps_per_key(dims);
  a.exchange_bytes =
      a.warps_per_key == 1 ? 0 : (k_levels ? rows : 8 * row_tiles(rows)) * stage.keys * 4;
  a.ring = round_up(a.exchange + 2 * a.warps * a.exchange_bytes, 128);
  a.stage = stage.bytes;
  a.deep = v_levels && (rows > 4 || (dims.v > 128 && a.warps_per_key == 1));
  a.sums = round_up(rows * decode_sums_pitch(v, row_dim / a.warps_per_key) * 4, 128);
  return a;
}

// The most warps of a block that registers, and the shared memory of the largest GPU, allow.
constexpr uint32_t kDecodeMaxBytes = 227 << 10;
constexpr uint32_t decode_max_warps(const DecodeSharedLayout& layout) {
  const uint32_t by_keys = (kDecodeMaxBytes - layout.ring) / (kDecodeFewestStages * layout.stage);
  const uint32_t warps = by_keys < layout.warps ? by_keys : layout.warps;
  const uint32_t step = layout.warps_per_key > 2 ? layout.warps_per_key : 2;
  return warps <= 4 ? 4 : warps / step * step;
}
constexpr uint32_t decode_max_warps(uint32_t k, uint32_t v, const HeadDims& dims, uint32_t rows,
                                    uint32_t cluster) {
  return decode_max_warps(decode_shared_layout(k, v, dims, rows, cluster));
}

// As many stages as keep the memory busy: more bytes in flight make it slower, except where a warp
// executes many instructions per byte. GPUs with less shared memory get fewer warps, not fewer
// stages: the number of stages is a constant of the kernel.
constexpr uint32_t decode_stages(const DecodeSharedLayout& layout, uint32_t max_warps) {
  constexpr uint32_t kEnough = 32 << 10;
  const uint32_t one = max_warps * layout.stage;
  const uint32_t fit = (kDecodeMaxBytes - layout.ring) / one;
  const bool three = one < kEnough || layout.deep;
  uint32_t limit = 2 * one < kEnough ? kDecodeMaxStages : (three ? 3 : 2);
  constexpr uint32_t kSmall = 99 << 10;  // of sm_86, sm_89, sm_120: one group of warps must fit
  if (layout.ring + layout.warps_per_key * layout.ring_bytes(limit) > kSmall)
    limit = kDecodeFewestStages;
  return fit < kDecodeFewestStages ? kDecodeFewestStages : (fit < limit ? fit : limit);
}

struct DecodeBlock {
  uint32_t warps, bytes;  // 0 warps: there is not enough shared memory
};

// As many warps as fit. A block asks for at least `alone` bytes, if it may have them: two blocks
// on one multiprocessor would leave another one idle.
constexpr DecodeBlock decode_block(const DecodeSharedLayout& layout, uint32_t max_warps,
                                   uint32_t max_bytes, uint32_t alone) {
  if (layout.ring >= max_bytes) return {};
  const uint32_t each = layout.ring_bytes(decode_stages(layout, max_warps));
  uint32_t warps = (max_bytes - layout.ring) / each;
  if (warps > max_warps) warps = max_warps;
  warps = warps / layout.warps_per_key * layout.warps_per_key;
  if (warps > 4) warps = warps / 2 * 2;
  if (warps == 0) return {};
  const uint32_t bytes = layout.ring + warps * each;
  return {warps, bytes < alone && alone <= max_bytes ? alone : bytes};
}

}  // namespace gyre::cuda
