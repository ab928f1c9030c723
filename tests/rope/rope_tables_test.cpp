// A device keeps the tables of frequencies that calls need: few of them, each for its device and
// its convention, and as long as a recorded call reads it.
#include <gtest/gtest.h>

#include "rope/rope_fixture.h"

namespace gyre::test {
namespace {

using RopeTables = RopeTest;

TEST_F(RopeTables, NoCacheGrowsWithoutBound) {
  const auto use_after = [&](int calls) {
    for (int i = 0; i < calls; ++i) {
      const uint64_t head_dim = 64 + 2 * static_cast<uint64_t>(i % 100);
      const Tensor x = device_.tensor(DType::f32, {1 + static_cast<uint64_t>(i % 3), 1, head_dim});
      std::vector<int32_t> at(x.shape(0), i);
      run(RopeInputs{.x = x, .positions = positions(at), .out = x}, {.base = 1000.0 + i});
    }
    return device_.memory().in_use_bytes;
  };
  const uint64_t first = use_after(200), later = use_after(2000);
  EXPECT_LE(later, first + 4096) << "2000 more transforms";
  EXPECT_LE(later, 128u << 10) << "the tables that are kept";
}

// A new device may lie where an old one lay.
TEST_F(RopeTables, TablesBelongToTheirDevice) {
  const Bytes input = read_bytes(random(DType::f32, {1, 1, 8}));
  const auto first_row = [&](double base) {
    const Device device = Device::open("cpu", {.threads = 1});
    const Tensor x = device.tensor(DType::f32, {1, 1, 8});
    write_bytes(x, input);
    const Tensor at = device.tensor(DType::i32, {1});
    at.data<int32_t>()[0] = 9;
    rope(RunNow(device), {.x = x, .positions = at, .out = x}, {.base = base});
    return read_bytes(x);
  };
  const Bytes ten = first_row(10), hundred = first_row(100);
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
TEST_F(RopeTables, NoTwoConventionsShareATable) {
  constexpr RopeSpan kRotary = RopeSpan::rotary_dim;
  constexpr RopeSpan kHead = RopeSpan::head_dim;
  const Table all[] = {table(32, 32, kRotary, 10000), table(32, 16, kRotary, 10000),
                       table(32, 16, kHead, 10000),   table(64, 16, kHead, 10000),
                       table(32, 32, kRotary, 10001), vision_table(32, 5),
                       vision_table(32, 7),           vision_table(32, 0)};
  const auto result = [&](const Table& t) {
    const Tensor x = random(DType::f32, {1, 1, t.head_dim});
    const Tensor axes = positions({1 << 20, -77, 3, 12345});
    const bool plain = t.options.mode == RopeMode::plain;
    return read_bytes(rotated(x, plain ? axes.slice(0, 0, 1) : axes.reshape({4, 1}), t.options));
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

// A recorded call keeps its table, however many others come before it runs.
TEST_F(RopeTables, ARecordedCallKeepsItsTable) {
  const Tensor x = random(DType::f32, {1, 1, 64}), at = positions({777});
  const Bytes expected = read_bytes(rotated(x, at, {.base = 12345}));
  const Tensor out = like(x);
  Encoder encoder(device_);
  rope(encoder, {.x = x, .positions = at, .out = out}, {.base = 12345});
  const Graph graph = encoder.instantiate();
  for (int i = 0; i < 500; ++i) rotated(x, at, {.base = 20000.0 + i});
  graph.replay().wait();
  EXPECT_EQ(read_bytes(out), expected);
}

// The powers of a base are made once, not once per call.
TEST_F(RopeTables, ABaseIsRaisedOnce) {
  const Tensor x = random(DType::f32, {1, 1, 128}), at = positions({5});
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
