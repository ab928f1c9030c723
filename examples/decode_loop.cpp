// A generation as an engine runs it: the prompt in one piece, then one recorded step replayed for
// every token. The same once with an exact cache, to see what compression changes.
#include <gyre/gyre.h>

#include <cmath>
#include <iostream>
#include <random>
#include <vector>

namespace {

constexpr uint64_t kLayers = 4, kHeads = 8, kKvHeads = 2, kDim = 128, kPrompt = 100, kSteps = 200;

// Stands in for a model: fills q, k and v of one layer with what its projections would give.
class Model {
 public:
  void fill(const gyre::Tensor& tensor) {
    for (float& value : tensor.data<float>()) value = normal_(random_);
  }

 private:
  std::mt19937 random_{1};
  std::normal_distribution<float> normal_;
};

struct Step {
  gyre::Tensor q, k, v, out;

  Step(const gyre::Device& device, uint64_t tokens)
      : q(device.tensor(gyre::DType::f32, {tokens, kHeads, kDim})),
        k(device.tensor(gyre::DType::f32, {tokens, kKvHeads, kDim})),
        v(device.tensor(gyre::DType::f32, {tokens, kKvHeads, kDim})),
        out(device.tensor(gyre::DType::f32, {tokens, kHeads, kDim})) {}

  void fill(Model& model) const {
    for (const gyre::Tensor& tensor : {q, k, v}) model.fill(tensor);
  }
  // One layer: turn q and k, store k and v, attend.
  void record(gyre::Encoder& encoder, const gyre::KvCache& cache, uint64_t layer) const {
    cache.rope_append(encoder, layer, {.q = q, .q_out = q, .k = k, .v = v});
    cache.attend(encoder, layer, {.q = q, .out = out});
  }
};

std::vector<float> generate(const gyre::Device& device, const gyre::KvLayer& layer) {
  gyre::KvCache cache(device, {.kv_heads = kKvHeads,
                               .head_dim = kDim,
                               .capacity = 1024,
                               .layers = std::vector<gyre::KvLayer>(kLayers, layer)});
  gyre::Encoder encoder(device);
  Model model;

  const Step prompt(device, kPrompt);
  prompt.fill(model);
  cache.begin_step(encoder, kPrompt);
  for (uint64_t i = 0; i < kLayers; ++i) prompt.record(encoder, cache, i);
  encoder.submit().wait();

  // Recorded once. The graph reads where the sequence is from device memory.
  const Step step(device, 1);
  for (uint64_t i = 0; i < kLayers; ++i) step.record(encoder, cache, i);
  const gyre::Graph graph = encoder.instantiate();
  for (uint64_t i = 0; i < kSteps; ++i) {
    cache.begin_step(encoder, 1);
    encoder.submit().wait();
    step.fill(model);
    graph.replay().wait();
  }
  std::cout << gyre::name(layer.k) << " keys, " << gyre::name(layer.v)
            << " values: " << cache.length() << " tokens, room for 1024 in " << cache.bytes() / 1024
            << " KiB\n";
  const auto out = step.out.data<float>();
  return {out.begin(), out.end()};
}

}  // namespace

int main() {
  const gyre::Device device = gyre::Device::open("cpu");
  const std::vector<float> exact =
      generate(device, {.k = gyre::KvFormat::f32, .v = gyre::KvFormat::f32});
  const std::vector<float> close =
      generate(device, {.k = gyre::KvFormat::tq8, .v = gyre::KvFormat::tq4, .tail = 64});
  double error = 0, energy = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    error += (close[i] - exact[i]) * (close[i] - exact[i]);
    energy += exact[i] * exact[i];
  }
  std::cout << "the last output differs by " << 100 * std::sqrt(error / energy) << " %\n";
}
