#pragma once
// A Qwen3 model and one sequence. Eigen multiplies matrices; Gyre does what lies between the Q/K/V
// projections and the attention output.
#include <gyre/gyre.h>

#include <span>
#include <vector>

#include "config.h"
#include "weights.h"

namespace tiny_model {

class Model {
 public:
  // `stored`: the formats of the cache, its 16-bit tail and sinks; windows come from the config.
  // `capacity`: most tokens of the sequence.
  Model(const gyre::Device& device, const Config& config, const SafeTensors& file,
        const gyre::KvLayer& stored, uint64_t capacity);

  // Both return the logits that follow the last token: [vocabulary].
  RowVector prefill(std::span<const int32_t> tokens);
  RowVector decode(int32_t token);

  const gyre::KvCache& cache() const { return cache_; }

 private:
  // What goes into Gyre and comes out of it, for one layer at a time.
  struct Step {
    gyre::Tensor q, k, v, out;  // [tokens, heads or kv_heads, head_dim]
  };
  Step make_step(uint64_t tokens) const;

  void check(std::span<const int32_t> tokens) const;
  void begin(uint64_t tokens);
  void record_attention(size_t layer, const Step& step);
  template <class Attend>
  RowVector forward(std::span<const int32_t> tokens, const Step& step, const Attend& attend);
  Rows embed(std::span<const int32_t> tokens) const;

  gyre::Device device_;
  Config config_;
  Weights weights_;
  gyre::KvCache cache_;
  gyre::Encoder encoder_;
  gyre::Tensor rope_table_;
  gyre::RopeOptions rope_;
  Step decode_step_;
  std::vector<gyre::Graph> decode_graphs_;  // one per layer, recorded by the first decode()
};

}  // namespace tiny_model
