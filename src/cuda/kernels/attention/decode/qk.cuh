#pragma once
// Decode attention: the scores of a stage. Over levels, keys are the A operand, 16 at a time, and
// four queries fill B, each as two byte columns. Over 16-bit keys, queries are the A operand and
// keys fill B.
#include "cuda/kernels/attention/common/softmax.cuh"
#include "cuda/kernels/attention/decode/key_reader.cuh"
#include "cuda/kernels/attention/decode/problem.cuh"
#include "cuda/kernels/attention/decode/query_operands.cuh"
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::cuda {

// x[four][i]: the score of row 4 four + j for the lane's key i, over the warp's coordinates,
// without the key's scale.
template <class Traits>
inline void score_levels(const LevelTable& table, const Queries<Traits>& q,
                         const unsigned char* stage, const LaneOffsets<Traits>& offsets,
                         typename SpreadK<Traits>::Scores& x) {
  using Reader = KeyReader<Traits::kKeySlice, Traits::kK, Traits::kManyRows>;
  using Form = typename Reader::Form;
  constexpr uint32_t kRowQuads = Traits::kRows / 4, kLaneKeys = Traits::kLaneKeys;
  constexpr const DecodePlane(&kPlanes)[2] = Traits::kStage.k;
  const unsigned char *const low = stage + offsets.k[0], *const high = stage + offsets.k[1];
  int32_t c[kRowQuads][kLaneKeys / 2][4] = {};
#pragma unroll
  for (uint32_t vector = 0; vector < Reader::kVectors; ++vector) {
#pragma unroll
    for (uint32_t two = 0; two < kLaneKeys / 2; ++two) {
      typename Reader::Words w[2];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i)
        w[i] = Reader::read(low + Traits::key_distance(kPlanes[0], 2 * two + i),
                            high + Traits::key_distance(kPlanes[1], 2 * two + i), kPlanes, vector);
#pragma unroll
      for (uint32_t step = 0; step < Reader::kStepsPerVector; ++step) {
        const auto first = Reader::unpack(table, w[0], step);
        const auto second = Reader::unpack(table, w[1], step);
#pragma unroll
        for (uint32_t four = 0; four < kRowQuads; ++four) {
          uint32_t b[2];
          q.operands.get(four, vector * Reader::kStepsPerVector + step, b);
#pragma unroll
          for (uint32_t term = 0; term < Form::kTerms; ++term) {
            const uint32_t a[4] = {first.term[term][0], second.term[term][0], first.term[term][1],
                                   second.term[term][1]};
            mma_s8(c[four][two], a, b[0], b[1]);
          }
        }
      }
    }
  }
#pragma unroll
  for (uint32_t four = 0; four < kRowQuads; ++four) {
    const ScoreFactors f = q.factors[four];
#pragma unroll
    for (uint32_t key = 0; key < kLaneKeys; ++key) {
      const int32_t(&sums)[4] = c[four][key / 2];
      // Below 2^30: 256 coordinates, 7 bits of level, 14 of the query.
      const auto sum = static_cast<float>(sums[key % 2 * 2] * 256 + sums[key % 2 * 2 + 1]);
      x[four][key] = Form::kBias == 0 ? sum * f.first : fmaf(sum, f.first, f.added);
    }
  }
}

// As above over tiles of K, with scales and factors: a scale block may end within a step.
template <class Traits>
inline void score_tiles(const LevelTable& table, const Queries<Traits>& q,
                        const unsigned char* stage, const LaneOffsets<Traits>& offsets,
                        typename SpreadK<Traits>::Scores& x) {
  using Reader = typename LaneOffsets<Traits>::Tiles;
  using Form = typename Reader::Form;
  constexpr uint32_t kRowQuads = Traits::kRows / 4, kLaneKeys = Traits::kLaneKeys;
  constexpr uint32_t kBlocks = Reader::kBlocks;
  constexpr DecodePlane kPlane = Traits::kStage.k[0];
  const Reader& reader = offsets.k_tiles;
  float scales[kBlocks][kLaneKeys];
#pragma unroll
  for (uint32_t block = 0; block < kBlocks; ++block)
    load_scales<Traits, kBlocks>(stage + Traits::kStage.k_scales + offsets.k_scales, block,
                                 scales[block]);
#pragma unroll
  for (uint32_t two = 0; two < kLaneKeys / 2; ++two) {
    typename Reader::Words w[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t key = 2 * two + i, token = Traits::token_distance(key);
      w[i] = reader.read(
          stage, key / Traits::kAdjacentKeys * 4 * kPlane.tile_pitch + token * kPlane.row_pitch,
          token % 2 != 0);
    }
    int32_t c[kBlocks][kRowQuads][4] = {};
#pragma unroll
    for (uint32_t step = 0; step < Reader::kSteps; ++step) {
      const auto first = reader.unpack(table, w[0], step),
                 second = reader.unpack(table, w[1], step);
#pragma unroll
      for (uint32_t i = 0; i < kBlocks * kRowQuads; ++i) {
        const uint32_t block = i / kRowQuads, four = i % kRowQuads;
        if (!Reader::kSlots.used[step][block]) continue;
        uint32_t b[2];
        q.operands.get(four, Reader::slot(step, block), b);
#pragma unroll
        for (uint32_t term = 0; term < Form::kTerms; ++term) {
          const uint32_t a[4] = {first.term[term][0], second.term[term][0], first.term[term][1],
                                 second.term[term][1]};
          mma_s8(c[block][four], a, b[0], b[1]);
        }
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kBlocks * kRowQuads * 2; ++i) {
      const uint32_t block = i / 2 / kRowQuads, four = i / 2 % kRowQuads, key = 2 * two + i % 2;
      const ScoreFactors f = q.factors.get(block, four);
      const int32_t(&sums)[4] = c[block][four];
      const auto sum = static_cast<float>(sums[i % 2 * 2] * 256 + sums[i % 2 * 2 + 1]);
      const float score = Form::kBias == 0 ? sum * f.first : fmaf(sum, f.first, f.added);
      const float scaled = score * (scales[block][key] * f.second);
      x[four][key] = block == 0 ? scaled : x[four][key] + scaled;
    }
  }
}

// Multiplies scores over the coordinates of one scale block by that scale.
template <class Traits>
inline void scale_scores(const Queries<Traits>& q, const unsigned char* stage,
                         const LaneOffsets<Traits>& offsets, uint32_t block,
                         typename SpreadK<Traits>::Scores& x) {
  float scales[Traits::kLaneKeys];
  load_scales<Traits, Traits::kBlocksK>(stage + Traits::kStage.k_scales + offsets.k_scales, block,
                                        scales);
#pragma unroll
  for (uint32_t four = 0; four < Traits::kRows / 4; ++four) {
    const float second = q.factors.second(block, four);
#pragma unroll
    for (uint32_t i = 0; i < Traits::kLaneKeys; ++i) x[four][i] *= scales[i] * second;
  }
}

// s[eight][t][i]: the score of row 8 eight + g for key 8 t + 2 j + i. A lane has eight coordinates
// of each span of 32, and four of 16 that are left.
template <class Traits>
inline void score_float16(const Queries<Traits>& q, const unsigned char* stage,
                          typename SpreadK<Traits>::Scores& s) {
  constexpr uint32_t kT = Traits::kTiles, kRowTiles = row_tiles(Traits::kRows);
  constexpr DecodePlane kPlane = Traits::kStage.k[0];
  using Type = Float16Type<Traits::kK>;
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  float c[kT][4] = {}, d[kT][4] = {};  // 8 rows: two shorter chains; 16 rows: hi and lo
#pragma unroll
  for (uint32_t span = 0; span < (Traits::kKeySlice + 31) / 32; ++span) {
    const bool whole = (span + 1) * 32 <= Traits::kKeySlice;
    uint32_t a[2 * kRowTiles][4];
#pragma unroll
    for (uint32_t i = 0; i < (whole ? 2 : 1) * kRowTiles; ++i) {
      const uint4 x = q.operands[(span * 2 * kRowTiles + i) * kWarp];
      a[i][0] = x.x, a[i][1] = x.y, a[i][2] = x.z, a[i][3] = x.w;
    }
#pragma unroll
    for (uint32_t t = 0; t < kT; ++t) {
      const uint32_t k = 8 * t + g;
      const unsigned char* const row =
          stage + kPlane.offset + k / 8 * kPlane.tile_pitch + k % 8 * kPlane.row_pitch;
      if (!whole) {
        const uint2 x = *reinterpret_cast<const uint2*>(row + span * 64 + j * 8);
        Type::mma(c[t], a[0], x.x, x.y);
        if constexpr (kRowTiles == 2) Type::mma(d[t], a[1], x.x, x.y);
        continue;
      }
      constexpr uint32_t kSwizzle = kPlane.bytes % 128 == 0 ? 64 : 0;
      const uint4 x =
          *reinterpret_cast<const uint4*>(row + ((span * 64 + j * 16) ^ (k % 2 * kSwizzle)));
      Type::mma(c[t], a[0], x.x, x.y);
      if constexpr (kRowTiles == 1) {
        Type::mma(d[t], a[1], x.z, x.w);
      } else {
        Type::mma(d[t], a[1], x.x, x.y);
        Type::mma(c[t], a[2], x.z, x.w);
        Type::mma(d[t], a[3], x.z, x.w);
      }
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kT * 2; ++i) {
    const float(&x)[4] = c[i / 2], (&y)[4] = d[i / 2];
    const uint32_t e = i % 2;
    float sums[kRowTiles];
    if constexpr (kRowTiles == 1) {
      sums[0] = add_lo(x[e] + y[e], x[e + 2] + y[e + 2]);
    } else {
      sums[0] = add_lo(x[e], y[e]), sums[1] = add_lo(x[e + 2], y[e + 2]);
    }
#pragma unroll
    for (uint32_t h = 0; h < kRowTiles; ++h)
      s[h][i / 2][e] = sums[h] * q.factors.of[h].first * q.factors.of[h].second;
  }
}

// Exchange of scores between warps that share keys: each writes those of its slice into one of two
// buffers in turn, so that one barrier per stage is enough.
template <class Traits>
struct ScoreExchange {
  using Scores = typename SpreadK<Traits>::Scores;
  static constexpr uint32_t kLaneFloats = sizeof(Scores) / 4;
  static constexpr uint32_t kSlicesPerBlock = Traits::kWarpsPerKey / Traits::kBlocksK;
  float* region;
  uint32_t buffer;  // counts stages

  float* of(uint32_t warp) const {
    return region + (2 * warp + buffer % 2) * (Traits::kLayout.exchange_bytes / 4) +
           threadIdx.x % kWarp;
  }
  void put(const Scores& x) const {
    const uint32_t warp = threadIdx.x / kWarp;
#pragma unroll
    for (uint32_t i = 0; i < kLaneFloats; ++i)
      of(warp)[i * kWarp] = reinterpret_cast<const float*>(&x)[i];
    sync_named_barrier<Traits::kWarpsPerKey>(warp / Traits::kWarpsPerKey);
  }
  // Sums of `count` slices from `first` on, the same in each of the warps.
  void get(uint32_t first, uint32_t count, Scores& x) const {
    const uint32_t warp = threadIdx.x / kWarp / Traits::kWarpsPerKey * Traits::kWarpsPerKey + first;
#pragma unroll
    for (uint32_t i = 0; i < kLaneFloats; ++i) {
      float sum = 0;
#pragma unroll
      for (uint32_t slice = 0; slice < count; ++slice) sum += of(warp + slice)[i * kWarp];
      reinterpret_cast<float*>(&x)[i] = sum;
    }
  }
};

// Scores over all coordinates. Slices under one scale are added up before the scale multiplies
// them: it may be infinite.
template <class Traits>
inline void score(const LevelTable& table, const Queries<Traits>& q, const unsigned char* stage,
                  const LaneOffsets<Traits>& offsets, const ScoreExchange<Traits>& exchange,
                  typename SpreadK<Traits>::Scores& x) {
  if constexpr (!Traits::kLevelsK) {
    score_float16<Traits>(q, stage, x);
    if constexpr (Traits::kWarpsPerKey > 1) {
      exchange.put(x);
      exchange.get(0, Traits::kWarpsPerKey, x);
    }
  } else if constexpr (Traits::kStage.k_tiles) {
    score_tiles<Traits>(table, q, stage, offsets, x);
  } else {
    score_levels<Traits>(table, q, stage, offsets, x);
    if constexpr (Traits::kWarpsPerKey == 1) {
      scale_scores<Traits>(q, stage, offsets, 0, x);
    } else {
      exchange.put(x);
#pragma unroll
      for (uint32_t block = 0; block < Traits::kBlocksK; ++block) {
        typename SpreadK<Traits>::Scores of_block;
        exchange.get(block * exchange.kSlicesPerBlock, exchange.kSlicesPerBlock, of_block);
        scale_scores<Traits>(q, stage, offsets, block, of_block);
#pragma unroll
        for (uint32_t i = 0; i < exchange.kLaneFloats; ++i) {
          float& sum = x[i / Traits::kLaneKeys][i % Traits::kLaneKeys];
          const float block_score = of_block[i / Traits::kLaneKeys][i % Traits::kLaneKeys];
          sum = block == 0 ? block_score : sum + block_score;
        }
      }
    }
  }
}

// Scores as the MMA over K leaves them, to where the MMA over V wants them, through a transpose
// buffer [row][key].
template <class Traits>
inline void transpose_scores(typename SpreadK<Traits>::Scores& from, float* buffer,
                             typename SpreadV<Traits>::Scores& to) {
  using From = SpreadK<Traits>;
  using To = SpreadV<Traits>;
  constexpr uint32_t kPitch = Traits::kStage.keys + 4;
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < From::kCount * From::kKeys; ++i) {
    const uint32_t row = From::row(i / From::kKeys), key = From::key(i % From::kKeys);
    if (row < Traits::kRows)
      buffer[row * kPitch + key] = From::at(from, i / From::kKeys, i % From::kKeys);
  }
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < To::kCount * To::kKeys; ++i) {
    const uint32_t row = To::row(i / To::kKeys), key = To::key(i % To::kKeys);
    To::at(to, i / To::kKeys, i % To::kKeys) = buffer[row * kPitch + key];
  }
}

// A logit in base 2, of a row that has a soft cap or a slope, or of a key that may be hidden from
// it.
inline float masked_logit(const abi::AttentionParams& p, const DecodeProblem& problem,
                          const MaskRow* rows, uint32_t r, uint32_t at, float s) {
  const uint32_t of_walk = problem.walk.key_of(at);
  if (of_walk == DecodeWalk::kNoKey) return minus_infinity();
  if (problem.plain_logits && problem.common.all != 0) return s;
  // Rows of no query see nothing: how many a block has must not show in a key that hides from all.
  if (r >= problem.rows) return minus_infinity();
  const uint32_t key = problem.walk_first + of_walk;
  const MaskRow row = rows[r];
  if (!problem.plain_logits) {
    if (p.soft_cap > 0) s = soft_cap(s, p.soft_cap);
    s = (s + row.slope * (static_cast<float>(static_cast<int32_t>(key)) + row.offset)) * kLog2E;
  }
  return key < row.begin || key >= row.end ? minus_infinity() : s;
}

template <class Traits>
inline void mask_scores(const abi::AttentionParams& p, const DecodeProblem& problem,
                        const MaskRow* rows, uint32_t begin, typename SpreadV<Traits>::Scores& x) {
  using Values = SpreadV<Traits>;
#pragma unroll
  for (uint32_t i = 0; i < Values::kCount * Values::kKeys; ++i) {
    float& s = Values::at(x, i / Values::kKeys, i % Values::kKeys);
    s = masked_logit(p, problem, rows, Values::row(i / Values::kKeys),
                     begin + Traits::key(Values::key(i % Values::kKeys)), s);
  }
}

}  // namespace gyre::cuda
