// The reference library's weaknesses (section 7 of the specification, items 1 to 6 and 14 to 17),
// each as the situation in which it goes wrong and what Gyre does there. Each test opens with what
// the reference did.
#include <gtest/gtest.h>

#include <vector>

#include "expect_error.h"
#include "gyre/gyre.h"
#include "runtime/buffer_pool.h"
#include "runtime/test_kernels.h"

namespace gyre::test {
namespace {

constexpr uint32_t kSlowNs = 30000;

class Weakness : public testing::Test {
 protected:
  Tensor bytes(uint64_t count) const { return test_device_.tensor(DType::u8, {count}); }
  Tensor counted(DType dtype, const Dims& shape) const {
    const Tensor tensor = device_.tensor(dtype, shape);
    std::vector<float> values(tensor.elements());
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
    if (dtype == DType::f32) tensor.write_from(std::span<const float>(values));
    return tensor;
  }

  Device device_ = Device::open("cpu", {.threads = 2});
  Device test_device_ = open_test_device({.threads = 2});
};

// Reference: fusing norm and mul removed the barriers between them, although these also ordered the
// producer of the scale behind its reader, and dropped the norm's output although others read it.
TEST_F(Weakness, W01_EveryProducerIsWaitedForAndEveryOutputWritten) {
  const Tensor x = bytes(64);
  const Tensor norm = bytes(64);
  const Tensor scale = bytes(64);
  const Tensor product = bytes(64);
  const Tensor reader = bytes(64);
  for (int round = 0; round < 20; ++round) {
    Encoder encoder(test_device_);
    record_mix(encoder, {.a = x, .out = norm, .salt = 3, .tasks = 2});
    record_mix(encoder,
               {.a = x, .out = scale, .salt = 4, .tasks = 4, .slow_task = 3, .slow_ns = kSlowNs});
    record_mix(encoder, {.a = norm, .b = scale, .out = product, .salt = 5, .tasks = 4});
    record_mix(encoder, {.a = norm, .out = reader, .salt = 6, .tasks = 2});
    EXPECT_EQ(encoder.size(), 4u) << "nothing is merged away";
    EXPECT_EQ(encoder.barriers(), 1u) << "the two producers together, then their readers together";
    encoder.submit().wait();
    for (uint64_t i = 0; i < 64; ++i) {
      const uint8_t n = mix_value(0, 0, i, 3);
      const uint8_t s = mix_value(0, 0, i, 4);
      ASSERT_EQ(norm.data<uint8_t>()[i], n);
      ASSERT_EQ(product.data<uint8_t>()[i], mix_value(n, s, i, 5));
      ASSERT_EQ(reader.data<uint8_t>()[i], mix_value(n, 0, i, 6));
    }
  }
}

// Reference: only the identity of the storage was compared, so a mul that read another part of the
// norm's buffer was fused with it.
TEST_F(Weakness, W01_AnotherPartOfTheSameStorageIsNotTheSameData) {
  const Tensor both = bytes(128);
  const Tensor product = bytes(64);
  Encoder encoder(test_device_);
  record_mix(encoder, {.out = both.slice(0, 0, 64), .salt = 3, .tasks = 2});
  record_mix(encoder, {.a = both.slice(0, 64, 64), .out = product, .salt = 5, .tasks = 2});
  EXPECT_EQ(encoder.barriers(), 0u);
  encoder.submit().wait();
  EXPECT_EQ(product.data<uint8_t>()[1], mix_value(0, 0, 1, 5));
}

// Reference: the reorder pass stripped barriers and took dispatches without ranges (the reduce step
// of the attention) as free to move in front of the kernel whose partial results they read.
TEST_F(Weakness, W02_AReduceStepStaysBehindItsPartials) {
  const Tensor partials = bytes(256);
  const Tensor unrelated = bytes(64);
  const Tensor result = bytes(256);
  for (int round = 0; round < 20; ++round) {
    Encoder encoder(test_device_);
    record_mix(encoder,
               {.out = partials, .salt = 9, .tasks = 8, .slow_task = 7, .slow_ns = kSlowNs});
    record_mix(encoder, {.out = unrelated, .tasks = 2});
    record_mix(encoder, {.a = partials, .out = result, .salt = 2, .tasks = 2});
    EXPECT_EQ(encoder.barriers(), 1u);
    const Graph graph = encoder.instantiate();
    for (int replay = 0; replay < 2; ++replay) {
      std::fill(partials.data<uint8_t>().begin(), partials.data<uint8_t>().end(), uint8_t{0});
      graph.replay().wait();
      for (uint64_t i = 0; i < 256; ++i) {
        ASSERT_EQ(result.data<uint8_t>()[i], mix_value(mix_value(0, 0, i, 9), 0, i, 2));
      }
    }
  }
}

// Reference: what a dispatch reads and writes was said by its caller, or not at all. Here the
// kernel declares it, so no argument can be left out.
TEST_F(Weakness, W02_EveryArgumentIsTracked) {
  const Tensor a = bytes(8);
  const Tensor b = bytes(8);
  const Tensor out = bytes(8);
  const auto barriers_when_written_first = [&](const Tensor& written) {
    Encoder encoder(test_device_);
    record_mix(encoder, {.out = written});
    record_mix(encoder, {.a = a, .b = b, .out = out});
    return encoder.barriers();
  };
  EXPECT_EQ(barriers_when_written_first(a), 1u);
  EXPECT_EQ(barriers_when_written_first(b), 1u);
  EXPECT_EQ(barriers_when_written_first(out), 1u);
  EXPECT_EQ(barriers_when_written_first(bytes(8)), 0u);
}

// Reference: releasing a buffer whose size was no power of two filed it under a larger size, and a
// later request got less than it asked for; release and reset together gave one storage to two
// owners.
TEST_F(Weakness, W03_ReusedBuffersAreLargeEnoughAndHaveOneOwner) {
  std::vector<Tensor> held;
  for (uint64_t count : {1000u, 1023u, 1025u, 3000u, 5000u, 100u, 2049u}) {
    for (int round = 0; round < 3; ++round) {
      {
        const Tensor odd = device_.tensor(DType::u8, {count});
        std::fill(odd.data<uint8_t>().begin(), odd.data<uint8_t>().end(), uint8_t{1});
      }
      const Tensor larger = device_.tensor(DType::u8, {count + 7});
      for (uint8_t& byte : larger.data<uint8_t>()) {
        ASSERT_EQ(byte, 0);
        byte = 2;
      }
      held.push_back(larger);
    }
  }
  for (size_t i = 0; i < held.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const uint64_t a = storage_of(held[i])->address();
      const uint64_t b = storage_of(held[j])->address();
      EXPECT_TRUE(a >= b + held[j].bytes() || b >= a + held[i].bytes()) << "two owners";
    }
  }
}

// Reference: binding a view with an explicit offset replaced the view's own, so a sliced source was
// read from the wrong place.
TEST_F(Weakness, W04_SlicedSourcesAndCachesAreReadAndWrittenInPlace) {
  const Tensor all_tokens = counted(DType::f32, {10, 2, 4});
  const Tensor all_slots = device_.tensor(DType::f32, {3, 12, 4});
  const Tensor k = all_tokens.slice(0, 4, 5).slice(1, 1, 1);  // head 1 of tokens 4 to 8
  const Tensor cache =
      all_slots.slice(0, 2, 1).slice(1, 5, 6).permute({1, 0, 2});  // slots 5 to 10 of head 2
  Encoder encoder(device_);
  kv_copy(encoder, {.k = k, .k_cache = cache}, {.position = 1, .source_begin = 2, .tokens = 2});
  encoder.submit().wait();
  const auto slots = all_slots.data<const float>();
  for (uint64_t i = 0; i < slots.size(); ++i) {
    const uint64_t head = i / 48;
    const uint64_t slot = i / 4 % 12;
    float expected = 0;
    if (head == 2 && (slot == 6 || slot == 7)) {
      const uint64_t token = slot;  // 4 + 2 lands in 5 + 1
      expected = static_cast<float>((token * 2 + 1) * 4 + i % 4 + 1);
    }
    ASSERT_EQ(slots[i], expected) << i;
  }
}

// Reference: offsets of views counted from the start of the storage, sizes were the storage's, so a
// view that was too small passed the checks; misaligned views were accepted; a bad slice was an
// assertion.
TEST_F(Weakness, W05_ViewsAreRelativeAndHaveTheirOwnSize) {
  const Tensor storage = counted(DType::f32, {64});
  const Tensor view = storage.slice(0, 16, 32).slice(0, 8, 8);
  EXPECT_EQ(view.data<float>()[0], 25.0f);
  EXPECT_EQ(view.bytes(), 8 * sizeof(float));
  EXPECT_TRUE(refused({"tensor.slice", "8 entries"}, [&] { view.slice(0, 4, 5); }))
      << "fits the storage only";
  const Tensor k = view.reshape({2, 1, 4});
  Encoder encoder(device_);
  EXPECT_TRUE(refused({"2 tokens", "asked for 3"}, [&] {
    kv_copy(encoder, {.k = k, .k_cache = device_.tensor(DType::f32, {9, 1, 4})}, {.tokens = 3});
  })) << "the storage has more, the view does not";
  std::byte memory[16] = {};
  EXPECT_TRUE(refused({"aligned"}, [&] { device_.wrap(memory + 1, DType::f32, {2}); }));
}

// Reference: set_buffer and dispatch_threads did nothing, a dispatch after commit was accepted, and
// the first of two command buffers was never asked whether it had failed.
TEST_F(Weakness, W06_WhatIsRecordedRunsAndWhatFailsIsReported) {
  const Tensor counter = bytes(4);
  Encoder encoder(test_device_);
  for (int round = 1; round <= 3; ++round) {
    record_fold(encoder, {.out = counter});
    EXPECT_EQ(encoder.size(), 1u) << "recording after a submit starts the next list";
    encoder.submit().wait();
    uint8_t expected = 0;
    for (int r = 0; r < round; ++r) expected = fold_value(expected, 0, 2, 1);
    EXPECT_EQ(counter.data<uint8_t>()[2], expected);
  }
  struct Lost final : FenceState {
    void wait() override { throw Error(ErrorCode::device_lost, "lost"); }
    bool done() const override { return true; }
  };
  const Fence first = Internals::fence(std::make_shared<Lost>());
  const Fence second;
  second.wait();
  EXPECT_TRUE(throws_error(ErrorCode::device_lost, {"lost"}, [&] { first.wait(); }));
}

// Reference: the size of the cache was never looked at, capacity 0 divided by zero, one-token forms
// did not check the position, and the head-major form read the next head's tokens.
TEST_F(Weakness, W14_SizesAndPositionsAreChecked) {
  Encoder encoder(device_);
  const Tensor k = counted(DType::f32, {4, 2, 8});
  const Tensor cache = device_.tensor(DType::f32, {2, 6, 8}).permute({1, 0, 2});
  EXPECT_TRUE(refused({"head_dim", "8", "got 4"}, [&] {
    kv_copy(encoder, {.k = k, .k_cache = device_.tensor(DType::f32, {6, 2, 4})});
  })) << "half the memory that the copy needs";
  for (const CacheKind kind : {CacheKind::linear, CacheKind::ring}) {
    EXPECT_TRUE(refused({"capacity 0"}, [&] {
      kv_copy(encoder, {.k = k, .k_cache = cache.slice(0, 0, 0)}, {.cache = kind});
    }));
  }
  EXPECT_TRUE(refused({"position 6"}, [&] {
    kv_copy(encoder, {.k = k.slice(0, 0, 1), .k_cache = cache}, {.position = 6});
  }));
  const Tensor head_major = counted(DType::f32, {2, 4, 8}).permute({1, 0, 2});
  EXPECT_TRUE(refused({"1 tokens from source_begin 3", "asked for 2"}, [&] {
    kv_copy(encoder, {.k = head_major, .k_cache = cache}, {.source_begin = 3, .tokens = 2});
  })) << "the second one would be the next head's";
  EXPECT_EQ(encoder.size(), 0u);
}

// Reference: more tokens than slots wrote one slot from several threads, and any of them could win.
TEST_F(Weakness, W15_TheLastTokenWinsOnARing) {
  const Tensor k = counted(DType::f32, {5000, 1, 16});
  const Tensor cache = device_.tensor(DType::f32, {7, 1, 16});
  for (int round = 0; round < 10; ++round) {
    Encoder encoder(device_);
    kv_copy(encoder, {.k = k, .k_cache = cache}, {.position = 3, .cache = CacheKind::ring});
    encoder.submit().wait();
    for (uint64_t token = 4993; token < 5000; ++token) {
      const uint64_t slot = (3 + token) % 7;
      ASSERT_EQ(cache.data<float>()[slot * 16], static_cast<float>(token * 16 + 1)) << slot;
    }
  }
}

// Reference: kernels computed indices in 32 bits, and seq_pos_start + t wrapped at 2^32. (Sizes
// beyond 2^32 elements are in kv_copy_large_test.cpp.)
TEST_F(Weakness, W16_PositionsAreCountedIn64Bits) {
  const Tensor cache = device_.tensor(DType::f32, {7, 1, 1});
  Encoder encoder(device_);
  const uint64_t position = (uint64_t{1} << 32) - 2;
  kv_copy(encoder, {.k = counted(DType::f32, {4, 1, 1}), .k_cache = cache},
          {.position = position, .cache = CacheKind::ring});
  encoder.submit().wait();
  for (uint64_t t = 0; t < 4; ++t) {
    EXPECT_EQ(cache.data<float>()[(position + t) % 7], static_cast<float>(t + 1))
        << "2^32 is no multiple of 7: a wrapped sum lands elsewhere";
  }
}

// Reference: an f32 source passed to the 16-bit copy copied garbage, and a global cache that was
// full wrapped around without a word.
TEST_F(Weakness, W17_DtypesDecideTheConversionAndALinearCacheNeverWraps) {
  const Tensor k = counted(DType::f32, {2, 1, 4});
  const Tensor cache = device_.tensor(DType::bf16, {3, 1, 4});
  Encoder encoder(device_);
  kv_copy(encoder, {.k = k, .k_cache = cache}, {.position = 1});
  encoder.submit().wait();
  for (uint64_t i = 0; i < 8; ++i) {
    EXPECT_EQ(cache.data<BFloat16>()[4 + i], BFloat16(static_cast<float>(i + 1)));
  }
  EXPECT_TRUE(refused({"f32, f16 or bf16", "u32"}, [&] {
    kv_copy(encoder, {.k = device_.tensor(DType::u32, {2, 1, 4}), .k_cache = cache});
  }));
  EXPECT_TRUE(refused({"linear", "3 slots", "2 tokens", "position 2"},
                      [&] { kv_copy(encoder, {.k = k, .k_cache = cache}, {.position = 2}); }));
  EXPECT_EQ(cache.data<BFloat16>()[0].bits, 0) << "slot 0 was not overwritten";
}

}  // namespace
}  // namespace gyre::test
