#pragma once
// A cache of several layers, and the calls of its steps.

#include <gtest/gtest.h>

#include "cache/kv_cache_model.h"
#include "expect_error.h"
#include "folder.h"

namespace gyre::test {

constexpr uint64_t kLayers = 5;

class KvProtocol : public testing::Test {
 protected:
  static KvCacheOptions options() {
    KvCacheOptions made = small({.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 6});
    made.layers.resize(kLayers, made.layers[0]);
    made.layers[3] = {.k = KvFormat::f16, .v = KvFormat::f16, .window = 40};
    return made;
  }
  Tensor zeros(uint64_t tokens, uint64_t heads, uint64_t dim) const {
    return device.tensor(DType::f32, {tokens, heads, dim});
  }
  void append(Encoder& to, uint64_t layer, uint64_t tokens) {
    cache.append(to, layer, zeros(tokens, kKvHeads, kDim), zeros(tokens, kKvHeads, kValueDim));
  }
  void append_all(Encoder& to, uint64_t tokens) {
    for (uint64_t layer = 0; layer < kLayers; ++layer) append(to, layer, tokens);
  }
  void attend(Encoder& to, uint64_t layer, uint64_t tokens, const AttendOptions& with = {}) {
    cache.attend(to, layer,
                 {.q = zeros(tokens, kHeads, kDim), .out = zeros(tokens, kHeads, kValueDim)}, with);
  }
  void record_step(Encoder& to, uint64_t tokens) {
    cache.begin_step(to, tokens);
    append_all(to, tokens);
  }
  void step(uint64_t tokens) {
    record_step(encoder, tokens);
    encoder.submit().wait();
  }
  static void save(const KvCache& what) {
    const Folder folder;
    what.save(folder / "a");
  }
  void save() const { save(cache); }
  // A whole step works, and what it leaves can be saved and copied.
  void expect_goes_on() {
    const uint64_t before = cache.length();
    step(2);
    attend(encoder, 1, 2);
    encoder.submit().wait();
    save();
    EXPECT_EQ(cache.fork(encoder).length(), before + 2);
    encoder.submit().wait();
  }

  Device device = test_device();
  Encoder encoder{device}, other{device};
  KvCache cache{device, options()};
};

}  // namespace gyre::test
