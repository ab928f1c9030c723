#pragma once
// Prefill attention of any shape: what a block works on, up to 16 rows of one KV head.
#include "cuda/kernels/attention/any/prefill_layout.cuh"
#include "cuda/kernels/attention/common/row_tile.cuh"
#include "cuda/kernels/attention/common/softmax.cuh"
#include "cuda/kernels/block_instructions.cuh"

namespace gyre::cuda {

// Per-row state, in shared memory.
struct Rows {
  int64_t begin[kMaxRows], end[kMaxRows];  // keys it may see
  int64_t position[kMaxRows];
  float factor[kMaxRows][2];  // of its scores, in two steps
  SoftmaxState state[kMaxRows];
  float rescale[kMaxRows], slope[kMaxRows];
  uint32_t hidden;  // some row does not see some key of the stage
};

struct PrefillProblem : RowTile {
  PrefillLayout layout;

  Rows& state() const;
  static PrefillProblem& of_block();
  // Not a member: the compiler must see which memory it is.
  static unsigned char* shared() { return dynamic_shared(); }
  float* staging() const { return reinterpret_cast<float*>(shared() + layout.staging); }
  float* logits() const { return reinterpret_cast<float*>(shared() + layout.logits); }
  float2* factors() const { return reinterpret_cast<float2*>(shared() + layout.factors); }
  // Modulo by constants: a division would cost more than the load.
  unsigned char* stage(uint32_t number) const {
    const uint32_t at = layout.stages == 3 ? number % 3 : number & (layout.stages - 1);
    return shared() + layout.stage + at * layout.stage_bytes;
  }
};

struct PrefillState {
  Rows rows;
  PrefillProblem problem;
};
static_assert(sizeof(PrefillState) <= kPrefillStateBytes);

inline Rows& PrefillProblem::state() const {
  return reinterpret_cast<PrefillState*>(shared())->rows;
}
inline PrefillProblem& PrefillProblem::of_block() {
  return reinterpret_cast<PrefillState*>(shared())->problem;
}

inline void start_rows(const PrefillProblem& problem, const float* alibi_slopes) {
  Rows& state = problem.state();
  for (uint32_t r = threadIdx.x; r < kMaxRows; r += blockDim.x) {
    const uint64_t token = problem.token(r < problem.rows ? r : 0);
    const abi::RowBounds<int64_t> b = problem.bounds(token);
    state.begin[r] = b.begin, state.end[r] = b.end;
    state.position[r] = abi::row_position(problem.mask, static_cast<int64_t>(token));
    state.state[r] = SoftmaxState::none();
    state.slope[r] =
        alibi_slopes == nullptr || r >= problem.rows ? 0.0f : alibi_slopes[problem.head(r)];
  }
}

}  // namespace gyre::cuda
