#pragma once
// Latent attention: a warpgroup of values. It adds a stage's latents, times the weights, to half of
// the coordinates of 64 rows.
#include "cuda/kernels/attention/common/row_products.cuh"
#include "cuda/kernels/attention/latent/traits.cuh"
#include "cuda/kernels/block_shared.cuh"

namespace gyre::cuda {

template <class T>
class LatentValues {
 public:
  // `half`: of the latent's coordinates.
  LatentValues(const abi::AttentionParams& p, const Args& args, const LatentScratch& scratch,
               uint32_t half)
      : p_(p), args_(args), scratch_(scratch), state_(latent_state<T>()), half_(half) {}

  void run(const LatentWork& work, uint32_t /*item*/) {
    const LatentWalk walk = LatentWalk::of<T::kKeys>(p_, work);
    const uint32_t stages = walk.template stages<T::kKeys>();
    float o[T::kVTiles][4] = {};
#pragma unroll 1
    for (uint32_t stage = 0; stage < stages; ++stage, ++count_.n) {
      uint32_t weights[T::kKeys / 16][4];
      wait_for_phase(&state_.weights_full, handed_ % 2);
      const float rescale[2] = {state_.rescale[row_of(0)], state_.rescale[row_of(1)]};
      take_weights(weights);
      if (__builtin_expect(__any_sync(kAll, rescale[0] != 1.0f || rescale[1] != 1.0f) != 0, 0)) {
#pragma unroll
        for (uint32_t i = 0; i < T::kVTiles * 4; ++i) o[i / 4][i % 4] *= rescale[i % 4 / 2];
      }
      wait_for_phase(&state_.full[count_.slot()], count_.phase());
      if constexpr (T::kCopied) fence_operands();
      const unsigned char* const values =
          latent_slot<T>(count_.slot()) + half_ * (T::kVDim / 64) * T::kLayout.v_panel;
      begin_values<T>(weights, values, o);
      wait_for_product(o);
      if constexpr (T::kWeightParts == 2) {
        wait_for_phase(&state_.weights_full, handed_ % 2);
        take_weights(weights);
        begin_values<T>(weights, values, o);
        wait_for_product(o);
      }
      arrive_warp(&state_.empty[count_.slot()]);
    }
    write(work, o);
  }

 private:
  static uint32_t thread() { return threadIdx.x % kLatentGroup; }
  static uint32_t row_of(uint32_t i) {
    return thread() / kWarp * 16 + thread() % kWarp / 4 + 8 * i;
  }
  void take_weights(uint32_t (&weights)[T::kKeys / 16][4]) {
    const auto* const from = reinterpret_cast<const uint4*>(dynamic_shared() + T::kLayout.weights);
#pragma unroll
    for (uint32_t step = 0; step < T::kKeys / 16; ++step) {
      const uint4 x = from[step * kLatentGroup + thread()];
      weights[step][0] = x.x, weights[step][1] = x.y;
      weights[step][2] = x.z, weights[step][3] = x.w;
    }
    arrive_warp(&state_.weights_empty);
    ++handed_;
  }
  void write(const LatentWork& work, const float (&o)[T::kVTiles][4]) const {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      if (row_of(i) >= work.rows()) continue;
      const uint64_t row = uint64_t{work.first_token} * p_.heads + work.first_row + row_of(i);
      float* const to = latent_row_state(p_, args_, scratch_, row, work.split()) +
                        half_ * T::kVDim + thread() % 4 * 2;
#pragma unroll
      for (uint32_t t = 0; t < T::kVTiles; ++t)
        *reinterpret_cast<float2*>(to + t * 8) = make_float2(o[t][2 * i], o[t][2 * i + 1]);
    }
  }

  const abi::AttentionParams& p_;
  const Args& args_;
  const LatentScratch& scratch_;
  LatentState& state_;
  const uint32_t half_;
  StageCount count_;
  uint32_t handed_ = 0;  // parts of weights
};

}  // namespace gyre::cuda
