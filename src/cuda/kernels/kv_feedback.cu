// kv_feedback: rows become calibrated rows, in a calibrated basis and with the error of each
// coordinate fed into those after it. With few tokens a block takes one row: a thread has a
// coordinate of the products with matrices, then, for each scale block, a warp runs the chain of
// one gain while further threads make p. With many: encode_tile.cuh.
#include "cuda/kernels/encode_tile.cuh"
#include "cuda/kernels/feedback.cuh"

namespace gyre::cuda {

// Not a parameter: functions that are not inlined would not know that the memory is shared.
__device__ inline EncodeShared& encode_shared() {
  return *reinterpret_cast<EncodeShared*>(dynamic_shared());
}

// Steps 1 and 2. Returns the bits of the row's largest magnitude.
template <class Source>
__device__ uint32_t load_row_in_transform(const HeadCalibration& calibration, const Source* row,
                                          uint32_t n, bool has_w, Half* f16, EncodeShared& shared) {
  const uint32_t i = threadIdx.x;
  float x[1] = {};
  if (i < n) {
    x[0] = widen(row[i]);
    if (calibration.mean != nullptr) x[0] = x[0] - calibration.mean[i];
  }
  const uint32_t of_warp = __reduce_max_sync(kAllLanes, __float_as_uint(x[0]) & 0x7FFFFFFFu);
  if (i % 32 == 0) shared.largest[i / 32] = of_warp;
  __syncthreads();
  uint32_t largest = 0;
#pragma unroll 1
  for (uint32_t w = 0; w * 32 < n; ++w) largest = larger_of(largest, shared.largest[w]);
  const int exponent = largest < 0x7F800000u ? lost_exponent(largest) : 0;
  lose_exponent(exponent, x);
  if (i < n) shared.y[i] = x[0];
  __syncthreads();
#pragma unroll 1
  for (uint32_t column = i; column < (has_w ? 2 * n : n); column += blockDim.x) {
    if (column >= n) {
      shared.b[1][column - n] = product(calibration.inverse, shared.y, n, column - n, n);
      continue;
    }
    const float b = calibration.matrix != nullptr
                        ? product(calibration.matrix, shared.y, n, column, n)
                        : shared.y[column];
    shared.b[0][column] = b;
    f16[column] = from_float<Half>(b * power_of_two(exponent));
  }
  __syncthreads();
  return largest;
}

// Step 3: signs and transform of b and, behind it, of inverse y.
__device__ inline void rotate_rows(uint32_t n, uint32_t rows, EncodeShared& shared) {
  const RowPlace<kFewSlots> at(n);
  const uint32_t row = threadIdx.x / at.lanes, first = threadIdx.x / 32 * 32 / at.lanes;
  if (first < rows) {  // the same for the whole warp
    float x[kFewSlots][kChunk] = {};
    if (row < rows) load_row(at, shared.b[row], x);
    flip_signs(at, kNativeSigns, x);
    transform<false>(at, x);
    if (row < rows) store_row(at, x, shared.b[row]);
  }
  __syncthreads();
}

// Step 5, a coordinate of the block to a thread. diagonal: the block's.
__device__ inline void make_target(const ScaleBlock& block, const float* diagonal, uint32_t i,
                                   EncodeShared& shared) {
  if (i >= block.n) return;
  const float carried = block.carried != nullptr ? block.carried[i] : 0.0f;
  const float a =
      block.factor != nullptr ? product(block.factor, block.z, block.row_n, i, i, carried) : 0.0f;
  shared.p[i] = diagonal != nullptr ? (block.z[i] + a) * diagonal[i] : block.z[i];
}

__device__ inline uint32_t best_gain(uint32_t gains, const EncodeShared& shared) {
  uint32_t best = 0;
#pragma unroll 1
  for (uint32_t g = 1; g < gains; ++g)
    if (shared.score[g] > shared.score[best]) best = g;
  return best;
}

// What the row's warps know about it.
struct CalibratedPlace {
  uint8_t* row;
  uint32_t n;
  uint32_t stream;
  uint32_t largest;  // bits
  bool has_w;
};

// What the errors of the blocks before `begin` add to the block that begins there. All threads of
// the block come.
__device__ inline void carry_errors(const float* factor, uint32_t n, uint32_t begin,
                                    EncodeShared& shared) {
  __syncthreads();
  if (factor != nullptr && threadIdx.x < abi::kKvScaleBlock)
    shared.carried[threadIdx.x] = product(factor, shared.b[0], n, begin + threadIdx.x, begin);
  __syncthreads();
}

// Steps 4 to 8 of the scale block from `begin` on. A function of its own: inlined side by side for
// two formats they spill.
template <uint32_t kFormat, uint32_t kOwn>
__device__ __noinline__ void code_block(const abi::KvFeedbackStream& s, HeadCalibration calibration,
                                        CalibratedPlace to, uint32_t begin) {
  EncodeShared& shared = encode_shared();
  const uint32_t n = abi::kv_calibrated_block(to.n), gain = threadIdx.x / 32;
  float* const z = shared.b[0] + begin;
  const float* const diagonal =
      calibration.diagonal != nullptr ? calibration.diagonal + begin : nullptr;
  const ScaleBlock block{
      n, to.n, calibration.factor != nullptr ? calibration.factor + begin * (to.n + 1) : nullptr, z,
      begin != 0 && calibration.factor != nullptr ? shared.carried : nullptr};
  float t[kOwn] = {}, f = 0, sum = 0;
  if (gain < s.gains) {
    sum = sum_products(z, z, n);
    f = calibration_factor<kFormat>(sum, z, n) * s.gain[gain];
    error_feedback<kFormat>(block, f, t);
  } else {
    make_target(block, diagonal, threadIdx.x - 32 * s.gains, shared);
  }
  const uint32_t column = (threadIdx.x & 31) * kOwn;
  if (gain < s.gains && column < n) {
#pragma unroll
    for (uint32_t k = 0; k < kOwn; ++k) shared.t[gain][column + k] = t[k];
  }
  __syncthreads();
  const CalibratedSource source{z,  shared.b[to.has_w ? 1 : 0] + begin, shared.p, n, to.largest,
                                sum};
  GainSums sums{};
  if (gain < s.gains) {
    sums = sum_gain<kFormat>(source, diagonal, shared.t[gain], f);
    if ((threadIdx.x & 31) == 0) shared.score[gain] = sums.score();
  }
  __syncthreads();
  if (gain < s.gains && gain == best_gain(s.gains, shared))
    write_calibrated<kFormat>(source, to.stream == kRoleV, shared.t[gain], sums.pm,
                              {to.row, to.n, begin, begin + n < to.n ? z : nullptr});
}

template <class Source, uint32_t kFormat>
__device__ void encode_row(const abi::KvFeedbackParams& p, const Args& args, uint32_t stream,
                           uint64_t row) {
  EncodeShared& shared = encode_shared();
  const abi::KvFeedbackStream& s = p.stream[stream];
  const uint64_t* const at = args.at + kEncodeArgs * stream;
  const uint32_t n = s.head_dim;
  const uint64_t token = row / p.heads, head = row - token * p.heads;
  const HeadCalibration calibration(at, n, head);
  const bool has_w = stream != kRoleV && calibration.inverse != nullptr;
  CalibratedPlace to{pointer<uint8_t>(at[6] + row * abi::kv_calibrated_bytes(n)), n, stream, 0,
                     has_w};
  to.largest = load_row_in_transform(
      calibration,
      pointer<const Source>(at[0] + token * s.source_token_stride + head * s.source_head_stride), n,
      has_w, reinterpret_cast<Half*>(to.row), shared);
  rotate_rows(n, has_w ? 2 : 1, shared);
  if (n <= 32) return code_block<kFormat, 1>(s, calibration, to, 0);
  if (n == 64) return code_block<kFormat, 2>(s, calibration, to, 0);
  if (n == 128) return code_block<kFormat, 4>(s, calibration, to, 0);
#pragma unroll 1
  for (uint32_t begin = 0; begin < n; begin += abi::kKvScaleBlock) {
    if (begin != 0) carry_errors(calibration.factor, n, begin, shared);
    code_block<kFormat, 8>(s, calibration, to, begin);
  }
}

template <class Source, uint32_t kFormat>
__device__ void encode_block(const abi::KvFeedbackParams& p, const Args& args, uint32_t stream,
                             uint64_t index) {
  if (encode_takes_tiles(p)) {
    encode_tile<Source, kFormat>(p, args, stream, index);
  } else {
    encode_row<Source, kFormat>(p, args, stream, index);
  }
}

// A format of 0: that stream is not there.
template <class Source, uint32_t kFormatK, uint32_t kFormatV>
__global__ void __launch_bounds__(kEncodeMaxThreads)
    kv_feedback(const __grid_constant__ abi::KvFeedbackParams p,
                const __grid_constant__ Args args) {
  const uint64_t blocks_k = kFormatK != 0 ? encode_blocks(p, 0, blockDim.x / kEncodeRowThreads) : 0;
  const uint32_t stream = blockIdx.x < blocks_k ? 0 : 1;
  const uint64_t index = blockIdx.x - (stream == 0 ? 0 : blocks_k);
  if (p.tokens < kEncodeTileTokens) {
    const uint32_t n = p.stream[stream].head_dim;
    const HeadCalibration calibration(args.at + kEncodeArgs * stream, n, index % p.heads);
    prefetch_matrix(calibration.matrix, n);
    prefetch_matrix(calibration.factor, n);
    if (stream != kRoleV) prefetch_matrix(calibration.inverse, n);
  }
  pdl_wait();
  pdl_launch_dependents();
  if constexpr (kFormatK == kFormatV) {
    encode_block<Source, kFormatK>(p, args, stream, index);
  } else if (stream == 0) {
    if constexpr (kFormatK != 0) encode_block<Source, kFormatK>(p, args, 0, index);
  } else if constexpr (kFormatV != 0) {
    encode_block<Source, kFormatV>(p, args, 1, index);
  }
}

}  // namespace gyre::cuda
