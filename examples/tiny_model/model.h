#pragma once
// A Qwen3 model and one sequence. Gyre does what lies between the Q/K/V projections and the
// attention output; kernels of the model's own (kernels.h) do the rest, in the same lists.
#include <gyre/gyre.h>

#include <optional>
#include <span>

#include "config.h"
#include "kernels.h"
#include "weights.h"

namespace tiny_model {

class Model {
 public:
  // `stored`: the formats of the cache, its 16-bit tail and sink tokens; windows come from the
  // config. `capacity`: most tokens of the sequence.
  Model(const gyre::Device& device, const Config& config, const SafeTensors& file,
        const gyre::KvLayer& stored, uint64_t capacity);

  // Both return the logits that follow the last token: [vocabulary].
  RowVector prefill(std::span<const int32_t> tokens);
  RowVector decode(int32_t token);

  const gyre::KvCache& cache() const { return cache_; }

 private:
  // What a step's commands work on.
  struct Step {
    gyre::Tensor hidden, normed;  // [tokens, hidden]
    gyre::Tensor q, k, v, out;    // [tokens, heads or kv_heads, head_dim]
    gyre::Tensor gate, up;        // [tokens, intermediate]
    gyre::Tensor logits;          // [vocabulary]
  };
  Step make_step(uint64_t tokens) const;

  void check(std::span<const int32_t> tokens) const;
  void begin(std::span<const int32_t> tokens, const Step& step);
  void record(const Step& step);
  void record_attention(size_t layer, const Step& step);
  RowVector logits(const Step& step) const;

  gyre::Device device_;
  Config config_;
  Weights weights_;
  gyre::KvCache cache_;
  gyre::Encoder encoder_;
  gyre::Tensor rope_table_;
  gyre::RopeOptions rope_;
  Kernels kernels_;
  Step decode_step_;
  std::optional<gyre::Graph> decode_graph_;  // recorded by the first decode()
};

}  // namespace tiny_model
