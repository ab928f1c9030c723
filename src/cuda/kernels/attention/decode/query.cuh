#pragma once
// Decode attention: queries from global memory to MMA operands in shared memory. Over levels a
// query becomes integers of 16 bits, two byte planes as neighbouring columns of B, so that one lane
// gets both sums. Over 16-bit keys it becomes two floats, hi and lo, as rows of A.
#include "cuda/kernels/attention/common/query_values.cuh"
#include "cuda/kernels/attention/common/rotate_row.cuh"
#include "cuda/kernels/attention/common/softmax.cuh"
#include "cuda/kernels/attention/common/typed_memory.cuh"
#include "cuda/kernels/attention/decode/key_reader.cuh"
#include "cuda/kernels/attention/decode/problem.cuh"
#include "cuda/kernels/attention/decode/query_operands.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::cuda {

// Where lane i finds its coordinates i + 32 c of a row's query.
inline const uint8_t* query_address(const abi::AttentionParams& p, const DecodeProblem& problem,
                                    uint64_t q, uint32_t r) {
  const RowPlace at = row_place(problem, r);
  const uint32_t each = p.q_dtype == 0 ? 4 : 2;
  return pointer<const uint8_t>(q + at.token * p.q_token_stride + at.head * p.q_head_stride +
                                threadIdx.x % kWarp * each);
}
template <class Traits>
using QueryBits = uint32_t[Traits::kQueryDim / kWarp];
template <class Traits>
inline void load_query(const uint8_t* from, bool is_f32, QueryBits<Traits>& bits) {
#pragma unroll
  for (uint32_t i = 0; i < Traits::kQueryDim / kWarp; ++i) {
    const bool whole = (i + 1) * kWarp <= Traits::kKeyDim;
    bits[i] = 0;
    if (whole || i * kWarp + threadIdx.x % kWarp < Traits::kKeyDim)
      bits[i] = load_bits(reinterpret_cast<uint64_t>(from), i * kWarp, is_f32);
  }
}

// Coordinates of a query that share a factor, to integers below 2^14 or floats below 2^15 in the
// f32 staging buffer.
template <class Traits, uint32_t kPerLane>
inline void stage_scaled(const abi::AttentionParams& p, const DecodeProblem& problem,
                         const float (&x)[kPerLane], float* row, ScoreFactors& factors) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t max_bits = 0;  // magnitude as bits: numbers that are not finite have the largest
#pragma unroll
  for (uint32_t i = 0; i < kPerLane; ++i) {
    const uint32_t magnitude = __float_as_uint(x[i]) & 0x7FFFFFFFu;
    max_bits = magnitude > max_bits ? magnitude : max_bits;
  }
  const float largest = __uint_as_float(__reduce_max_sync(kAll, max_bits));
  const bool finite = is_finite(largest);
  // 2^14 for f16's range; bf16 has f32's range, and its dot products with large keys must not leave
  // it.
  const int32_t top = Traits::kLevelsK ? 13 : (Traits::kK == kFormatBf16 ? 0 : 14);
  const int32_t up = largest == 0 || !finite ? 0 : top - exponent_of(largest);
#pragma unroll
  for (uint32_t i = 0; i < kPerLane; ++i)
    row[lane + i * kWarp] = finite ? times_power(x[i], up) : 0.0f;
  if (lane == 0) {
    const float scale =
        p.scale * (problem.plain_logits ? kLog2E : 1.0f) * (Traits::kLevelsK ? 0x1p-31f : 1.0f);
    factors = {finite ? power_of_two(-up >> 1) : __uint_as_float(0x7FC00000u),
               power_of_two(-up - (-up >> 1)) * scale, 0};
  }
}

// The scale blocks of a query from kBlock on, each rotated by itself.
template <class Traits, uint32_t kBlock = 0, uint32_t kWhole>
inline void stage_blocks(const abi::AttentionParams& p, const DecodeProblem& problem,
                         const float (&whole)[kWhole], float* row, uint32_t r,
                         RowFactors& factors) {
  constexpr ScaleBlock kOf = scale_block(Traits::kKeyDim, kBlock);
  constexpr uint32_t kPerLane = (kOf.size + kWarp - 1) / kWarp;
  float x[kPerLane];
#pragma unroll
  for (uint32_t i = 0; i < kPerLane; ++i) x[i] = whole[kOf.begin / kWarp + i];
  hadamard_lanes<kOf.size>(threadIdx.x % kWarp, x);
#pragma unroll
  for (uint32_t i = 0; i < kPerLane; ++i) x[i] *= inverse_root(kOf.size);
  stage_scaled<Traits>(p, problem, x, row + kOf.begin, factors[kBlock][r]);
  if constexpr (kBlock + 1 < Traits::kBlocksK)
    stage_blocks<Traits, kBlock + 1>(p, problem, whole, row, r, factors);
}

// A query, or one of its parts, rotated over levels, to the staging buffer of its row.
template <class Traits>
inline void stage_query(const abi::AttentionParams& p, const DecodeProblem& problem,
                        const QueryBits<Traits>& bits, uint32_t part, float* row, uint32_t r,
                        RowFactors& factors) {
  constexpr uint32_t kParts = Traits::kQueryParts;
  constexpr uint32_t kWhole = Traits::kQueryDim / kWarp, kPerLane = kWhole / kParts;
  float whole[kWhole], x[kPerLane];
#pragma unroll
  for (uint32_t i = 0; i < kWhole; ++i) whole[i] = as_float(bits[i], p.q_dtype);
  const uint32_t lane = threadIdx.x % kWarp;
  if constexpr (Traits::kLevelsK) flip_lanes<0>(lane, 1.0f, whole);
  if constexpr (Traits::kLevelsK && !is_round_dim(Traits::kKeyDim)) {
    stage_blocks<Traits>(p, problem, whole, row, r, factors);
    return;
  }
  if constexpr (Traits::kLevelsK) {
    hadamard_block<kParts>(whole, part, lane, x);
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) x[i] *= inverse_root(Traits::kKeyDim);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) x[i] = whole[i];
  }
  stage_scaled<Traits>(p, problem, x, row + part * (Traits::kQueryDim / kParts),
                       factors[part * (Traits::kWarpsPerKey / kParts)][r]);
}

// What the sum of a query's integers, times the bias of LevelForm, adds to its scores.
template <class Form>
inline ScoreFactors biased(const ScoreFactors& of, int32_t sum) {
  float all = 0;
  if (Form::kBias != 0) all = static_cast<float>(__reduce_add_sync(kAll, sum));  // < 2^22
  return {of.first * Form::kStep, of.second, -all * Form::kBias * of.first};
}

// A warp writes one part of a staged query of integers as bytes: the two B columns of its row,
// [four rows][step][lane]. `factors` of the part's first slice become those of all its slices.
// `row` is null past the last row: it gets zeros.
template <class Traits>
inline void write_query_columns(const float* row, uint32_t r, uint32_t block, uint2* to,
                                RowFactors& factors) {
  constexpr uint32_t kDim = Traits::kKeyDim, kSlice = Traits::kKeySlice;
  constexpr uint32_t kSlices = Traits::kWarpsPerKey / Traits::kQueryParts;
  constexpr uint32_t kItems = kDim / 4 / Traits::kQueryParts;
  using Reader = KeyReader<kSlice, Traits::kK, Traits::kManyRows>;
  const uint32_t lane = threadIdx.x % kWarp, first_slice = block * kSlices;
  int32_t sum[kSlices] = {};
#pragma unroll
  for (uint32_t first_item = 0; first_item < kItems; first_item += kWarp) {
    if (first_item + lane >= kItems) break;
    const uint32_t i = block * kItems + first_item + lane;
    const uint32_t half = i % 2, j = i / 2 % 4, step = i / 8;
    uint32_t upper = 0, lower = 0;
    if (row != nullptr) {
      static_assert(Reader::distances_hold());
      const uint32_t slice = step / Reader::kSteps;
      const float* const first =
          row + slice * kSlice + Reader::coordinate(j, step % Reader::kSteps, 4 * half);
      uint32_t x[4];
#pragma unroll
      for (uint32_t place = 0; place < 4; ++place) {
        x[place] = static_cast<uint32_t>(__float2int_rn(first[Reader::place_distance(place)]));
        sum[first_item * 4 / kSlice] += static_cast<int32_t>(x[place]);
      }
      const TwoBytePlanes bytes(x);
      upper = bytes.upper, lower = bytes.lower;
    }
    auto* const words =
        reinterpret_cast<uint32_t*>(to + (r / 4 * (kDim / 32) + step) * kWarp + r % 4 * 8 + j);
    words[half] = upper, words[8 + half] = lower;
  }
  using Form = typename Reader::Form;
  const ScoreFactors of = row == nullptr ? ScoreFactors{} : factors[first_slice][r];
  __syncwarp();
#pragma unroll
  for (uint32_t slice = 0; slice < kSlices; ++slice) {
    const ScoreFactors with = biased<Form>(of, sum[slice]);
    if (lane == 0) factors[first_slice + slice][r] = with;
  }
}

// As above for tiles of K: [four rows][slot][lane], a slot for each step and scale block. A slot
// has zeros where its step has coordinates of another block, or none.
template <class Traits>
inline void write_query_slots(const float* row, uint32_t r, uint2* to, RowFactors& factors) {
  using Reader = TileKeyReader<Traits::kKeyDim, Traits::kK, Traits::kManyRows>;
  constexpr uint32_t kItems = Reader::kSteps * 8, kSlots = Reader::kSteps * Reader::kBlocks;
  const uint32_t lane = threadIdx.x % kWarp;
#pragma unroll
  for (uint32_t block = 0; block < Reader::kBlocks; ++block) {
    const ScaleBlock of = scale_block(Traits::kKeyDim, block);
    int32_t sum = 0;
#pragma unroll 1
    for (uint32_t i = lane; i < kItems; i += kWarp) {
      const uint32_t half = i % 2, j = i / 2 % 4, step = i / 8;
      uint32_t x[4];
#pragma unroll
      for (uint32_t place = 0; place < 4; ++place) {
        const uint32_t at = Reader::coordinate(j, step, 4 * half + place);
        x[place] = 0;
        if (row != nullptr && of.has(at)) x[place] = static_cast<uint32_t>(__float2int_rn(row[at]));
        sum += static_cast<int32_t>(x[place]);
      }
      const TwoBytePlanes bytes(x);
      auto* const words = reinterpret_cast<uint32_t*>(
          to + (r / 4 * kSlots + Reader::slot(step, block)) * kWarp + r % 4 * 8 + j);
      words[half] = bytes.upper, words[8 + half] = bytes.lower;
    }
    const ScoreFactors of_row = row == nullptr ? ScoreFactors{} : factors[block][r];
    __syncwarp();
    const ScoreFactors with = biased<typename Reader::Form>(of_row, sum);
    if (lane == 0) factors[block][r] = with;
  }
}

// One lane's words of an A fragment of 16 coordinates: hi in the first two, lo in the others. Two
// neighbouring steps share a span of 32 coordinates, if there are 32.
template <class Traits>
inline void hi_lo_words(const float* row, uint32_t step, uint32_t j, uint32_t (&words)[4]) {
  using T = typename Float16Type<Traits::kK>::type;
  const bool whole = (step / 2 + 1) * 32 <= Traits::kKeySlice || Traits::kKeySlice % 32 == 0;
  const uint32_t first = step / 2 * 32 + (whole ? 8 * j + step % 2 * 4 : 4 * j);
  words[0] = words[1] = words[2] = words[3] = 0;
#pragma unroll
  for (uint32_t place = 0; place < 4; ++place) {
    const HiLo<T> x(row[first + place]);
    words[place / 2] |= static_cast<uint32_t>(x.hi.bits) << (place % 2 * 16);
    words[2 + place / 2] |= static_cast<uint32_t>(x.lo.bits) << (place % 2 * 16);
  }
}

// A fragments of all queries, [step][fragment][lane]. Up to 8 rows: one, hi as rows 0 to 7 and lo
// as rows 8 to 15. 16 rows: two, hi and lo. Rows past the last repeat real ones.
template <class Traits>
inline void write_query_rows(const float* staging, uint32_t rows, uint4* to) {
  const auto row = [&](uint32_t r) { return staging + r % rows * Traits::kQueryDim; };
  for (uint32_t i = threadIdx.x; i < Traits::kKeyDim / 16 * kWarp; i += blockDim.x) {
    const uint32_t step = i / kWarp, lane = i % kWarp, g = lane / 4;
    uint32_t a[4], b[4];
    hi_lo_words<Traits>(row(g), step, lane % 4, a);
    if constexpr (row_tiles(Traits::kRows) == 1) {
      to[i] = make_uint4(a[0], a[2], a[1], a[3]);
    } else {
      hi_lo_words<Traits>(row(g + 8), step, lane % 4, b);
      to[step * 2 * kWarp + lane] = make_uint4(a[0], b[0], a[1], b[1]);
      to[(step * 2 + 1) * kWarp + lane] = make_uint4(a[2], b[2], a[3], b[3]);
    }
  }
}

// One warp writes the fragments of row r alone.
template <class Traits>
inline void write_query_row(const float* row, uint32_t r, uint4* to) {
  const uint32_t g = r % 8;
#pragma unroll 1
  for (uint32_t i = threadIdx.x % kWarp; i < Traits::kKeyDim / 16 * 4; i += kWarp) {
    const uint32_t step = i / 4, lane = g * 4 + i % 4;
    uint32_t a[4];
    hi_lo_words<Traits>(row, step, i % 4, a);
    if constexpr (row_tiles(Traits::kRows) == 1) {
      to[step * kWarp + lane] = make_uint4(a[0], a[2], a[1], a[3]);
    } else {
      auto* const hi = reinterpret_cast<uint32_t*>(to + step * 2 * kWarp + lane) + r / 8;
      uint32_t* const lo = hi + kWarp * 4;
      hi[0] = a[0], hi[2] = a[1], lo[0] = a[2], lo[2] = a[3];
    }
  }
}

}  // namespace gyre::cuda
