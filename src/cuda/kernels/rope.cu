// rope and norm_rope:
//   turn(p) = position(axis(p)) * frequency(p)  mod 1    64-bit fixed point, the upper 32 bits are
//   used; (u, v) -> (u cos - v sin, u sin + v cos)       f32, rounded once when stored
// A unit is up to four heads of one token, which share their sines and cosines: 1 to 32 lanes of a
// warp, each with runs of 16 bytes of u and of v. A block is 256 threads. Every byte of x is read
// once (a second time, from near, with the norm), every byte of out written once.
#include "abi/rope.h"
#include "cuda/kernels/args.cuh"
#include "cuda/kernels/rope_angles.cuh"

namespace gyre::cuda {

// The heads of a unit.
struct RopeUnit {
  uint64_t token;
  uint32_t stream;
  uint32_t rows;  // of them; 0: a unit beyond the end
  uint64_t x, out, second, weight;
  uint64_t x_step, out_step, second_step;

  __device__ RopeUnit(const abi::RopeParams& p, const Args& args, uint64_t unit) {
    const uint64_t first = rope_groups(p, 0), groups = first + rope_groups(p, 1);
    token = unit / groups;
    uint64_t group = unit - token * groups;
    stream = group < first ? 0 : 1;
    if (stream == 1) group -= first;
    const abi::RopeStream& s = p.stream[stream];
    const uint64_t head = group * kRopeRows, left = s.heads - head;
    rows = token >= p.tokens ? 0 : static_cast<uint32_t>(left < kRopeRows ? left : kRopeRows);
    if (rows == 0) token = 0;
    const uint64_t* const at = args.at;
    x = (stream == 0 ? at[0] : at[7]) + token * s.x_token_stride + head * s.x_head_stride;
    out = (stream == 0 ? at[2] : at[8]) + token * s.out_token_stride + head * s.out_head_stride;
    weight = stream == 0 ? at[5] : at[9];
    second = stream == 0 ? at[6] : at[10];
    if (second != 0) second += token * s.second_token_stride + head * s.second_head_stride;
    x_step = s.x_head_stride, out_step = s.out_head_stride, second_step = s.second_head_stride;
  }
};

// A run of kRun pairs: where its halves are. Adjacent pairs lie in one piece.
struct RopePlace {
  uint64_t pair, u, v;
};

template <class In, class Out, bool kAdjacent, bool kNorm>
struct Rope {
  const abi::RopeParams& p;
  const Args& args;
  const RopeUnit& unit;
  uint32_t lane, lanes;
  float scale[kRopeRows];

  __device__ const In* x_row(uint32_t r) const {
    return pointer<const In>(unit.x + r * unit.x_step);
  }

  template <uint32_t kRun>
  __device__ void store(const float (&v)[kRun], uint32_t r, uint64_t at) const {
    store_floats(v, pointer<Out>(unit.out + r * unit.out_step) + at);
    if constexpr (kNorm) {
      if (unit.second == 0) return;
      const uint64_t row = unit.second + r * unit.second_step;
      const uint32_t dtype = p.stream[unit.stream].second_dtype;
      if (dtype == 0) store_floats(v, pointer<float>(row) + at);
      if (dtype == 1) store_floats(v, pointer<Half>(row) + at);
      if (dtype == 2) store_floats(v, pointer<BFloat16>(row) + at);
    }
  }

  template <uint32_t kRun>
  __device__ void load_halves(uint32_t r, const RopePlace& at, Pack<In, kRun>& u,
                              Pack<In, kRun>& v) const {
    if constexpr (kAdjacent) {
      const Pack<In, 2 * kRun> both = load_pack<In, 2 * kRun>(x_row(r) + at.u);
#pragma unroll
      for (uint32_t i = 0; i < kRun; ++i) u.of[i] = both.of[2 * i], v.of[i] = both.of[2 * i + 1];
    } else {
      u = load_pack<In, kRun>(x_row(r) + at.u);
      v = load_pack<In, kRun>(x_row(r) + at.v);
    }
  }

  template <uint32_t kRun>
  __device__ void turn_row(uint32_t r, const RopePlace& at, const Pack<In, kRun>& u,
                           const Pack<In, kRun>& v, const Angles<kRun>& angle,
                           const float (&weights)[2][kRun]) const {
    float turned[2 * kRun];
#pragma unroll
    for (uint32_t i = 0; i < kRun; ++i) {
      float a = widen(u.of[i]), b = widen(v.of[i]);
      float cosine_u = angle.cosine[i], cosine_v = cosine_u;
      float sine_u = angle.sine[i], sine_v = sine_u;
      if constexpr (kNorm) {
        a = a * scale[r], b = b * scale[r];
        cosine_u *= weights[0][i], cosine_v *= weights[1][i];
        sine_u *= weights[0][i], sine_v *= weights[1][i];
      }
      turned[kAdjacent ? 2 * i : i] = __fmaf_rn(-b, sine_v, a * cosine_u);
      turned[kAdjacent ? 2 * i + 1 : kRun + i] = __fmaf_rn(a, sine_u, b * cosine_v);
    }
    if constexpr (kAdjacent) {
      store(turned, r, at.u);
    } else {
      float half[kRun];
#pragma unroll
      for (uint32_t i = 0; i < kRun; ++i) half[i] = turned[i];
      store(half, r, at.u);
#pragma unroll
      for (uint32_t i = 0; i < kRun; ++i) half[i] = turned[kRun + i];
      store(half, r, at.v);
    }
  }

  template <class Weight, uint32_t kCount>
  __device__ void load_weights_of(uint64_t at, float (&weights)[kCount]) const {
    load_floats(pointer<const Weight>(unit.weight) + at, weights);
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) weights[i] += p.weight_offset;
  }

  // Without weights everything is multiplied by 1: there is nothing to offset.
  template <uint32_t kCount>
  __device__ void load_weights(uint64_t at, float (&weights)[kCount]) const {
    const uint32_t dtype = p.stream[unit.stream].weight_dtype;
    if (dtype == 0) return load_weights_of<float>(at, weights);
    if (dtype == 1) return load_weights_of<Half>(at, weights);
    if (dtype == 2) return load_weights_of<BFloat16>(at, weights);
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) weights[i] = 1.0f;
  }

  template <uint32_t kRun>
  __device__ void load_weights(const RopePlace& at, float (&weights)[2][kRun]) const {
    if constexpr (kAdjacent) {
      float both[2 * kRun];
      load_weights(at.u, both);
#pragma unroll
      for (uint32_t i = 0; i < kRun; ++i)
        weights[0][i] = both[2 * i], weights[1][i] = both[2 * i + 1];
    } else {
      load_weights(at.u, weights[0]), load_weights(at.v, weights[1]);
    }
  }

  // The next kBatch rows are loaded before they are turned, the first ones before the angles are
  // made.
  template <uint32_t kRun>
  __device__ void turn_run(const RopePlace& at) const {
    constexpr uint32_t kBatch = kNorm ? 1 : 2;
    Pack<In, kRun> u[kBatch], v[kBatch];
    const auto load = [&](uint32_t first) {
#pragma unroll
      for (uint32_t r = 0; r < kBatch; ++r) {
        if (first + r < unit.rows) load_halves<kRun>(first + r, at, u[r], v[r]);
      }
    };
    load(0);
    Angles<kRun> angle;
    make_angles(p, args, unit.token, at.pair, angle);
    float weights[2][kRun];
    if constexpr (kNorm) load_weights(at, weights);
#pragma unroll
    for (uint32_t first = 0; first < kRopeRows; first += kBatch) {
      if (first != 0) load(first);
#pragma unroll
      for (uint32_t r = 0; r < kBatch; ++r) {
        if (first + r < unit.rows) turn_row<kRun>(first + r, at, u[r], v[r], angle, weights);
      }
    }
  }

  template <uint32_t kRun>
  __device__ void turn() const {
    const uint32_t runs = static_cast<uint32_t>(p.block_pairs / kRun);
    const uint32_t all = static_cast<uint32_t>(p.blocks) * runs;
    for (uint32_t n = lane; n < all; n += lanes) {
      const uint64_t block = p.blocks == 1 ? 0 : n / runs, i = (n - block * runs) * kRun;
      const uint64_t u = kAdjacent ? 2 * i : block * p.block_stride + i;
      turn_run<kRun>({block * p.block_pairs + i, u, u + p.distance});
    }
  }

  // Coordinates [begin, end) that do not turn.
  __device__ void pass(uint64_t begin, uint64_t end) const {
    if (!kNorm && unit.x == unit.out) return;
#pragma unroll
    for (uint32_t r = 0; r < kRopeRows; ++r) {
      if (r >= unit.rows) break;
      for (uint64_t i = begin + lane; i < end; i += lanes) {
        if constexpr (kNorm) {
          float weight[1];
          load_weights(i, weight);
          const float v[1] = {widen(x_row(r)[i]) * scale[r] * weight[0]};
          store(v, r, i);
        } else {
          copy_elements<In, Out, 1>(x_row(r) + i, pointer<Out>(unit.out + r * unit.out_step) + i);
        }
      }
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
      if (r < unit.rows) {
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
      const bool wide = r < unit.rows && !(sum >= 0x1p-100f && sum <= 0x1p127f);
      if (__any_sync(kAllLanes, wide ? 1 : 0) != 0) {
        const float exact = wide_scale(r);
        if (wide) scale[r] = exact;
      }
    }
  }

  __device__ float wide_scale(uint32_t r) const {
    double sum = 0;
    for (uint64_t i = lane; r < unit.rows && i < p.head_dim; i += lanes) {
      const double x = widen(x_row(r)[i]);
      sum += x * x;
    }
    for (uint32_t step = 1; step < lanes; step *= 2)
      sum += __shfl_xor_sync(kAllLanes, sum, static_cast<int>(step));
    return static_cast<float>(
        1.0 / sqrt(sum / static_cast<double>(p.head_dim) + static_cast<double>(p.epsilon)));
  }
};

template <class In, class Out, bool kAdjacent, bool kNorm>
__global__ void __launch_bounds__(kBlockThreads, kNorm ? 2 : 3)
    rope(const __grid_constant__ abi::RopeParams p, const __grid_constant__ Args args) {
  constexpr uint32_t kRun = rope_run(sizeof(In));
  const uint32_t lanes = rope_lanes(p.head_dim, sizeof(In));
  const RopeUnit unit(p, args,
                      uint64_t{blockIdx.x} * (kBlockThreads / lanes) + threadIdx.x / lanes);
  Rope<In, Out, kAdjacent, kNorm> rope{p, args, unit, threadIdx.x & (lanes - 1), lanes, {}};
  if constexpr (kNorm) rope.find_scales();
  if (p.block_pairs % kRun == 0) {
    rope.template turn<kRun>();
  } else {
    rope.template turn<1>();
  }
  if constexpr (kAdjacent) {
    rope.pass(2 * p.block_pairs, p.head_dim);
  } else if (p.blocks == 1) {
    rope.pass(p.block_pairs, p.distance);
    rope.pass(p.distance + p.block_pairs, p.head_dim);
  }
}

}  // namespace gyre::cuda
