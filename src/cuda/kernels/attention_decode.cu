// Attention of a few rows over many keys, as in decoding. A block is one KV head, up to 8 or 16 of
// its (token, query head) rows and one split of the keys; every warp of it works alone on 16 or 32
// keys at a time, from their copy into shared memory to its own sums. The warps meet once, at the
// end; the last block of a head to come there puts the splits together.
// Bytes moved: the split's K and V once, q, and head_dim + 2 floats for each row and split.
#include "attention_decode_join.cuh"

namespace gyre::cuda {

// Of a lane's row, for masks.
struct MaskRow {
  float slope, offset;  // offset: first key less the query's position
  uint32_t begin, end;  // keys it sees, counted from the unit's first
};

// Scale of slot i of the tile whose eight scales these are.
inline float scale_in(const uint4& scales, uint32_t i) {
  const uint32_t words[4] = {scales.x, scales.y, scales.z, scales.w};
  return __uint_as_float(i % 2 == 0 ? words[i / 2] << 15 & 0x7FFF8000u
                                    : words[i / 2] >> 1 & 0x7FFF8000u);
}

// What is not plain: a soft cap, slopes, keys that a row does not see. Logits in base 2.
template <class Shape>
inline void mask_scores(const abi::AttentionParams& p, const DecodeUnit& u, const MaskRow& row,
                        uint32_t begin, float (&x)[Shape::kTiles][2]) {
  const uint32_t j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t i = 0; i < Shape::kTiles * 2; ++i) {
    float& s = x[i / 2][i % 2];
    const uint32_t key = u.walk.key_of(begin + Shape::key(i / 2, 2 * j + i % 2));
    if (!u.plain) {
      if (p.soft_cap > 0) s = soft_cap(s, p.soft_cap);
      s = (s + row.slope * (static_cast<float>(static_cast<int32_t>(key)) + row.offset)) * kLog2E;
    }
    if (key == ~0u || key < row.begin || key >= row.end) s = minus_infinity();
  }
}

template <class Shape, uint32_t kRows>
inline void work_on_chunk(const abi::AttentionParams& p, const DecodeUnit& u, const Tables& tables,
                          const uint4* q, const unsigned char* stage, uint32_t chunk,
                          const ScoreFactors (&factors)[kRows / 8], const MaskRow (&of)[kRows / 8],
                          DecodeRow (&row)[kRows / 8], float (&acc)[kRows / 8][Shape::kN / 16][4]) {
  constexpr uint32_t kT = Shape::kTiles, kHalves = kRows / 8;
  const uint32_t j = threadIdx.x % 4;
  float x[kHalves][kT][2];
  if constexpr (Shape::kLevelsK) {
    const unsigned char* const scales = stage + Shape::kShape.k_scales;
    score_levels<Shape, kRows>(
        tables, q, stage, factors,
        [&](uint32_t block, uint32_t t, uint32_t i) {
          if constexpr (Shape::kLevelsV) {
            const uint4 all =
                *reinterpret_cast<const uint4*>(scales + (j * Shape::kBlocks + block) * 16);
            return scale_in(all, value_item<Shape::kV>(2 * t + i)) * 0x1p-31f;
          }
          const uint32_t two = *reinterpret_cast<const uint32_t*>(
              scales + (t * Shape::kBlocks + block) * 16 + j * 4);
          return scale_in(make_uint4(two, 0, 0, 0), i) * 0x1p-31f;
        },
        x);
  } else {
    score_halves<Shape, kRows>(q, stage, factors, x);
  }
  const uint32_t begin = chunk * Shape::kShape.keys;
  const bool as_it_is = u.plain && u.alike && u.walk.whole(begin, begin + Shape::kShape.keys);
  if (!as_it_is) {
#pragma unroll
    for (uint32_t h = 0; h < kHalves; ++h) mask_scores<Shape>(p, u, of[h], begin, x[h]);
  }
  constexpr int32_t kAbove = Shape::kV == kPlanF16 ? 0 : 10;
#pragma unroll
  for (uint32_t h = 0; h < kHalves; ++h) fold_scores<kAbove>(x[h], row[h], acc[h]);
  if constexpr (Shape::kLevelsV) {
    ByteWeights w[kHalves][Shape::kBlocks];
#pragma unroll
    for (uint32_t block = 0; block < Shape::kBlocks; ++block) {
      const uint4 scales = *reinterpret_cast<const uint4*>(stage + Shape::kShape.v_scales +
                                                           (j * Shape::kBlocks + block) * 16);
#pragma unroll
      for (uint32_t h = 0; h < kHalves; ++h)
        w[h][block] = byte_weights(
            x[h], [&](uint32_t i) { return scale_in(scales, value_item<Shape::kV>(i)); }, u.paired);
    }
    add_levels<Shape, kHalves>(tables, stage, u.paired, w, acc);
  } else {
    add_halves<Shape, kHalves>(stage, x, acc);
  }
}

template <uint32_t kK, uint32_t kV, uint32_t kN, uint32_t kRows>
__global__ void __launch_bounds__(decode_most_warps(kK, kV, kN, kRows) * 32, 1)
    attention_decode(const abi::AttentionParams p, const Args args) {
  using Shape = Decode<kK, kV, kN>;
  constexpr uint32_t kHalves = kRows / 8;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4;
  const uint32_t warps = blockDim.x / kWarp;
  unsigned char* const shared = dynamic_shared();
  constexpr DecodeRooms kRooms = decode_rooms(kK, kV, kN, kRows);
  const uint32_t stages = opaque(decode_stages(kRooms, warps, dynamic_shared_bytes()));
  auto& states = *reinterpret_cast<DecodeStates*>(shared);
  auto* const wide = reinterpret_cast<float*>(shared + kRooms.wide);
  const DecodeUnit u = make_unit(p, args);
  if (blockIdx.x >= u.splits && p.partial != abi::kAttentionPartial) return;

  auto* const mine = reinterpret_cast<uint32_t*>(wide) + threadIdx.x;
  const ChunkCopy<Shape> copy(p, args.at[arg_k_codes], args.at[arg_k_scales], args.at[arg_v_codes],
                              args.at[arg_v_scales], u.kv_head, kN * kRows < 4096 ? mine : nullptr);
  const uint32_t chunks = (u.walk.tiles + Shape::kTiles - 1) / Shape::kTiles;
  unsigned char* const ring = shared + kRooms.ring + warp * stages * Shape::kShape.bytes;
  float query[kN / kWarp];  // on its way while the first keys are asked for
  if (warp < u.rows) load_query<Shape>(p, u, args.at[arg_q], warp, query);
  for (uint32_t i = 0; i + 1 < stages; ++i)
    copy.start(u.walk, warp + i * warps, ring + i * Shape::kShape.bytes);

  // Rows that are only there to fill a product repeat real ones.
  __syncthreads();  // `wide` lent its memory to all lanes
  for (uint32_t r = warp; r < u.rows; r += warps) {
    if (r != warp) load_query<Shape>(p, u, args.at[arg_q], r, query);
    put_query<Shape>(query, wide + r * kN, states.factor[r]);
  }
  __syncthreads();
  const auto real_row = [&](uint32_t r) { return u.paired ? r % 4 % u.rows : r % u.rows; };
  auto* const operands = reinterpret_cast<uint4*>(shared + kRooms.queries);
  make_operands<kK, kN, kRows>([&](uint32_t r) { return wide + real_row(r) * kN; }, operands);
  __syncthreads();

  const auto* const slopes = pointer<const float>(args.at[arg_slopes]);
  const Table of_k = make_table<kK>(mine);
  const Tables tables = {of_k, kK == kV ? of_k : make_table<kV>(mine), keep(kMagicBits, mine)};
  ScoreFactors factors[kHalves];
  MaskRow of[kHalves];
  DecodeRow row[kHalves];
#pragma unroll
  for (uint32_t h = 0; h < kHalves; ++h) {
    const uint32_t r = real_row(g + 8 * h);
    const RowPlace at = row_place(u, r);
    const RowBounds b = row_bounds(p, u, at.token, u.first, u.length);
    const int32_t position =
        static_cast<int32_t>(u.length + at.token) - static_cast<int32_t>(u.tokens);
    factors[h] = {states.factor[r][0], states.factor[r][1] * p.scale * (u.plain ? kLog2E : 1.0f)};
    of[h] = {args.at[arg_slopes] == 0 ? 0.0f : slopes[at.head],
             static_cast<float>(static_cast<int32_t>(u.first) - position), b.begin - u.first,
             b.end - u.first};
    row[h] = {kLowest, minus_infinity(), 0};
  }
  float acc[kHalves][kN / 16][4] = {};
  uint32_t slot = 0;
#pragma unroll 1
  for (uint32_t chunk = warp; chunk < chunks; chunk += warps) {
    wait_for_stage(stages);
    const uint32_t free = slot == 0 ? stages - 1 : slot - 1;
    copy.start(u.walk, chunk + (stages - 1) * warps, ring + free * Shape::kShape.bytes);
    work_on_chunk<Shape, kRows>(p, u, tables, operands + lane, ring + slot * Shape::kShape.bytes,
                                chunk, factors, of, row, acc);
    slot = slot + 1 == stages ? 0 : slot + 1;
  }
  copy_wait<0>();
  const uint32_t busy = chunks < warps ? (chunks == 0 ? 1 : chunks) : warps;
  join_warps<Shape, kRows>(u, states, wide, reinterpret_cast<float*>(shared + kRooms.ring), busy,
                           row, acc);
  if (p.partial == abi::kAttentionMerged && u.splits > 1) {
    auto* const counters = pointer<uint32_t>(args.at[arg_partial]);
    const uint64_t partial = args.at[arg_partial] + abi::attention_counters(p.kv_heads) * 4;
    if (hand_over<Shape>(p, u, partial, counters, states, wide))
      store_joined_rows<Shape>(p, u, args, partial);
    return;
  }
  store_rows<Shape>(p, u, args, states, wide);
}

}  // namespace gyre::cuda
