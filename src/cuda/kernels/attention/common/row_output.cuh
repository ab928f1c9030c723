#pragma once
// A row of attention to global memory.
#include "cuda/kernels/attention/common/row_tile.cuh"
#include "cuda/kernels/attention/common/softmax.cuh"
#include "cuda/kernels/attention/common/typed_memory.cuh"

namespace gyre::cuda {

// {values, max, sum} of one split, or the finished row. For the threads that share it; `leads`: one
// of them.
class RowWriter {
 public:
  RowWriter(const RowTile& tile, const Args& args, uint32_t r, SoftmaxState state, bool leads,
            uint64_t place = 0)
      : RowWriter(tile.params, args,
                  {tile.first_token + tile.token(r), tile.head(r), tile.split, tile.invalid != 0},
                  state, leads, place) {}

  struct Row {
    uint64_t token, head, split;
    bool invalid;  // it becomes NaN
  };
  // `place`: where the row's state goes, in base 2, to be folded; 0: nowhere.
  RowWriter(const abi::AttentionParams& p, const Args& args, const Row& row, SoftmaxState state,
            bool leads, uint64_t place = 0) {
    using enum abi::AttentionArg;
    const uint32_t n = p.v.head_dim;
    const uint64_t token = row.token, head = row.head;
    if (row.invalid) state.sum = __uint_as_float(0x7FC00000u);
    dtype_ = place != 0 ? 0 : p.out_dtype;
    if (place != 0) {
      out_ = place;
      if (leads) put(n, state.max), put(n + 1, state.sum);
      return;
    }
    if (p.partial == abi::kAttentionPartial || p.partial == abi::kAttentionStates) {
      const bool states = p.partial == abi::kAttentionStates;
      const uint64_t out_states = args.at[arg_out], partial = args.at[arg_partial];
      out_ = (states ? out_states : partial) +
             ((row.split * p.tokens + token) * p.heads + head) * (n + 2) * sizeof(float);
      dtype_ = 0;
      if (leads) put(n, state.max * kLn2), put(n + 1, state.sum);
      return;
    }
    factor_ = finish_row(state, sink_logit(args.at[arg_sink_logits], head));
    out_ = args.at[arg_out] + token * p.out_token_stride + head * p.out_head_stride;
    if (leads && args.at[arg_lse] != 0) {
      *pointer<float>(args.at[arg_lse] + token * p.lse_token_stride + head * p.lse_head_stride) =
          log_sum_exp(state);
    }
  }
  void put(uint32_t coordinate, float value) const {
    store_float(out_, dtype_, coordinate, value * factor_);
  }
  // Two neighbours, the first of which is even.
  bool has_pairs() const { return out_ % 8 == 0; }
  void put_pair(uint32_t coordinate, float a, float b) const {
    a *= factor_, b *= factor_;
    if (dtype_ == 0) {
      *pointer<float2>(out_ + coordinate * sizeof(float)) = make_float2(a, b);
    } else {
      *pointer<uint32_t>(out_ + coordinate * 2) = pack_16(a, b, dtype_ == 2);
    }
  }

 private:
  uint64_t out_;
  uint32_t dtype_;
  float factor_ = 1.0f;
};

}  // namespace gyre::cuda
