// The reference library's weaknesses in its rotary functions (section 7.5 of the specification,
// items 41 to 45), each as the situation in which it goes wrong and what Gyre does there. Each test
// opens with what the reference did.
#include <gtest/gtest.h>

#include "expect_error.h"
#include "rope/rope_fixture.h"
#include "rope/rope_reference.h"

namespace gyre::test {
namespace {

class RopeWeakness : public RopeTest {
 protected:
  Tensor axes(const std::vector<std::vector<int64_t>>& at, DType dtype) const {
    const Tensor tensor = device_.tensor(dtype, {at.size(), at[0].size()});
    std::vector<uint32_t> words;
    for (const auto& axis : at) {
      for (const int64_t position : axis) words.push_back(static_cast<uint32_t>(position));
    }
    Bytes bytes(words.size() * 4);
    std::memcpy(bytes.data(), words.data(), bytes.size());
    write_bytes(tensor, bytes);
    return tensor;
  }
};

// Reference: partial rotary paired (p, p + head_dim / 2), although the models' own code pairs
// inside the first rotary_dim coordinates; and the exponent's denominator was rotary_dim in one op
// and head_dim in another.
TEST_F(RopeWeakness, W41_PartialRotaryAsTheModelsDefineIt) {
  constexpr uint64_t kDim = 80;
  constexpr uint32_t kRotary = 32;  // partial_rotary_factor 0.4, as in Phi-2
  const Tensor x = random(DType::f32, {3, 2, kDim});
  const std::vector<int32_t> at = {3, 50, 2047};
  const std::vector<double> in = values(x);
  // Hugging Face: q_rot, q_pass = q[..., :rotary], q[..., rotary:];
  // q_rot * cos + rotate_half(q_rot) * sin, cos and sin of cat(freqs, freqs); cat(result, q_pass).
  const std::vector<double> got = values(rotated(x, positions(at), {.rotary_dim = kRotary}));
  for (size_t i = 0; i < in.size(); ++i) {
    const size_t e = i % kDim;
    if (e >= kRotary) {
      ASSERT_EQ(got[i], in[i]) << e;
      continue;
    }
    const size_t half = kRotary / 2;
    const double rotated = e < half ? -in[i + half] : in[i - half];
    const double inv_freq = 1.0 / std::pow(10000.0, 2.0 * static_cast<double>(e % half) / kRotary);
    const double emb = at[i / (2 * kDim)] * inv_freq;
    ASSERT_NEAR(got[i], in[i] * std::cos(emb) + rotated * std::sin(emb), 1e-6) << e;
  }
}

// The reference's own conventions are there too, by name, and each is different.
TEST_F(RopeWeakness, W41_EveryConventionCanBeAskedFor) {
  const Tensor x = random(DType::f32, {3, 2, 80});
  const Tensor at = positions({3, 50, 2047});
  std::vector<Bytes> results;
  for (const RopeSpan partner : {RopeSpan::rotary_dim, RopeSpan::head_dim}) {
    for (const RopeSpan exponent : {RopeSpan::rotary_dim, RopeSpan::head_dim}) {
      const RopeOptions options{.rotary_dim = 32, .partner = partner, .exponent = exponent};
      const Bytes result = read_bytes(rotated(x, at, options));
      for (const Bytes& other : results) EXPECT_NE(result, other);
      results.push_back(result);
    }
  }
}

// Reference: the one-token bf16 form had room for 256 floats and wrote head_dim of them.
TEST_F(RopeWeakness, W42_ALargeHeadStaysInItsMemory) {
  constexpr uint64_t kHeads = 3;
  for (const uint64_t head_dim : {256u, 512u, 576u, 2048u}) {
    constexpr uint64_t kGuard = 64;
    const uint64_t row = kHeads * head_dim;
    const Tensor x = random(DType::bf16, {1, kHeads, head_dim});
    const Tensor memory = device_.tensor(DType::bf16, {row + 2 * kGuard});
    const Bytes before = pattern_bytes(memory.bytes(), 3);
    write_bytes(memory, before);
    const Tensor out = memory.slice(0, kGuard, row).reshape({1, kHeads, head_dim});
    run(NormRopeInputs{.x = x,
                       .positions = positions({1234}),
                       .out = out,
                       .weight = random(DType::bf16, {head_dim}, 2)});
    const Bytes after = read_bytes(memory);
    const auto guard_bytes = static_cast<std::ptrdiff_t>(kGuard * 2);
    EXPECT_TRUE(std::equal(before.begin(), before.begin() + guard_bytes, after.begin()));
    EXPECT_TRUE(std::equal(before.end() - guard_bytes, before.end(), after.end() - guard_bytes));
    // A plain f32 call on the same numbers agrees to the last place of bf16.
    const Tensor wide = like(x, DType::f32);
    run(NormRopeInputs{.x = x,
                       .positions = positions({1234}),
                       .out = wide,
                       .weight = random(DType::bf16, {head_dim}, 2)});
    const std::vector<double> truth = values(wide);
    const std::vector<double> got = values(out);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], truth[i], std::abs(truth[i]) * 0x1p-8 + 1e-7) << head_dim << " at " << i;
    }
  }
}

// Reference: angles in f32 with fast math were off by 1e-2 rad at position 1e5; its tests stopped
// at 100.
TEST_F(RopeWeakness, W43_AnglesAreRightInLongContexts) {
  const std::vector<int32_t> at = {100, 100000, 131071, 1000000, 1 << 20};
  const Tensor x = random(DType::f32, {at.size(), 1, 64});
  const RopeOptions options{.base = 500000};
  const std::vector<double> got = values(rotated(x, positions(at), options));
  const std::vector<double> in = values(x);
  const auto frequencies = reference::rope_frequencies(options, 64);
  for (size_t t = 0; t < at.size(); ++t) {
    const int64_t position = at[t];
    const auto turns = reference::rope_turns(options, 64, frequencies, {&position, 1});
    const auto head = reference::rope_head(std::span(in).subspan(t * 64, 64), turns);
    for (size_t e = 0; e < 64; ++e) ASSERT_NEAR(got[t * 64 + e], head.value[e], 2e-6) << at[t];
  }
}

// Reference: u32 positions from 2^31 on became negative, and negative i32 ones huge in vision_2d.
TEST_F(RopeWeakness, W43_PositionsHaveTheSignOfTheirType) {
  const Tensor x = random(DType::f32, {2, 1, 16});
  const RopeOptions options{.mode = RopeMode::vision_2d};
  const std::vector<std::vector<int64_t>> high = {{3000000000, 4294967295}, {2147483648, 5}};
  const std::vector<std::vector<int64_t>> low = {{-3, -2147483648}, {-70000, 5}};
  for (const bool is_signed : {false, true}) {
    const auto& at = is_signed ? low : high;
    const Tensor where = axes(at, is_signed ? DType::i32 : DType::u32);
    const std::vector<double> got = values(rotated(x, where, options));
    const std::vector<double> in = values(x);
    const auto frequencies = reference::rope_frequencies(options, 16);
    for (size_t t = 0; t < 2; ++t) {
      const int64_t token[] = {at[0][t], at[1][t]};
      const auto turns = reference::rope_turns(options, 16, frequencies, token);
      const auto head = reference::rope_head(std::span(in).subspan(t * 16, 16), turns);
      for (size_t e = 0; e < 16; ++e) ASSERT_NEAR(got[t * 16 + e], head.value[e], 2e-6);
    }
  }
}

// Reference: base, head_dim and rotary_dim came as floats in a buffer that nobody compared with the
// arguments.
TEST_F(RopeWeakness, W44_ParametersAreCheckedAgainstTheTensors) {
  const Tensor x = random(DType::f32, {2, 1, 16});
  Encoder encoder(device_);
  EXPECT_TRUE(refused({"rotary_dim", "16", "got 18"}, [&] {
    rope(encoder, {.x = x, .positions = positions({1, 2}), .out = like(x)}, {.rotary_dim = 18});
  }));
  EXPECT_TRUE(refused({"positions", "[2]", "got [3]"}, [&] {
    rope(encoder, {.x = x, .positions = positions({1, 2, 3}), .out = like(x)});
  }));
  EXPECT_EQ(encoder.size(), 0u);
}

// Reference: the cache of parameter buffers had an entry for every shape ever seen, never given
// back.
TEST_F(RopeWeakness, W44_NoCacheGrowsWithoutBound) {
  const auto use_after = [&](int calls) {
    for (int i = 0; i < calls; ++i) {
      const uint64_t head_dim = 64 + 2 * static_cast<uint64_t>(i % 100);
      const Tensor x = device_.tensor(DType::f32, {1 + static_cast<uint64_t>(i % 3), 1, head_dim});
      std::vector<int32_t> at(x.shape(0), i);
      run(RopeInputs{.x = x, .positions = positions(at), .out = x}, {.base = 1000.0 + i});
    }
    return device_.memory().in_use_bytes;
  };
  const uint64_t first = use_after(200);
  const uint64_t later = use_after(2000);
  EXPECT_LE(later, first + 4096) << "2000 more transforms";
  EXPECT_LE(later, 128u << 10) << "the tables that are kept";
}

// Reference: entries were found by the address of the device, stale when another one came to lie
// there.
TEST_F(RopeWeakness, W44_TablesBelongToTheirDevice) {
  const Bytes input = read_bytes(random(DType::f32, {1, 1, 8}));
  const auto first_row = [&](double base) {
    const Device device = Device::open("cpu", {.threads = 1});
    const Tensor x = device.tensor(DType::f32, {1, 1, 8});
    write_bytes(x, input);
    const Tensor at = device.tensor(DType::i32, {1});
    at.data<int32_t>()[0] = 9;
    Encoder encoder(device);
    rope(encoder, {.x = x, .positions = at, .out = x}, {.base = base});
    encoder.submit().wait();
    return read_bytes(x);
  };
  const Bytes ten = first_row(10);
  const Bytes hundred = first_row(100);
  EXPECT_NE(ten, hundred);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(first_row(10), ten);
    EXPECT_EQ(first_row(100), hundred);
  }
}

struct Table {
  uint64_t head_dim = 0;
  RopeOptions options;
};

Table table(uint64_t head_dim, uint32_t rotary_dim, RopeSpan exponent, double base) {
  return {head_dim, {.rotary_dim = rotary_dim, .exponent = exponent, .base = base}};
}

Table vision_table(uint64_t head_dim, uint32_t first_section) {
  const auto rest = static_cast<uint32_t>(head_dim / 2) - first_section;
  return {head_dim, {.mode = RopeMode::vision, .sections = {first_section, rest, 0, 0}}};
}

// Whatever goes into a frequency must tell two tables apart: after all the others, each call must
// give what it gives on a new device.
TEST_F(RopeWeakness, W44_NoTwoConventionsShareATable) {
  constexpr RopeSpan kRotary = RopeSpan::rotary_dim;
  constexpr RopeSpan kHead = RopeSpan::head_dim;
  const Table all[] = {table(32, 32, kRotary, 10000), table(32, 16, kRotary, 10000),
                       table(32, 16, kHead, 10000),   table(64, 16, kHead, 10000),
                       table(32, 32, kRotary, 10001), vision_table(32, 5),
                       vision_table(32, 7),           vision_table(32, 0)};
  const auto result = [&](const Table& t) {
    const Tensor x = random(DType::f32, {1, 1, t.head_dim});
    const Tensor four = axes({{1 << 20}, {-77}, {3}, {12345}}, DType::i32);
    const bool plain = t.options.mode == RopeMode::plain;
    return read_bytes(rotated(x, plain ? four.slice(0, 0, 1).reshape({1}) : four, t.options));
  };
  std::vector<Bytes> fresh;
  for (const Table& t : all) {
    device_ = Device::open("cpu", {.threads = 1});
    fresh.push_back(result(t));
  }
  for (int round = 0; round < 2; ++round) {
    for (size_t i = 0; i < std::size(all); ++i) EXPECT_EQ(result(all[i]), fresh[i]) << i;
  }
  for (size_t i = 0; i < std::size(all); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(fresh[i], fresh[j]) << i << " " << j;
  }
}

// What is recorded keeps its table, however many others come before it runs.
TEST_F(RopeWeakness, W44_ARecordedCallKeepsItsTable) {
  const Tensor x = random(DType::f32, {1, 1, 64});
  const Tensor at = positions({777});
  const Bytes expected = read_bytes(rotated(x, at, {.base = 12345}));
  const Tensor out = like(x);
  Encoder encoder(device_);
  rope(encoder, {.x = x, .positions = at, .out = out}, {.base = 12345});
  const Graph graph = encoder.instantiate();
  for (int i = 0; i < 500; ++i) rotated(x, at, {.base = 20000.0 + i});
  graph.replay().wait();
  EXPECT_EQ(read_bytes(out), expected);
}

// Reference: pow, sine and cosine for every element of every head; Q and K took two launches.
TEST_F(RopeWeakness, W45_AllHeadsOfQAndKShareOneDispatchAndItsAngles) {
  const Tensor row = random(DType::f32, {1, 1, 128});
  const Tensor at = positions({100000, 7});
  const Tensor q = device_.tensor(DType::f32, {2, 9, 128});
  const Tensor k = device_.tensor(DType::f32, {2, 2, 128});
  Encoder encoder(device_);
  rope(encoder, {.x = row.strided({2, 9, 128}, {0, 0, 1}),
                 .positions = at,
                 .out = q,
                 .k = row.strided({2, 2, 128}, {0, 0, 1}),
                 .k_out = k});
  EXPECT_EQ(encoder.size(), 1u);
  encoder.submit().wait();
  for (uint64_t t = 0; t < 2; ++t) {
    const Bytes first = read_bytes(q.slice(0, t, 1).slice(1, 0, 1));
    for (uint64_t h = 0; h < 9; ++h) {
      EXPECT_EQ(read_bytes(q.slice(0, t, 1).slice(1, h, 1)), first);
    }
    for (uint64_t h = 0; h < 2; ++h) {
      EXPECT_EQ(read_bytes(k.slice(0, t, 1).slice(1, h, 1)), first);
    }
  }
}

// The powers of a base are made once, not once per call.
TEST_F(RopeWeakness, W45_ABaseIsRaisedOnce) {
  const Tensor x = random(DType::f32, {1, 1, 128});
  const Tensor at = positions({5});
  run(RopeInputs{.x = x, .positions = at, .out = x});
  const MemoryUse before = device_.memory();
  for (int i = 0; i < 20; ++i) run(RopeInputs{.x = x, .positions = at, .out = x});
  const MemoryUse after = device_.memory();
  EXPECT_EQ(after.system_allocations, before.system_allocations);
  EXPECT_EQ(after.reuses, before.reuses);
  EXPECT_EQ(after.in_use_bytes, before.in_use_bytes);
}

}  // namespace
}  // namespace gyre::test
