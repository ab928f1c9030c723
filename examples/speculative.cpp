// Speculative decoding with a tree of guesses: all are attended to in one pass, each seeing only
// its own branch, and what is rejected leaves no trace.
#include <gyre/gyre.h>

#include <array>
#include <iostream>
#include <random>
#include <vector>

namespace {

constexpr uint64_t kHeads = 8, kKvHeads = 2, kDim = 64, kContext = 50;
constexpr std::array<int, 5> kParents = {-1, 0, 0, 1, 2};  // two branches: 0-1-3 and 0-2-4
constexpr std::array<uint64_t, 3> kAccepted = {0, 2, 4};

gyre::Tensor noise(const gyre::Device& device, const gyre::Dims& shape, uint32_t seed) {
  gyre::Tensor tensor = device.tensor(gyre::DType::f32, shape);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (float& value : tensor.data<float>()) value = normal(random);
  return tensor;
}

// Guess i sees guess j if j is i or comes before it on its branch.
gyre::Tensor tree_mask(const gyre::Device& device) {
  gyre::Tensor tree_mask = device.tensor(gyre::DType::u8, {kParents.size(), kParents.size()});
  const auto sees = tree_mask.data<uint8_t>();
  for (size_t i = 0; i < kParents.size(); ++i) {
    for (int j = static_cast<int>(i); j >= 0; j = kParents[static_cast<size_t>(j)])
      sees[i * kParents.size() + static_cast<size_t>(j)] = 1;
  }
  return tree_mask;
}

struct Tokens {
  gyre::Tensor k, v;
  Tokens(const gyre::Device& device, uint64_t count, uint32_t seed)
      : k(noise(device, {count, kKvHeads, kDim}, seed)),
        v(noise(device, {count, kKvHeads, kDim}, seed + 1)) {}
};

void append(gyre::Encoder& encoder, gyre::KvCache& cache, const gyre::Tensor& k,
            const gyre::Tensor& v) {
  cache.begin_step(encoder, k.shape(0));
  cache.append(encoder, 0, k, v);
}

// Guesses one by one: they need not lie side by side.
void append_accepted(gyre::Encoder& encoder, gyre::KvCache& cache, const Tokens& guesses) {
  for (const uint64_t i : kAccepted)
    append(encoder, cache, guesses.k.slice(0, i, 1), guesses.v.slice(0, i, 1));
}

std::vector<float> ask(gyre::Encoder& encoder, const gyre::KvCache& cache, const gyre::Tensor& q) {
  const gyre::Tensor out = encoder.device().tensor(gyre::DType::f32, q.shape());
  cache.attend(encoder, 0, {.q = q, .out = out}, {.scale = 0.125f});
  encoder.submit().wait();
  const auto values = out.data<float>();
  return {values.begin(), values.end()};
}

}  // namespace

int main() {
  const gyre::Device device = gyre::Device::open("cpu");
  gyre::Encoder encoder(device);
  gyre::KvCache cache(device, {.kv_heads = kKvHeads, .head_dim = kDim, .capacity = 256});
  const Tokens context(device, kContext, 1), guesses(device, kParents.size(), 3);
  append(encoder, cache, context.k, context.v);
  gyre::KvCache careful = cache.fork(encoder);  // never sees a wrong guess

  // All guesses in one pass.
  append(encoder, cache, guesses.k, guesses.v);
  const gyre::Tensor q = noise(device, {kParents.size(), kHeads, kDim}, 5),
                     out = device.tensor(gyre::DType::f32, q.shape());
  cache.attend(encoder, 0, {.q = q, .out = out},
               {.scale = 0.125f, .mask = {.tree_mask = tree_mask(device)}});
  encoder.submit().wait();
  std::cout << kParents.size() << " guesses on two branches, attended in one pass\n";

  // The model agrees with one branch: drop all guesses, keep that branch.
  cache.rollback(encoder, kParents.size());
  append_accepted(encoder, cache, guesses);
  append_accepted(encoder, careful, guesses);
  const gyre::Tensor next = noise(device, {1, kHeads, kDim}, 6);
  const bool same = ask(encoder, cache, next) == ask(encoder, careful, next);
  std::cout << kAccepted.size() << " accepted, length " << cache.length() << ", as if the others "
            << (same ? "had never been there" : "were still there") << '\n';
  return same ? 0 : 1;
}
