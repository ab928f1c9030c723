#pragma once
// Caches that are filled the same way twice, and snapshot files as bytes.

#include <bit>

#include "cache/snapshot.h"
#include "expect_error.h"
#include "folder.h"
#include "gyre_test.h"
#include "numbers.h"

namespace gyre::test {

inline void put_number(Bytes& bytes, size_t offset, size_t width, uint64_t value) {
  for (size_t i = 0; i < width; ++i) bytes[offset + i] = std::byte(value >> (8 * i));
}

inline uint64_t number_at(const Bytes& bytes, size_t offset, size_t width) {
  uint64_t value = 0;
  for (size_t i = 0; i < width; ++i) value |= static_cast<uint64_t>(bytes[offset + i]) << (8 * i);
  return value;
}

// A cache, and questions whose answers are compared bit for bit.
class Session {
 public:
  Session(const Device& device, const KvCacheOptions& options, uint32_t seed = 1)
      : cache(device, options), encoder(device), random_(seed) {}

  void append(uint64_t tokens) {
    cache.begin_step(encoder, tokens);
    for (uint64_t layer = 0; layer < cache.layers().size(); ++layer) {
      const KvLayer& l = cache.layers()[layer];
      if (l.kv_shared_layer_index) continue;
      const Tensor k = fresh({tokens, l.kv_heads, l.head_dim}, random_);
      cache.append(encoder, layer, k, fresh({tokens, l.kv_heads, l.v_head_dim}, random_));
    }
    encoder.submit().wait();
  }
  void rollback(uint64_t tokens) {
    cache.rollback(encoder, tokens);
    encoder.submit().wait();
  }
  // Both see the same random numbers from here on.
  void follow(const Session& other) { random_ = other.random_; }

  // The newest token's answer of every layer, as bits.
  std::vector<uint32_t> answers() {
    std::vector<uint32_t> bits;
    std::mt19937 questions(99);
    for (uint64_t layer = 0; layer < cache.layers().size() && cache.length() != 0; ++layer) {
      const KvLayer& l = cache.layers()[layer];
      const Tensor q = fresh({1, 2 * l.kv_heads, l.head_dim}, questions);
      const Tensor out = encoder.device().tensor(DType::f32, {1, 2 * l.kv_heads, l.v_head_dim});
      cache.attend(encoder, layer, {.q = q, .out = out}, {.scale = 0.25f});
      encoder.submit().wait();
      for (const float value : out.data<float>()) bits.push_back(std::bit_cast<uint32_t>(value));
    }
    return bits;
  }

 private:
  Tensor fresh(const Dims& shape, std::mt19937& random) const {
    return normal_tensor(encoder.device(), shape, random);
  }

 public:
  KvCache cache;
  Encoder encoder;

 private:
  std::mt19937 random_;
};

}  // namespace gyre::test
