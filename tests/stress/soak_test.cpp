// Decode steps without end: the same conversation again and again gives the same bits, and takes no
// more memory. GYRE_SOAK_STEPS says how many, or GYRE_SOAK_SECONDS for how long.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "gyre_test.h"
#include "resident_bytes.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHeads = 4, kKvHeads = 2, kDim = 32, kTalk = 150, kLayers = 3;

uint64_t wanted(const char* variable, uint64_t usual) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : usual;
}

class Talk {
 public:
  explicit Talk(const Device& device)
      : encoder_(device),
        cache_(device, {.kv_heads = kKvHeads,
                        .head_dim = kDim,
                        .capacity = 256,
                        .layers = {{.tail = 16, .sink_tokens = 4},
                                   {.k = KvFormat::f16, .v = KvFormat::f16, .window = 48},
                                   {.k = KvFormat::tq4, .v = KvFormat::tq4}},
                        .step_tokens = 8}),
        k_(device.tensor(DType::f32, {1, kKvHeads, kDim})),
        q_(device.tensor(DType::f32, {1, kHeads, kDim})),
        out_(device.tensor(DType::f32, {kLayers, kHeads, kDim})),
        graph_(record()) {}

  // Every token's output of every layer, folded into one number. Now and then tokens are taken back
  // and said again, and the rest goes on in a copy.
  uint64_t run() {
    std::mt19937 random(7);
    uint64_t hash = 0;
    for (uint64_t token = 0; token < kTalk; ++token) {
      fill(k_, random);
      fill(q_, random);
      hash = step(hash);
      if (token % 37 == 36) {
        cache_.rollback(encoder_, 1);
        encoder_.submit().wait();
        hash = step(hash);
      }
      if (token == 100) {
        const KvCache copy = cache_.fork(encoder_);
        encoder_.submit().wait();
        hash = hash * 31 + copy.length();
      }
    }
    cache_.clear(encoder_);
    encoder_.submit().wait();
    return hash;
  }

 private:
  Graph record() {
    for (uint64_t layer = 0; layer < kLayers; ++layer) {
      cache_.append(encoder_, layer, k_, k_);
      cache_.attend(encoder_, layer, {.q = q_, .out = out_.slice(0, layer, 1)});
    }
    return encoder_.instantiate();
  }
  static void fill(const Tensor& tensor, std::mt19937& random) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (float& value : tensor.data<float>()) value = uniform(random);
  }
  uint64_t step(uint64_t hash) {
    cache_.begin_step(encoder_, 1);
    encoder_.submit().wait();
    graph_.replay().wait();
    for (const float value : out_.data<float>()) {
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      hash = (hash ^ bits) * 0x100000001b3u;
    }
    return hash;
  }

  Encoder encoder_;
  KvCache cache_;
  Tensor k_, q_, out_;
  Graph graph_;
};

TEST(Soak, StepsWithoutEnd) {
  const Device device = Device::open("cpu", {.threads = 2});
  Talk talk(device);
  const uint64_t expected = talk.run();
  ASSERT_EQ(talk.run(), expected);
  const std::chrono::seconds limit(wanted("GYRE_SOAK_SECONDS", 0));
  const uint64_t wanted_talks = wanted("GYRE_SOAK_STEPS", 30'000) / kTalk;
  const auto begin = std::chrono::steady_clock::now();
  const uint64_t resident = resident_bytes(), taken = device.memory().system_allocations;
  const uint64_t in_use = device.memory().in_use_bytes;
  uint64_t talks = 0;
  for (;
       limit.count() != 0 ? std::chrono::steady_clock::now() - begin < limit : talks < wanted_talks;
       ++talks)
    ASSERT_EQ(talk.run(), expected) << "talk " << talks;
  EXPECT_EQ(device.memory().system_allocations, taken);
  EXPECT_EQ(device.memory().in_use_bytes, in_use);
  const uint64_t now = resident_bytes();
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they keep what was freed
  EXPECT_LT(now, resident + (uint64_t{2} << 20));
#endif
  std::printf("%llu steps in %llu talks: the same bits; %lld KiB more resident\n",
              static_cast<unsigned long long>(talks * kTalk),
              static_cast<unsigned long long>(talks),
              (static_cast<long long>(now) - static_cast<long long>(resident)) / 1024);
}

}  // namespace
}  // namespace gyre::test
