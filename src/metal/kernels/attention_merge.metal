// Merges partial states {sum of exp(logit - max) v, max, sum} of one row: a group a row, threads
// along the coordinates. Bytes moved: the partial states once, and the output.
#include "metal/kernels/attention_row.h"

kernel void attention_merge(constant gyre::abi::AttentionMergeParams& p [[buffer(0)]],
                            const device uchar* partial [[buffer(1)]],
                            device uchar* out [[buffer(2)]], device uchar* lse [[buffer(3)]],
                            const device uchar* sink_logits [[buffer(4)]], GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const ulong rows = p.tokens * p.heads, stride = rows * (p.head_dim + 2);
  for (ulong row = group.x; row < rows; row += groups.x) {
    const device float* const first = pointer<float>(partial) + row * (p.head_dim + 2);
    const device float* const maxima = first + p.head_dim;
    // In base 2. A split without keys does not count, whatever it holds.
    SoftmaxState state = {minus_infinity(), 0};
    for (ulong s = 0; s < p.splits; ++s) {
      if (maxima[s * stride + 1] != 0) state.max_logit = max(state.max_logit, maxima[s * stride] * kLog2E);
    }
    const float reference = reference_of(state.max_logit);
    for (ulong s = 0; s < p.splits; ++s) {
      const float sum = maxima[s * stride + 1];
      if (sum != 0) state.sum += sum * exp2_of(maxima[s * stride] * kLog2E - reference);
    }
    const ulong token = row / p.heads, head = row % p.heads;
    const float factor =
        finish_row(state, grid.has(3) ? pointer<float>(sink_logits)[head] : minus_infinity());
    device uchar* const to = out + token * p.out_token_stride + head * p.out_head_stride;
    for (ulong c = index; c < p.head_dim; c += threads.x) {
      float sum = 0;
      for (ulong s = 0; s < p.splits; ++s) {
        if (maxima[s * stride + 1] == 0) continue;
        sum += first[s * stride + c] * exp2_of(maxima[s * stride] * kLog2E - reference);
      }
      store_float(to, spec_byte(0), c, sum * factor);
    }
    if (index == 0 && grid.has(2)) {
      *pointer<float>(lse + token * p.lse_token_stride + head * p.lse_head_stride) =
          log_sum_exp(state);
    }
  }
}
