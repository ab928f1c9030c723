// Attention of a few rows over many keys, as in decoding. A block is one KV head, some of its
// (token, query head) rows and one split of the keys; every warp of it works alone on 16 to 64 keys
// at a time, from their copy into shared memory to its own sums. The warps meet once, at the end;
// then the blocks of a cluster put the splits together, or the last block to have left a row. Keys
// of more than 256 coordinates are shared by four warps. Bytes moved: the split's K and V once, q,
// and head_dim + 2 floats for each row and split, or pair of splits.
#include "attention_decode_join.cuh"

namespace gyre::cuda {

// How rows and keys are spread over a warp's lanes. Products with levels have rows 4 i + j and
// neighbouring keys in a lane, those with 16-bit numbers rows 8 i + g and keys 8 t + 2 j, + 1.
template <class Shape, uint32_t kRows, bool kLevels>
struct Spread {
  static constexpr uint32_t kCount = kRows / 4, kKeys = Shape::kLaneKeys;
  using Scores = float[kCount][kKeys];
  using Row = LevelRow;
  using Sums = int32_t[kCount][Shape::kOwn / 16][4];
  static uint32_t row(uint32_t i) { return 4 * i + threadIdx.x % 4; }
  static uint32_t key(uint32_t i) {
    constexpr uint32_t kTogether = Shape::kTogether;
    return i / kTogether * 32 + threadIdx.x % kWarp / 4 * kTogether + i % kTogether;
  }
  static float& at(Scores& x, uint32_t row, uint32_t key) { return x[row][key]; }
  static Row first() { return {kLowest, kMostPer, minus_infinity(), 0, 0}; }
};
template <class Shape, uint32_t kRows>
struct Spread<Shape, kRows, false> {
  static constexpr uint32_t kCount = eights(kRows), kKeys = Shape::kTiles * 2;
  using Scores = float[kCount][Shape::kTiles][2];
  using Row = DecodeRow;
  using Sums = float[kCount][Shape::kOwn / 16][4];
  static uint32_t row(uint32_t i) { return 8 * i + threadIdx.x % kWarp / 4; }
  static uint32_t key(uint32_t i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
  static float& at(Scores& x, uint32_t row, uint32_t key) { return x[row][key / 2][key % 2]; }
  static Row first() { return {kLowest, minus_infinity(), 0}; }
};

// What is not plain: a soft cap, slopes, a key that is not there or that the row does not see. A
// logit in base 2.
inline float masked(const abi::AttentionParams& p, const DecodeUnit& u, const MaskRow* rows,
                    uint32_t r, uint32_t at, float s) {
  const uint32_t key = u.walk.key_of(at);
  if (key == ~0u) return minus_infinity();
  if (u.plain && u.alike) return s;
  const MaskRow row = rows[r % u.rows];
  if (!u.plain) {
    if (p.soft_cap > 0) s = soft_cap(s, p.soft_cap);
    s = (s + row.slope * (static_cast<float>(static_cast<int32_t>(key)) + row.offset)) * kLog2E;
  }
  return key < row.begin || key >= row.end ? minus_infinity() : s;
}

// Scores as products with keys leave them become as products with values want them: [row][key] in
// shared memory.
template <class From, class To, uint32_t kRows, uint32_t kPitch>
inline void spread_anew(typename From::Scores& from, float* room, typename To::Scores& to) {
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < From::kCount * From::kKeys; ++i) {
    const uint32_t row = From::row(i / From::kKeys), key = From::key(i % From::kKeys);
    if (row < kRows) room[row * kPitch + key] = From::at(from, i / From::kKeys, i % From::kKeys);
  }
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < To::kCount * To::kKeys; ++i) {
    const uint32_t row = To::row(i / To::kKeys), key = To::key(i % To::kKeys);
    To::at(to, i / To::kKeys, i % To::kKeys) = room[row * kPitch + key];
  }
}

template <class Shape>
inline LanePlaces lane_places() {
  LanePlaces at = {};
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const auto kept = [](uint32_t x) { return Shape::kKeepsPlaces ? keep(x) : x; };
  if constexpr (Shape::kLevelsK) {
    using Reader = KeyReader<Shape::kOwn, Shape::kK, Shape::kMany>;
    at.k[0] = kept(Reader::place(Shape::kShape.k, 0, Shape::first_row(g), j));
    if (Reader::kHigh != 0)
      at.k[1] = kept(Reader::place(Shape::kShape.k, 1, Shape::first_row(g), j));
  }
  if constexpr (Shape::kLevelsV) {
    at.v[0] = kept(values_place<Shape::kV>(Shape::kShape.v, 0));
    if (abi::kv_high_bits(Shape::kV) != 0)
      at.v[1] = kept(values_place<Shape::kV>(Shape::kShape.v, 1));
  }
  if constexpr (Shape::kLevelsK || Shape::kLevelsV) at.scales = kept(scales_place<Shape>());
  return at;
}

// What a warp that shares keys gives to the others: scores of its part, in turns to either half of
// the room, so that one barrier is enough.
template <class Shape, class Scores>
struct Swap {
  static constexpr uint32_t kEach = sizeof(Scores) / 4;
  static constexpr uint32_t kOfBlock = Shape::kParts / Shape::kBlocks;  // parts with one scale
  float* room;
  uint32_t swapped, turn;

  float* of(uint32_t warp) const {
    return room + (2 * warp + turn % 2) * (swapped / 4) + threadIdx.x % kWarp;
  }
  void put(const Scores& x) const {
    const uint32_t warp = threadIdx.x / kWarp;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i)
      of(warp)[i * kWarp] = reinterpret_cast<const float*>(&x)[i];
    sync_warps<Shape::kParts>(warp / Shape::kParts);
  }
  // The same in each of the warps.
  void get(uint32_t first, uint32_t count, Scores& x) const {
    const uint32_t warp = threadIdx.x / kWarp / Shape::kParts * Shape::kParts + first;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      float sum = 0;
#pragma unroll
      for (uint32_t part = 0; part < count; ++part) sum += of(warp + part)[i * kWarp];
      reinterpret_cast<float*>(&x)[i] = sum;
    }
  }
};

// Scores of all coordinates. Those that have one scale are added up before they meet it: it may be
// infinite.
template <class Shape, uint32_t kRows, class Queries, class Factors, class Scores>
inline void score(const Table& table, const Queries& q, const unsigned char* stage,
                  const LanePlaces& places, const Factors& factors, const Swap<Shape, Scores>& swap,
                  Scores& x) {
  if constexpr (Shape::kLevelsK) {
    score_levels<Shape, kRows / 4>(table, q, stage, places, factors, x);
    if constexpr (Shape::kParts > 1) {
      swap.put(x);
#pragma unroll
      for (uint32_t block = 0; block < Shape::kBlocks; ++block) {
        Scores of_block;
        swap.get(block * swap.kOfBlock, swap.kOfBlock, of_block);
        scale_scores<Shape, kRows / 4>(stage, places, block, factors, of_block);
#pragma unroll
        for (uint32_t i = 0; i < swap.kEach; ++i) {
          float& sum = x[i / Shape::kLaneKeys][i % Shape::kLaneKeys];
          const float more = of_block[i / Shape::kLaneKeys][i % Shape::kLaneKeys];
          sum = block == 0 ? more : sum + more;
        }
      }
    } else {
      scale_scores<Shape, kRows / 4>(stage, places, 0, factors, x);
    }
  } else {
    score_halves<Shape, kRows>(q, stage, factors, x);
    if constexpr (Shape::kParts > 1) {
      swap.put(x);
      swap.get(0, Shape::kParts, x);
    }
  }
}

template <uint32_t kK, uint32_t kV, uint32_t kN, uint32_t kRows, uint32_t kCluster>
__global__ void GYRE_CLUSTER(kCluster)
    __launch_bounds__(decode_most_warps(kK, kV, kN, kRows, kCluster) * 32, 1)
        attention_decode(const abi::AttentionParams p, const Args args) {
  using Shape = Decode<kK, kV, kN, kRows, kCluster>;
  using Keys = Spread<Shape, kRows, Shape::kLevelsK>;
  using Values = Spread<Shape, kRows, Shape::kLevelsV>;
  const uint32_t warp = warp_number(), warps = blockDim.x / kWarp;
  unsigned char* const shared = dynamic_shared();
  constexpr DecodeRooms kRooms = decode_rooms(kK, kV, kN, kRows, kCluster);
  constexpr uint32_t kMostWarps = Shape::kMostWarps;
  constexpr uint32_t kStages = decode_stages(kRooms, kMostWarps);
  constexpr uint32_t kStage = kRooms.stage, kOfWarp = kRooms.warp(kStages);
  auto& states = *reinterpret_cast<DecodeStates*>(shared);
  auto* const wide = reinterpret_cast<float*>(shared + kRooms.wide);
  DecodeUnit u = unit_rows(p, kRows);
  find_keys(p, args, Shape::kShape.keys, u);
  const uint32_t part = warp % Shape::kParts, first = warp / Shape::kParts;
  const uint32_t step = warps / Shape::kParts;  // chunks that the block has at a time
  const ChunkCopy<Shape> copy(p, args.at[arg_k_codes], args.at[arg_k_scales], args.at[arg_v_codes],
                              args.at[arg_v_scales], u.kv_head, part);
  const uint32_t chunks = (u.walk.tiles + Shape::kTiles - 1) / Shape::kTiles;
  unsigned char* const ring = shared + kRooms.ring + warp * kOfWarp;
  // A warp's first rows, and the next one's while a row is made. Where the first one lies is found
  // before the turn; with two, registers are short.
  constexpr uint32_t kBlocks = Shape::kQueryBlocks, kAhead = kRows * kBlocks > kMostWarps ? 2 : 1;
  const auto query_of = [&](uint32_t r) { return query_place(p, u, args.at[arg_q], r); };
  const uint8_t* first_query = nullptr;
  uint32_t wide_query = p.q_dtype == 0 ? 1 : 0;
  if constexpr (kAhead == 1) {
    const uint32_t r = warp / kBlocks;
    first_query = keep(query_of(r < u.rows ? r : 0));
    wide_query = keep(wide_query);
  }
  // By the warp with the fewest queries. The blocks of a cluster have time for it before the turn;
  // others may have begun late.
  const auto put_ends = [&] {
    const uint32_t r = threadIdx.x % kWarp;
    if (warp + 1 == warps && r < u.rows)
      states.ends[r] = row_end<kN>(p, u, args, r, gridDim.x / kCluster);
  };
  if constexpr (kCluster == abi::kAttentionCluster) put_ends();
  // Found before the turn, as it is looked at: the compiler would put it off, and what it takes of
  // the parameters comes late again after the wait. With many rows registers are short.
  if constexpr (kRows == 4 || !Shape::kLevelsK) {
    if ((copy.misplaced() | u.walk.beyond() | misplaced_bits<2>(first_query)) != 0) halt();
  }
  await_turn();
  // The blocks of a cluster end together.
  if (p.partial != abi::kAttentionPartial && blockIdx.x / kCluster >= clusters_of<kCluster>(u))
    return;
  uint32_t query[kAhead][kN / kWarp];
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i) {
    const uint32_t r = (warp + i * warps) / kBlocks;
    if (r < u.rows)
      load_query<Shape>(kAhead == 1 ? first_query : query_of(r), wide_query != 0, query[i]);
  }
  // No key before the queries: behind all of them it would take long. Behind those of eight warps
  // at most four queries may wait.
  if constexpr (!Shape::kLevelsK || kRows > 4 || kMostWarps > 8) __syncthreads();
  for (uint32_t i = 0; i + 1 < kStages; ++i)
    copy.start(u.walk, first + i * step, ring + i * kStage);

  const bool masks = !u.plain || !u.alike;
  if (threadIdx.x == 0) {
    states.of_k[0] = states.of_k[1] = make_table<kK, Shape::kMany>();
    states.of_v[0] = states.of_v[1] = make_table<kV, Shape::kMany>();
    if (kCluster > 1) expect_pushes(&states.pushes, pushed_bytes<kCluster>(u, kN));
  }
  if constexpr (kCluster < abi::kAttentionCluster) put_ends();
  auto* const operands = shared + kRooms.queries;
  for (uint32_t i = warp; i < kRows * kBlocks; i += warps) {
    const uint32_t r = i / kBlocks, block = i % kBlocks;
    float* const row = wide + r * kN;
    if (r < u.rows) {
      put_query<Shape>(p, u, query[0], block, row + block * (kN / kBlocks),
                       states.factor[block * (Shape::kParts / kBlocks)][r]);
#pragma unroll
      for (uint32_t e = 0; e < kN / kWarp; ++e) query[0][e] = query[kAhead - 1][e];
      const uint32_t next = (i + kAhead * warps) / kBlocks;
      if (next < u.rows) load_query<Shape>(query_of(next), wide_query != 0, query[kAhead - 1]);
      if (masks && block == 0 && threadIdx.x % kWarp == 0)
        states.mask[r] = mask_row(p, u, args.at[arg_slopes], r);
      __syncwarp();
    }
    if constexpr (Shape::kLevelsK)
      put_columns<Shape>(r < u.rows ? row : nullptr, r, block, reinterpret_cast<uint2*>(operands),
                         states.factor);
  }
  __syncthreads();
  if constexpr (!Shape::kLevelsK) {
    put_rows<kK, kN, kRows>([&](uint32_t r) { return wide + r % u.rows * kN; },
                            reinterpret_cast<uint4*>(operands));
    __syncthreads();
  }
  if constexpr (kCluster > 1) cluster_arrive();  // `wide` may be pushed to
  const auto queries = [&] {
    if constexpr (Shape::kLevelsK) {
      return QueryColumns<kRows / 4, Shape::kOwn / 32, kN / 32>(
          reinterpret_cast<const uint2*>(operands), part);
    } else {
      constexpr uint32_t kOfPart = Shape::kOwn / 16 * eights(kRows) * kWarp;
      return reinterpret_cast<const uint4*>(operands) + part * kOfPart + threadIdx.x % kWarp;
    }
  }();
  const Table of_k = load_table<kK, Shape::kMany>(states.of_k);
  const Table of_v = kK == kV ? of_k : load_table<kV, Shape::kMany>(states.of_v);
  const LanePlaces places = lane_places<Shape>();
  LaneWeights lane = lane_weights();
  const auto factors = [&] {
    if constexpr (Shape::kLevelsK) {
      return LevelFactors<kRows / 4, kBlocks>(states.factor, part, Shape::kParts);
    } else {
      return HalfFactors<eights(kRows)>(states.factor[0], u.rows);
    }
  }();
  typename Values::Row row[Values::kCount];
#pragma unroll
  for (uint32_t i = 0; i < Values::kCount; ++i) row[i] = Values::first();
  typename Values::Sums acc = {};
  uint32_t at = 0, before = (kStages - 1) * kStage;  // in the ring
  uint32_t until_check = kChunksToCheck, turn = 0;
#pragma unroll 1
  for (uint32_t chunk = first; chunk < chunks; chunk += step) {
    wait_for_stage<kStages>();
    copy.start(u.walk, chunk + (kStages - 1) * step, ring + before);
    const unsigned char* const stage = ring + at;
    before = at;
    at = at + kStage == kStages * kStage ? 0 : at + kStage;

    const Swap<Shape, typename Keys::Scores> swap = {reinterpret_cast<float*>(shared + kRooms.swap),
                                                     kRooms.swapped, turn++};
    typename Values::Scores x;
    if constexpr (Shape::kLevelsK == Shape::kLevelsV) {
      score<Shape, kRows>(of_k, queries, stage, places, factors, swap, x);
    } else {
      typename Keys::Scores s;
      score<Shape, kRows>(of_k, queries, stage, places, factors, swap, s);
      auto* const room = reinterpret_cast<float*>(shared + kRooms.turn + warp * kRooms.turned);
      spread_anew<Keys, Values, kRows, Shape::kShape.keys + 4>(s, room, x);
    }
    const uint32_t begin = chunk * Shape::kShape.keys;
    if (masks || !u.walk.whole(begin)) {
#pragma unroll
      for (uint32_t i = 0; i < Values::kCount * Values::kKeys; ++i) {
        float& s = Values::at(x, i / Values::kKeys, i % Values::kKeys);
        s = masked(p, u, states.mask, Values::row(i / Values::kKeys),
                   begin + Shape::key(Values::key(i % Values::kKeys)), s);
      }
    }
    if constexpr (Shape::kLevelsV) {
      uint32_t b[Values::kCount][Shape::kProducts][2];
      weigh<Shape, kRows / 4>(lane, x, stage + Shape::kShape.v_scales + places.scales,
                              part * Shape::kBlocks / Shape::kParts, row, acc, b);
      add_levels<Shape, kRows / 4>(of_v, stage + places.v[0], stage + places.v[1], b, acc);
      lane.step(Shape::FormV::kBias != 0 ? Shape::kLaneKeys : 0);
      if (--until_check == 0) {
        until_check = kChunksToCheck;
#pragma unroll
        for (uint32_t i = 0; i < Values::kCount; ++i) check_sums(lane, row[i], acc[i]);
      }
    } else {
      constexpr int32_t kUp = kV == kPlanF16 ? 0 : 10;
#pragma unroll
      for (uint32_t i = 0; i < Values::kCount; ++i) fold_scores<kUp>(x[i], row[i], acc[i]);
      add_halves<Shape, eights(kRows)>(stage, x, acc);
    }
  }
  pass_turn();
  copy_wait<0>();
  if constexpr (Shape::kLevelsV) {
#pragma unroll
    for (uint32_t i = 0; i < Values::kCount; ++i) row[i].weights -= lane.surplus;
  }
  const uint32_t busy = (chunks < step ? (chunks == 0 ? 1 : chunks) : step) * Shape::kParts;
  if (warp < busy) put_warp<Shape, kRows>(states, reinterpret_cast<float*>(ring), row, acc);
  finish<Shape, kCluster>(p.partial, u, states,
                          reinterpret_cast<const float*>(shared + kRooms.ring), kOfWarp / 4, busy,
                          wide);
}

}  // namespace gyre::cuda
