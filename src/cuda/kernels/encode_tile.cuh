#pragma once
// kv_feedback with many tokens: a block takes a tile of rows of one head. Their products with the
// head's matrices are one matrix product. Each chain of error feedback, a row at a gain, is a
// thread's, a slab of columns at a time: what earlier coordinates add to a slab is a matrix product
// again. Sums are in the order of docs/kv_formats.md. Products are bound by what shared memory and
// the L1 return, so a thread has 4 x 4 of their sums.
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/calibrated_finish.cuh"
#include "cuda/kernels/dense_row.cuh"
#include "cuda/kernels/encode_work.cuh"
#include "cuda/kernels/kernel_args.cuh"
#include "cuda/kernels/matrix.cuh"

namespace gyre::cuda {

struct EncodeTile {
  uint32_t n, rows, gains, stride;
  float* slab;    // two of [n][kEncodeSlab]
  float* y;       // [rows][stride]; later p
  float* z;       // [rows][stride]; in the basis first, then rotated
  float* w;       // [rows][stride], behind z
  float* error;   // [gains][rows][stride]
  float* target;  // [gains][rows][stride]
  float* before;  // [gains + 1][rows][kEncodeSlab + 1]: what earlier coordinates add to the slab

  __device__ EncodeTile(uint32_t dim, uint32_t tile_rows, uint32_t gain_count)
      : n(dim), rows(tile_rows), gains(gain_count), stride(encode_stride(dim)) {
    slab = reinterpret_cast<float*>(dynamic_shared());
    y = slab + 2 * kEncodeSlab * n;
    z = y + rows * stride;
    w = z + rows * stride;
    error = w + rows * stride;
    target = error + gains * rows * stride;
    before = target + gains * rows * stride;
  }
};

// Facts about the tile's rows.
struct TileRows {
  uint32_t largest[kEncodeMaxTileRows];  // bits
  float sum[kEncodeMaxTileRows];         // of z z
  float factor[kEncodeMaxTileRows];
};
__device__ inline TileRows& tile_rows() {
  __shared__ TileRows rows;
  return rows;
}

// Step 1, 16 threads to a row. Rows behind the last are zeros.
template <class Source>
__device__ void load_tile(const EncodeTile& tile, const float* mean, const Source* from,
                          bool exists) {
  constexpr uint32_t kThreadCoordinates = abi::kKvScaleBlock / kEncodeRowThreads;
  const uint32_t row = threadIdx.x / kEncodeRowThreads, lane = threadIdx.x % kEncodeRowThreads;
  float x[kThreadCoordinates];
  uint32_t largest = 0;
#pragma unroll
  for (uint32_t k = 0; k < kThreadCoordinates; ++k) {
    const uint32_t i = lane + k * kEncodeRowThreads;
    x[k] = exists && i < tile.n ? widen(from[i]) : 0.0f;
    if (mean != nullptr && exists && i < tile.n) x[k] = x[k] - mean[i];
    largest = larger_of(largest, __float_as_uint(x[k]) & 0x7FFFFFFFu);
  }
#pragma unroll
  for (int half = kEncodeRowThreads / 2; half != 0; half /= 2)
    largest = larger_of(largest, __shfl_xor_sync(kAllLanes, largest, half));
  if (lane == 0) tile_rows().largest[row] = largest;
  lose_exponent(largest < 0x7F800000u ? lost_exponent(largest) : 0, x);
#pragma unroll
  for (uint32_t k = 0; k < kThreadCoordinates; ++k) {
    const uint32_t i = lane + k * kEncodeRowThreads;
    if (i < tile.n) tile.y[row * tile.stride + i] = x[k];
  }
}

// sum += entry x: 4 columns of a row of the matrix, 4 rows.
__device__ inline void add_products(const float (&entry)[4], const float (&x)[4],
                                    float (&sum)[4][4]) {
#pragma unroll
  for (uint32_t r = 0; r < 4; ++r) {
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) sum[r][c] = __fmaf_rn(entry[c], x[r], sum[r][c]);
  }
}

__device__ inline void store_sums(const float (&sum)[4][4], float* to, uint32_t stride) {
#pragma unroll
  for (uint32_t k = 0; k < 16; ++k) to[k / 4 * stride + k % 4] = sum[k / 4][k % 4];
}

// Step 2, by `threads` threads.
template <bool kWide>
__device__ void multiply_tile(const EncodeTile& tile, const float* matrix, float* out,
                              uint32_t thread, uint32_t threads) {
  const uint32_t n = tile.n, columns = n / 4;
#pragma unroll 1
  for (uint32_t i = thread; i < columns * (tile.rows / 4); i += threads) {
    const uint32_t row = i / columns * 4, column = i % columns * 4;
    const float* const y = tile.y + row * tile.stride;
    float sum[4][4] = {};
#pragma unroll 8
    for (uint32_t j = 0; j < n; ++j) {
      float entry[4], x[4];
      load_entries<kWide>(matrix + j * n + column, entry);
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) x[r] = y[r * tile.stride + j];
      add_products(entry, x, sum);
    }
    store_sums(sum, out + row * tile.stride + column, tile.stride);
  }
}
__device__ inline void multiply_tile(const EncodeTile& tile, const float* matrix, float* out,
                                     uint32_t thread, uint32_t threads) {
  if (is_aligned(matrix, 16)) {
    multiply_tile<true>(tile, matrix, out, thread, threads);
  } else {
    multiply_tile<false>(tile, matrix, out, thread, threads);
  }
}

// Step 3 of z's rows and, where they are others, of w's. Before it z's are what sink tokens and
// tail keep: `calibrated` is the calibrated row of the tile's first, `bytes` from a row to the
// next.
__device__ inline void rotate_tile(const EncodeTile& tile, bool has_w, uint32_t present,
                                   uint8_t* calibrated, uint64_t bytes) {
  const RowPlace<1> at(tile.n);
  const uint32_t rows = has_w ? 2 * tile.rows : tile.rows, each = blockDim.x / at.lanes;
#pragma unroll 1
  for (uint32_t first = 0; first < rows; first += each) {
    const uint32_t row = first + threadIdx.x / at.lanes;
    float x[1][kChunk] = {};
    if (row < rows) load_row(at, tile.z + row * tile.stride, x);
    if (row < present) {
      const uint32_t largest = tile_rows().largest[row];
      const float power = power_of_two(largest < 0x7F800000u ? lost_exponent(largest) : 0);
      float f16[1][kChunk];
#pragma unroll
      for (uint32_t i = 0; i < kChunk; ++i) f16[0][i] = x[0][i] * power;
      store_row(at, f16, reinterpret_cast<Half*>(calibrated + row * bytes));
    }
    flip_signs(at, kNativeSigns, x);
    transform<false>(at, x);
    if (row < rows) store_row(at, x, tile.z + row * tile.stride);
  }
}

// Columns [column, column + kEncodeSlab) of the factor's rows up to there.
__device__ inline void fetch_slab(const EncodeTile& tile, const float* factor, uint32_t column) {
  float* const to = tile.slab + column / kEncodeSlab % 2 * kEncodeSlab * tile.n;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < (column + kEncodeSlab) * kEncodeSlab; i += blockDim.x)
    copy_async<4>(shared_address(to + i),
                  factor + i / kEncodeSlab * tile.n + column + i % kEncodeSlab, true);
  copy_commit();
}

// What the coordinates before a slab's first column add to it, for every chain.
__device__ inline void sum_before(const EncodeTile& tile, uint32_t column, const float* slab) {
  constexpr uint32_t kParts = kEncodeSlab / 4;
  const uint32_t chains = (tile.gains + 1) * tile.rows;
#pragma unroll 1
  for (uint32_t item = threadIdx.x; item < chains / 4 * kParts; item += blockDim.x) {
    const uint32_t chain = item / kParts * 4, part = item % kParts * 4;
    const float* const from = chain < tile.gains * tile.rows
                                  ? tile.error + chain * tile.stride
                                  : tile.z + (chain - tile.gains * tile.rows) * tile.stride;
    float sum[4][4] = {};
#pragma unroll 8
    for (uint32_t i = 0; i < column; ++i) {
      float entry[4], x[4];
      load_entries<true>(slab + i * kEncodeSlab + part, entry);
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) x[r] = from[r * tile.stride + i];
      add_products(entry, x, sum);
    }
    store_sums(sum, tile.before + chain * (kEncodeSlab + 1) + part, kEncodeSlab + 1);
  }
}

// Steps 5 and 6 of a slab: a thread has a row at one gain, or the row's p, whose chain has z where
// the others have errors. slab: null without a factor.
template <uint32_t kFormat>
__device__ void code_slab(const EncodeTile& tile, bool is_weighted, float f, uint32_t column,
                          const float* slab) {
  const uint32_t row = threadIdx.x % tile.rows, set = threadIdx.x / tile.rows;
  const bool is_p = set == tile.gains;
  const float* const z = tile.z + row * tile.stride + column;
  const uint32_t chain = threadIdx.x * tile.stride + column;
  float* const to = is_p ? tile.y + row * tile.stride + column : tile.error + chain;
  float a[kEncodeSlab];
#pragma unroll
  for (uint32_t k = 0; k < kEncodeSlab; ++k)
    a[k] = slab != nullptr ? tile.before[threadIdx.x * (kEncodeSlab + 1) + k] : 0.0f;
#pragma unroll
  for (uint32_t k = 0; k < kEncodeSlab; ++k) {
    const float x = z[k], v = x * f, t = v + a[k];
    const float left = is_p ? x : v - level_of<kFormat>(t);
    const float p = is_weighted ? x + a[k] : x;  // times its weight: apply_diagonal
    to[k] = is_p ? p : left;
    if (!is_p) tile.target[chain + k] = t;
    if (slab == nullptr) continue;
    float entry[kEncodeSlab];
    load_entries<true>(slab + (column + k) * kEncodeSlab, entry);
#pragma unroll
    for (uint32_t later = k + 1; later < kEncodeSlab; ++later)
      a[later] = __fmaf_rn(entry[later], left, a[later]);
  }
}

template <uint32_t kFormat>
__device__ void run_chains(const EncodeTile& tile, const HeadCalibration& calibration,
                           const float* gains) {
  const uint32_t set = threadIdx.x / tile.rows;
  const float f =
      set < tile.gains ? tile_rows().factor[threadIdx.x % tile.rows] * gains[set] : 1.0f;
  const bool has_factor = calibration.factor != nullptr;
  if (has_factor) fetch_slab(tile, calibration.factor, 0);
#pragma unroll 1
  for (uint32_t column = 0; column < tile.n; column += kEncodeSlab) {
    copy_wait<0>();
    __syncthreads();
    const float* const slab =
        has_factor ? tile.slab + column / kEncodeSlab % 2 * kEncodeSlab * tile.n : nullptr;
    if (has_factor) {
      if (column + kEncodeSlab < tile.n) fetch_slab(tile, calibration.factor, column + kEncodeSlab);
      sum_before(tile, column, slab);
      __syncthreads();
    }
    if (set <= tile.gains)
      code_slab<kFormat>(tile, calibration.diagonal != nullptr, f, column, slab);
  }
}

// The end of step 5.
__device__ inline void apply_diagonal(const EncodeTile& tile, const float* diagonal) {
  if (diagonal == nullptr) return;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < tile.rows * tile.n; i += blockDim.x) {
    const uint32_t row = i / tile.n, column = i % tile.n;
    tile.y[row * tile.stride + column] = tile.y[row * tile.stride + column] * diagonal[column];
  }
  __syncthreads();
}

// Step 4, a warp to a row.
template <uint32_t kFormat>
__device__ void find_factors(const EncodeTile& tile) {
#pragma unroll 1
  for (uint32_t row = threadIdx.x / 32; row < tile.rows; row += blockDim.x / 32) {
    const float* const z = tile.z + row * tile.stride;
    const float sum = sum_products(z, z, tile.n);
    const float factor = calibration_factor<kFormat>(sum, z, tile.n);
    if (threadIdx.x % 32 == 0) tile_rows().sum[row] = sum, tile_rows().factor[row] = factor;
  }
}

// Steps 7 and 8, a warp to a row.
template <uint32_t kFormat>
__device__ void finish_row(const EncodeTile& tile, const abi::KvFeedbackStream& s,
                           const float* diagonal, uint32_t row, bool is_v, bool has_w,
                           uint8_t* to) {
  const uint32_t at = row * tile.stride;
  const CalibratedSource source{tile.z + at, (has_w ? tile.w : tile.z) + at, tile.y + at,
                                tile.n,      tile_rows().largest[row],       tile_rows().sum[row]};
  float best = 0, pm = 0;
  const float* kept = tile.target + at;
#pragma unroll 1
  for (uint32_t gain = 0; gain < tile.gains; ++gain) {
    const float* const t = tile.target + gain * tile.rows * tile.stride + at;
    const GainSums sums =
        sum_gain<kFormat>(source, diagonal, t, tile_rows().factor[row] * s.gain[gain]);
    const float score = sums.score();
    if (gain == 0 || score > best) best = score, pm = sums.pm, kept = t;
  }
  write_calibrated<kFormat>(source, is_v, kept, pm, {to, tile.n, 0, nullptr});
}

// A function of its own, as code_rotated.
template <class Source, uint32_t kFormat>
__device__ __noinline__ void encode_tile(const abi::KvFeedbackParams& p, const Args& args,
                                         uint32_t stream, uint64_t index) {
  const abi::KvFeedbackStream& s = p.stream[stream];
  const uint64_t* const at = args.at + kEncodeArgs * stream;
  const uint32_t rows = blockDim.x / kEncodeRowThreads;
  const uint64_t head = index % p.heads, first = index / p.heads * rows;
  const auto present = static_cast<uint32_t>(p.tokens - first < rows ? p.tokens - first : rows);
  const EncodeTile tile(s.head_dim, rows, s.gains);
  const HeadCalibration calibration(at, s.head_dim, head);
  const bool is_v = stream == kRoleV, has_w = !is_v && calibration.inverse != nullptr;
  const uint64_t row_bytes = abi::kv_calibrated_bytes(s.head_dim);
  auto* const calibrated = pointer<uint8_t>(at[6] + (first * p.heads + head) * row_bytes);
  const uint32_t row = threadIdx.x / kEncodeRowThreads;
  load_tile(tile, calibration.mean,
            pointer<const Source>(at[0] + (first + row) * s.source_token_stride +
                                  head * s.source_head_stride),
            row < present);
  __syncthreads();
  if (calibration.matrix != nullptr) {
    // Half of the threads to each matrix.
    const uint32_t threads = has_w ? blockDim.x / 2 : blockDim.x, half = threadIdx.x / threads;
    multiply_tile(tile, half == 0 ? calibration.matrix : calibration.inverse,
                  half == 0 ? tile.z : tile.w, threadIdx.x % threads, threads);
  } else {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < rows * tile.stride; i += blockDim.x) tile.z[i] = tile.y[i];
  }
  __syncthreads();
  rotate_tile(tile, has_w, present, calibrated, p.heads * row_bytes);
  __syncthreads();
  find_factors<kFormat>(tile);
  __syncthreads();
  run_chains<kFormat>(tile, calibration, s.gain);
  __syncthreads();
  apply_diagonal(tile, calibration.diagonal);
#pragma unroll 1
  for (uint32_t i = threadIdx.x / 32; i < present; i += blockDim.x / 32)
    finish_row<kFormat>(tile, s, calibration.diagonal, i, is_v, has_w,
                        calibrated + i * p.heads * row_bytes);
}

}  // namespace gyre::cuda
