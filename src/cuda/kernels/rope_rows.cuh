#pragma once
// Rotating (and normalising) rows: one or two heads of a token by some lanes of a warp, each with
// runs of 16 bytes of u and of v.
#include "abi/rope.h"
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/rope_angles.cuh"

namespace gyre::cuda {

// Heads of one token that the same lanes rotate.
struct RopeItem {
  uint32_t stream;
  uint32_t rows;  // of them; 0: a item beyond the end
  uint64_t x, out, second, weight;
  uint64_t x_step, out_step, second_step;
};

// A run of kRun pairs: where its halves are. Adjacent pairs lie side by side.
struct RopeOffsets {
  uint32_t pair, u, v;
};

// One of every row of a item.
template <class In, uint32_t kRun>
struct RopeRun {
  Words<In, 2 * kRun> of[kRopeRows];
};

// Whether runs of kRun pairs, between rows that do, begin at multiples of 16 bytes.
template <bool kAdjacent, uint32_t kRun>
__device__ bool are_rope_runs(const abi::RopeParams& p) {
  return (kAdjacent ? p.block_pairs : p.block_pairs | p.distance | p.block_stride) % kRun == 0;
}

// Angle: where the sines and cosines of the item's token come from. kStaged: out is not in global
// memory.
template <class In, class Out, bool kAdjacent, bool kNorm, class Angle, bool kStaged = false>
struct Rope {
  const abi::RopeParams& p;
  const RopeItem& item;
  const Angle& angles;
  uint32_t lane, lanes;
  float scale[kRopeRows];

  __device__ const In* x_row(uint32_t r) const {
    return pointer<const In>(item.x + r * item.x_step);
  }
  __device__ Out* out_row(uint32_t r) const {
    if constexpr (kStaged) return reinterpret_cast<Out*>(item.out + r * item.out_step);
    if constexpr (!kStaged) return pointer<Out>(item.out + r * item.out_step);
  }

  template <uint32_t kRun>
  __device__ void store(const float (&v)[kRun], uint32_t r, uint32_t at) const {
    Out* const to = out_row(r) + at;
    if constexpr (kRun <= 2) {  // a single pair
#pragma unroll
      for (uint32_t i = 0; i < kRun; ++i) to[i] = from_float<Out>(v[i]);
    } else {
      store_wide(v, to);
    }
    if constexpr (kNorm) {
      if (item.second == 0) return;
      const uint64_t row = item.second + r * item.second_step;
      const uint32_t dtype = p.stream[item.stream].second_dtype;
      if (dtype == 0) store_floats(v, pointer<float>(row) + at);
      if (dtype == 1) store_floats(v, pointer<Half>(row) + at);
      if (dtype == 2) store_floats(v, pointer<BFloat16>(row) + at);
    }
  }

  template <uint32_t kRun>
  __device__ void load_row(uint32_t r, const RopeOffsets& at, Words<In, 2 * kRun>& words) const {
    const In* const row = x_row(r);
    if constexpr (kRun == 1) {
      const Pack<In, 2> two = {{row[at.u], row[kAdjacent ? at.u + 1 : at.v]}};
      words.of[0] = reinterpret_cast<const uint32_t*>(&two)[0];
      if constexpr (sizeof(In) == 4) words.of[1] = reinterpret_cast<const uint32_t*>(&two)[1];
    } else if constexpr (kAdjacent) {
      load_wide<2 * kRun>(row + at.u, 0, words);
    } else {
      load_wide<kRun>(row + at.u, 0, words);
      load_wide<kRun>(row + at.v, words.kWords / 2, words);
    }
  }

  template <uint32_t kRun>
  __device__ void rotate_row(uint32_t r, const RopeOffsets& at, const Words<In, 2 * kRun>& words,
                             const Angles<kRun>& angle, const float (&weights)[2][kRun]) const {
    float rotated[2 * kRun];
#pragma unroll
    for (uint32_t i = 0; i < kRun; ++i) {
      float a = words.element(kAdjacent ? 2 * i : i);
      float b = words.element(kAdjacent ? 2 * i + 1 : kRun + i);
      float cosine_u = angle.cosine[i], cosine_v = cosine_u;
      float sine_u = angle.sine[i], sine_v = sine_u;
      if constexpr (kNorm) {
        a = a * scale[r], b = b * scale[r];
        cosine_u *= weights[0][i], cosine_v *= weights[1][i];
        sine_u *= weights[0][i], sine_v *= weights[1][i];
      }
      rotated[kAdjacent ? 2 * i : i] = __fmaf_rn(-b, sine_v, a * cosine_u);
      rotated[kAdjacent ? 2 * i + 1 : kRun + i] = __fmaf_rn(a, sine_u, b * cosine_v);
    }
    if constexpr (kAdjacent) {
      store(rotated, r, at.u);
    } else {
      float half[kRun];
#pragma unroll
      for (uint32_t i = 0; i < kRun; ++i) half[i] = rotated[i];
      store(half, r, at.u);
#pragma unroll
      for (uint32_t i = 0; i < kRun; ++i) half[i] = rotated[kRun + i];
      store(half, r, at.v);
    }
  }

  template <class Weight, uint32_t kCount>
  __device__ void load_weights_of(uint32_t at, float (&weights)[kCount]) const {
    load_floats(pointer<const Weight>(item.weight) + at, weights);
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) weights[i] += p.weight_offset;
  }

  // Without weights everything is multiplied by 1: there is nothing to offset.
  template <uint32_t kCount>
  __device__ void load_weights(uint32_t at, float (&weights)[kCount]) const {
    const uint32_t dtype = p.stream[item.stream].weight_dtype;
    if (dtype == 0) return load_weights_of<float>(at, weights);
    if (dtype == 1) return load_weights_of<Half>(at, weights);
    if (dtype == 2) return load_weights_of<BFloat16>(at, weights);
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) weights[i] = 1.0f;
  }

  template <uint32_t kRun>
  __device__ void load_weights(const RopeOffsets& at, float (&weights)[2][kRun]) const {
    if constexpr (kAdjacent) {
      float interleaved[2 * kRun];
      load_weights(at.u, interleaved);
#pragma unroll
      for (uint32_t i = 0; i < kRun; ++i)
        weights[0][i] = interleaved[2 * i], weights[1][i] = interleaved[2 * i + 1];
    } else {
      load_weights(at.u, weights[0]), load_weights(at.v, weights[1]);
    }
  }

  template <uint32_t kRun>
  __device__ RopeOffsets offsets_of(uint32_t n) const {
    const uint32_t runs = static_cast<uint32_t>(p.block_pairs) / kRun;
    const uint32_t block = p.blocks == 1 ? 0 : n / runs, i = (n - block * runs) * kRun;
    const uint32_t u = kAdjacent ? 2 * i : block * static_cast<uint32_t>(p.block_stride) + i;
    return {block * static_cast<uint32_t>(p.block_pairs) + i, u,
            u + static_cast<uint32_t>(p.distance)};
  }

  template <uint32_t kRun>
  __device__ void load_rows(const RopeOffsets& at, RopeRun<In, kRun>& run) const {
#pragma unroll
    for (uint32_t r = 0; r < kRopeRows; ++r) {
      if (r < item.rows) load_row<kRun>(r, at, run.of[r]);
    }
  }

  template <uint32_t kRun>
  __device__ void rotate_rows(const RopeOffsets& at, const RopeRun<In, kRun>& run) const {
    Angles<kRun> angle;
    angles.get(at.pair, angle);
    rotate_rows(at, run, angle);
  }
  template <uint32_t kRun>
  __device__ void rotate_rows(const RopeOffsets& at, const RopeRun<In, kRun>& run,
                              const Angles<kRun>& angle) const {
    float weights[2][kRun];
    if constexpr (kNorm) load_weights(at, weights);
#pragma unroll
    for (uint32_t r = 0; r < kRopeRows; ++r) {
      if (r < item.rows) rotate_row<kRun>(r, at, run.of[r], angle, weights);
    }
  }

  // From run n on.
  template <uint32_t kRun>
  __device__ void rotate(uint32_t n) const {
#pragma unroll 1
    for (; n < rope_pairs(p) / kRun; n += lanes) {
      RopeRun<In, kRun> run;
      const RopeOffsets at = offsets_of<kRun>(n);
      load_rows<kRun>(at, run);
      rotate_rows<kRun>(at, run);
    }
  }

  // Coordinates [begin, end) that are not rotated.
  __device__ void pass(uint32_t begin, uint32_t end) const {
    if (!kNorm && item.x == item.out) return;
#pragma unroll
    for (uint32_t r = 0; r < kRopeRows; ++r) {
      if (r >= item.rows) break;
      for (uint32_t i = begin + lane; i < end; i += lanes) {
        if constexpr (kNorm) {
          float weight[1];
          load_weights(i, weight);
          const float v[1] = {widen(x_row(r)[i]) * scale[r] * weight[0]};
          store(v, r, i);
        } else {
          copy_elements<In, Out, 1>(x_row(r) + i, out_row(r) + i);
        }
      }
    }
  }

  // All of them.
  __device__ void copy_unrotated() const {
    const auto dim = static_cast<uint32_t>(p.head_dim),
               rotated = static_cast<uint32_t>(p.block_pairs);
    if constexpr (kAdjacent) {
      pass(2 * rotated, dim);
    } else if (p.blocks == 1) {
      const auto distance = static_cast<uint32_t>(p.distance);
      pass(rotated, distance);
      pass(distance + rotated, dim);
    }
  }

  // 1 / sqrt(mean(x^2) + epsilon). Squares leave f32 long before their root does: a sum that
  // overflowed, or that is so small that squares were lost, is taken again in double precision.
  __device__ void find_scales() {
    constexpr uint32_t kRun = 8;
    const uint64_t count = p.head_dim;
#pragma unroll
    for (uint32_t r = 0; r < kRopeRows; ++r) {
      float sum = 0;
      if (r < item.rows) {
        for (uint64_t i = uint64_t{lane} * kRun; i + kRun <= count; i += lanes * kRun) {
          float x[kRun];
          load_floats(x_row(r) + i, x);
#pragma unroll
          for (uint32_t j = 0; j < kRun; ++j) sum = __fmaf_rn(x[j], x[j], sum);
        }
        for (uint64_t i = count / kRun * kRun + lane; i < count; i += lanes) {
          const float x = widen(x_row(r)[i]);
          sum = __fmaf_rn(x, x, sum);
        }
      }
      for (uint32_t step = 1; step < lanes; step *= 2)
        sum += __shfl_xor_sync(kAllLanes, sum, static_cast<int>(step));
      const float mean = sum / static_cast<float>(count);
      scale[r] = __fdiv_rn(1.0f, __fsqrt_rn(mean + p.epsilon));
      const bool wide = r < item.rows && !(sum >= 0x1p-100f && sum <= 0x1p127f);
      if (__any_sync(kAllLanes, wide ? 1 : 0) != 0) {
        const float exact = wide_scale(r);
        if (wide) scale[r] = exact;
      }
    }
  }

  __device__ float wide_scale(uint32_t r) const {
    double sum = 0;
    for (uint64_t i = lane; r < item.rows && i < p.head_dim; i += lanes) {
      const double x = widen(x_row(r)[i]);
      sum += x * x;
    }
    for (uint32_t step = 1; step < lanes; step *= 2)
      sum += __shfl_xor_sync(kAllLanes, sum, static_cast<int>(step));
    return static_cast<float>(
        1.0 / sqrt(sum / static_cast<double>(p.head_dim) + static_cast<double>(p.epsilon)));
  }
};

}  // namespace gyre::cuda
