// kv_feedback: see abi/kv_feedback.h, and docs/kv_formats.md, "Calibrated rows", for the steps. x is the
// token, y the head, z the stream. A group has a row, each of its simdgroups a gain.
#include "metal/kernels/calibrated_levels.h"
#include "metal/kernels/encode_work.h"

namespace gyre {
namespace metal {

// What one head's rows are calibrated with; null: not given.
struct HeadCalibration {
  const device float* matrix;
  const device float* inverse;
  const device float* mean;
  const device float* factor;
  const device float* diagonal;
};

// Rows of the group's memory, or a scale block of each.
struct EncodeMemory {
  threadgroup float* y;  // then, for a block, what errors of the blocks before add
  threadgroup float* z;  // y in the basis, then rotated; of blocks that are coded: their errors
  threadgroup float* w;  // the same of inverse y
  threadgroup float* p;
  threadgroup float* scores;   // of gains
  threadgroup float* sums_pm;  // of gains

  EncodeMemory from(uint begin) const {
    return {y + begin, z + begin, w + begin, p + begin, scores, sums_pm};
  }
};

// A scale block of a row.
struct ScaleBlock {
  uint n;  // coordinates
  uint begin;
  uint row_n;                    // of the row: from row to row of the factor
  const device float* factor;    // where the block's rows and columns meet; null: none
  const device float* diagonal;  // null: none

  bool is_first() const { return begin == 0; }
  bool is_last() const { return begin + n == row_n; }
};

struct SharedRow {
  const threadgroup float* at;

  float get(uint coordinate) const { return at[coordinate]; }
};

inline void rotate_shared(threadgroup float* values, uint n, uint lane) {
  const SharedRow from = {values};
  Row row;
  load_row(from, n, lane, row);
  flip_signs(row, kSignsNative, n, lane);
  transform(row, n, lane);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    const uint first = lane_coordinate(j, lane);
    if (first >= n) continue;
    GYRE_UNROLL
    for (uint k = 0; k < 4; ++k) values[first + k] = row.y[j][k];
  }
}

// The largest magnitude, as bits; infinity and NaN are larger than any.
inline uint largest_of_part(const thread CalibratedPart& part) {
  uint largest = 0;
  GYRE_UNROLL
  for (uint k = 0; k < kCalibratedParts; ++k)
    largest = max(largest, as_type<uint>(part.at[k]) & 0x7FFFFFFFu);
  return largest_of_lanes(largest, kPart);
}

// Steps 1 to 3; returns the exponent that y was divided by. largest: of y's magnitudes, as bits.
inline int load_in_transform(const thread HeadCalibration& calibration, const thread TensorRow& source, uint n,
                         const thread EncodeMemory& memory, device uchar* row,
                         const thread Grid& grid, thread uint& largest) {
  for (uint i = grid.index; i < n; i += grid.threads) {
    const float x = source.get(i);
    memory.y[i] = calibration.mean != nullptr ? x - calibration.mean[i] : x;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint size = abi::kv_calibrated_block(n);
  for (uint begin = 0; begin < n; begin += size)
    largest = max(largest, largest_of_part(load_part(memory.y + begin, size, grid.lane)));
  const float magnitude = as_type<float>(largest);
  const bool in_range = magnitude >= 0x1p-30f && magnitude <= 0x1p30f;
  const bool keeps = in_range || largest == 0 || !is_finite(magnitude);
  const int exponent = keeps ? 0 : exponent_of(magnitude);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = grid.index; i < n && exponent != 0; i += grid.threads)
    memory.y[i] = times_power(memory.y[i], -exponent);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = grid.index; i < n; i += grid.threads) {
    const float b =
        calibration.matrix != nullptr ? column_product(calibration.matrix, memory.y, n, n, i, 0.0f) : memory.y[i];
    memory.z[i] = b;
    if (calibration.inverse != nullptr) memory.w[i] = column_product(calibration.inverse, memory.y, n, n, i, 0.0f);
    store_float(row, kF16, i, exponent != 0 ? times_power(b, exponent) : b);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (grid.simdgroup == 0) rotate_shared(memory.z, n, grid.lane);
  if (grid.simdgroup == 1 && calibration.inverse != nullptr) rotate_shared(memory.w, n, grid.lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return exponent;
}

// What the errors of the blocks before add to a coordinate, a coordinate to a thread. memory: of the
// row.
inline void carry_errors(const device float* factor, const thread ScaleBlock& block,
                         const thread EncodeMemory& memory, const thread Grid& grid) {
  for (uint i = block.begin + grid.index; i < block.begin + block.n; i += grid.threads)
    memory.y[i] = column_product(factor, memory.z, block.row_n, block.begin, i, 0.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Step 5, a coordinate to a thread.
inline void make_targets(const thread ScaleBlock& block, const thread EncodeMemory& memory,
                         const thread Grid& grid) {
  for (uint i = grid.index; i < block.n; i += grid.threads) {
    const float z = memory.z[i], carried = block.is_first() ? 0.0f : memory.y[i];
    const float a = block.factor != nullptr
                        ? column_product(block.factor, memory.z, block.row_n, i, i, carried)
                        : 0.0f;
    memory.p[i] = block.diagonal != nullptr ? (z + a) * block.diagonal[i] : z;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Step 7's sums of the simdgroup's gain.
inline void score_gain(const thread ScaleBlock& block, uint format, const thread CalibratedPart& t,
                       float f, const thread EncodeMemory& memory, const thread Grid& grid) {
  const uint n = block.n;
  const CalibratedPart p = load_part(memory.p, n, grid.lane);
  CalibratedPart m;
  GYRE_UNROLL
  for (uint k = 0; k < kCalibratedParts; ++k) {
    const uint i = kLanes * k + grid.lane;
    const float error = t.at[k] - level_near(format, t.at[k]);
    const float weighted = block.diagonal != nullptr && i < n ? error * block.diagonal[i] : error;
    m.at[k] = i < n ? p.at[k] * f - weighted : 0.0f;
  }
  const float sum_pm = sum_products(p, m, n), sum_mm = sum_products(m, m, n);
  if (grid.lane != 0) return;
  memory.scores[grid.simdgroup] = sum_pm * sum_pm / sum_mm;
  memory.sums_pm[grid.simdgroup] = sum_pm;
}

// The first of the largest.
inline uint best_gain(uint gains, const threadgroup float* scores) {
  uint best = 0;
  for (uint g = 1; g < gains; ++g)
    if (scores[g] > scores[best]) best = g;
  return best;
}

inline void store_scale(device uchar* row, const thread ScaleBlock& block, uint bits, uint lane) {
  device uchar* const scale =
      row + abi::kv_calibrated_scale(block.row_n) + 2 * (block.begin / abi::kKvScaleBlock);
  if (lane < 2) scale[lane] = static_cast<uchar>(bits >> (8 * lane));
}

// Codes of a block that has none, and leaves nothing.
inline void store_zeros(device uchar* row, uint format, const thread ScaleBlock& block, uint scale,
                        const thread EncodeMemory& memory, const thread Grid& grid) {
  device uchar* const codes = row + abi::kv_calibrated_codes(block.row_n) + block.begin;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = grid.index; i < block.n; i += grid.threads) {
    codes[i] = static_cast<uchar>(abi::kv_zero_code(format));
    memory.z[i] = 0.0f;
  }
  if (grid.simdgroup == 0) store_scale(row, block, scale, grid.lane);
}

// Step 8 and the codes, by the simdgroup of the gain that is kept.
inline void store_calibrated(uint format, const thread ScaleBlock& block, bool is_v, bool has_w,
                             int exponent, float sum, const thread CalibratedPart& z,
                             const thread CalibratedPart& t, const thread EncodeMemory& memory,
                             device uchar* row, const thread Grid& grid) {
  const uint n = block.n;
  device uchar* const codes = row + abi::kv_calibrated_codes(block.row_n) + block.begin;
  CalibratedPart levels;
  GYRE_UNROLL
  for (uint k = 0; k < kCalibratedParts; ++k) {
    const uint i = kLanes * k + grid.lane;
    levels.at[k] = i < n ? level_near(format, t.at[k]) : 0.0f;
    if (i < n) codes[i] = static_cast<uchar>(code_of_level(format, levels.at[k]));
  }
  const CalibratedPart p = load_part(memory.p, n, grid.lane);
  const CalibratedPart w = load_part(has_w ? memory.w : memory.z, n, grid.lane);
  const float above = is_v ? sum_products(p, p, n) : sum_products(z, w, n);
  const float below = is_v ? memory.sums_pm[grid.simdgroup] : sum_products(levels, w, n);
  const float squares = sum_products(levels, levels, n);
  const float ratio = above > 0.0f && below > 0.0f ? above / below : precise::sqrt(sum / squares);
  const float scale = ratio * level_unit(format) * transform_factor(block.row_n);
  store_scale(row, block, scale_bits(times_power(scale * 0x1p31f, exponent)), grid.lane);
  if (block.is_last()) return;
  GYRE_UNROLL
  for (uint k = 0; k < kCalibratedParts; ++k) {
    const uint i = kLanes * k + grid.lane;
    if (i < n) memory.z[i] = fma(levels.at[k], -ratio, z.at[k]);
  }
}

// Steps 4 to 8 of a scale block. memory: of the block.
inline void encode_block(constant abi::KvFeedbackStream& s, uint format, bool is_v, bool has_w,
                         const thread ScaleBlock& block, int exponent,
                         const thread EncodeMemory& memory, device uchar* row,
                         const thread Grid& grid) {
  const uint n = block.n;
  const CalibratedPart z = load_part(memory.z, n, grid.lane);
  const float sum = sum_products(z, z, n);
  if (sum == 0.0f || !is_finite(sum)) {  // the same for the whole group
    store_zeros(row, format, block, sum == 0.0f ? 0u : uint(abi::kKvScaleNaN), memory, grid);
    return;
  }
  make_targets(block, memory, grid);
  const abi::KvCodec codec = abi::kv_codec(format);
  const float root = codec.levels == abi::KvLevels::magnitudes
                         ? precise::sqrt(sum * (1.0f / static_cast<float>(n)))
                         : as_type<float>(largest_of_part(z));
  CalibratedPart t = z;
  if (grid.simdgroup < s.gains) {
    const float f = codec.gain / root * s.gain[grid.simdgroup];
    CalibratedPart v, a;
    GYRE_UNROLL
    for (uint k = 0; k < kCalibratedParts; ++k) {
      const uint i = kLanes * k + grid.lane;
      v.at[k] = z.at[k] * f;
      a.at[k] = !block.is_first() && block.factor != nullptr && i < n ? memory.y[i] * f : 0.0f;
    }
    t = error_feedback(format, block.factor, block.row_n, v, a, n, grid.lane);
    score_gain(block, format, t, f, memory, grid);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (grid.simdgroup < s.gains && grid.simdgroup == best_gain(s.gains, memory.scores))
    store_calibrated(format, block, is_v, has_w, exponent, sum, z, t, memory, row, grid);
}

inline void encode_source(constant abi::KvFeedbackStream& s, uint format, bool is_v,
                          const thread HeadCalibration& calibration, const thread TensorRow& source,
                          device uchar* row, const thread Grid& grid) {
  const uint n = s.head_dim;
  threadgroup float* const floats = reinterpret_cast<threadgroup float*>(grid.shared);
  const EncodeMemory memory = {floats,         floats + n,     floats + 2 * n,
                               floats + 3 * n, floats + 4 * n, floats + 4 * n + abi::kKvMaxGains};
  uint largest = 0;
  const int exponent = load_in_transform(calibration, source, n, memory, row, grid, largest);
  ScaleBlock block = {abi::kv_calibrated_block(n), 0, n, calibration.factor, calibration.diagonal};
  for (; block.begin < n; block.begin += block.n) {
    const EncodeMemory of_block = memory.from(block.begin);
    if (largest == 0 || largest >= 0x7F800000u) {  // the same for the whole group
      store_zeros(row, format, block, largest == 0 ? 0u : uint(abi::kKvScaleNaN), of_block, grid);
      continue;
    }
    if (!block.is_first()) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (calibration.factor != nullptr) {
        block.factor = calibration.factor + block.begin * (n + 1);
        block.diagonal = calibration.diagonal + block.begin;
        carry_errors(calibration.factor, block, memory, grid);
      }
    }
    encode_block(s, format, is_v, calibration.inverse != nullptr, block, exponent, of_block, row, grid);
  }
}

// What a head has of an argument, in floats; null: it is not there.
inline const device float* of_head(const device uchar* argument, bool present, ulong offset) {
  return present ? pointer<float>(argument) + offset : nullptr;
}

}  // namespace metal
}  // namespace gyre

kernel void kv_feedback(
    constant gyre::abi::KvFeedbackParams& p [[buffer(0)]], const device uchar* k [[buffer(1)]],
    const device uchar* k_matrix [[buffer(2)]], const device uchar* k_inverse [[buffer(3)]],
    const device uchar* k_mean [[buffer(4)]], const device uchar* k_factor [[buffer(5)]],
    const device uchar* k_diagonal [[buffer(6)]], device uchar* k_calibrated [[buffer(7)]],
    const device uchar* v [[buffer(8)]], const device uchar* v_matrix [[buffer(9)]],
    const device uchar* v_inverse [[buffer(10)]], const device uchar* v_mean [[buffer(11)]],
    const device uchar* v_factor [[buffer(12)]], const device uchar* v_diagonal [[buffer(13)]],
    device uchar* v_calibrated [[buffer(14)]], GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const bool is_v = spec_byte(1) == 0 || group.z == 1;
  constant gyre::abi::KvFeedbackStream& s = p.stream[is_v ? 1 : 0];
  const uint n = s.head_dim, first = is_v ? 7 : 0;  // of the stream's arguments
  const ulong head = group.y, square = head * n * n;
  const HeadCalibration calibration = {
      of_head(is_v ? v_matrix : k_matrix, grid.has(first + 1), square),
      // Only K's scales need it.
      of_head(k_inverse, !is_v && grid.has(2), square),
      of_head(is_v ? v_mean : k_mean, grid.has(first + 3), head * n),
      of_head(is_v ? v_factor : k_factor, grid.has(first + 4), square),
      of_head(is_v ? v_diagonal : k_diagonal, grid.has(first + 5), head * n)};
  const TensorRow source = {
      (is_v ? v : k) + group.x * s.source_token_stride + head * s.source_head_stride, spec_byte(0)};
  device uchar* const row =
      (is_v ? v_calibrated : k_calibrated) + (group.x * p.heads + head) * gyre::abi::kv_calibrated_bytes(n);
  encode_source(s, spec_byte(is_v ? 2 : 1), is_v, calibration, source, row, grid);
}
