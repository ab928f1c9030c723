// Attention over ggml's bytes against double precision: every pair of types, shapes that fill no
// vector, masks of every kind, and threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "ggml/ggml_problem.h"
#include "hwy/targets.h"
#include "integrations/ggml/attention.h"
#include "integrations/ggml/plan.h"

namespace gyre::ggml::test {
namespace {

constexpr double kBound = 1e-9;  // of f32 sums; a query in 8 bits would have 1e-5
constexpr float kHide = -std::numeric_limits<float>::infinity();

float causal(const Shape& shape, uint64_t token, uint64_t cell) {
  return cell <= shape.cells - shape.tokens + token ? 0.0f : kHide;
}

// Calls check() with every instruction set of Highway that this machine has and the library uses.
template <class Check>
void with_each_target(const Check& check) {
  for (int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    hwy::SetSupportedTargetsForTest(rest & -rest);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(instruction_set());
    check();
    hwy::SetSupportedTargetsForTest(0);
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

void expect_close(const Shape& shape, const std::string& what) {
  Memory memory(shape);
  ASSERT_EQ(refusal(memory.problem), nullptr) << what;
  const std::vector<double> want = memory.expected();
  with_each_target([&] { EXPECT_LE(nmse(memory.run(2), want), kBound) << what; });
}

TEST(GgmlAttention, EveryPairOfTypes) {
  for (size_t k = 0; k < kRowTypes; ++k) {
    for (size_t v = 0; v < kRowTypes; ++v) {
      for (const uint64_t tokens : {1, 21}) {
        Shape shape{.tokens = tokens, .cells = 150, .heads = 6, .kv_heads = 2, .k_dim = 96};
        shape.k = static_cast<RowType>(k), shape.v = static_cast<RowType>(v);
        expect_close(shape, std::string(kRowFormats[k].name) + " " + kRowFormats[v].name + " " +
                                std::to_string(tokens));
      }
    }
  }
}

TEST(GgmlAttention, OddShapes) {
  for (const uint64_t dim : {1, 7, 40, 65, 80, 127, 256, 576}) {
    for (const uint64_t cells : {1, 5, 63, 65, 1300}) {
      for (const uint64_t tokens : {1, 3, 40}) {
        if (dim * cells * tokens > 4'000'000) continue;
        Shape shape{.tokens = tokens, .cells = cells, .heads = 10, .kv_heads = 2, .k_dim = dim};
        shape.v_dim = dim > 8 ? dim - 3 : dim;
        shape.head_major = cells % 2 == 0;
        expect_close(shape, std::to_string(dim) + " " + std::to_string(cells) + " " +
                                std::to_string(tokens));
      }
    }
  }
}

TEST(GgmlAttention, ManyQueryHeadsOfOneKvHead) {
  for (const uint64_t heads : {16, 17, 71, 128}) {
    Shape shape{.tokens = 3, .cells = 700, .heads = heads, .kv_heads = 1, .k_dim = 64};
    shape.k = shape.v = RowType::q8_0;
    shape.mask = [shape](uint64_t, uint64_t token, uint64_t cell) {
      return causal(shape, token, cell);
    };
    expect_close(shape, std::to_string(heads));
  }
}

TEST(GgmlAttention, Masks) {
  for (const uint64_t tokens : {1, 2, 33}) {
    Shape shape{.tokens = tokens, .cells = 777, .heads = 6, .kv_heads = 3};
    shape.k = shape.v = RowType::q4_0;
    shape.mask = [shape](uint64_t, uint64_t token, uint64_t cell) {
      return causal(shape, token, cell);
    };
    expect_close(shape, "causal");
    shape.mask = [](uint64_t, uint64_t, uint64_t cell) {
      return cell >= 50 && cell < 300 ? kHide : 0.0f;
    };
    expect_close(shape, "a hole");
    shape.mask = [](uint64_t, uint64_t token, uint64_t cell) {
      return cell / 40 % 4 == token % 4 ? 0.0f : kHide;
    };
    expect_close(shape, "sequences side by side");
    shape.mask = [](uint64_t, uint64_t token, uint64_t cell) {
      return (cell * 7 + token) % 5 == 0 ? kHide : -0.01f * static_cast<float>(cell % 90);
    };
    shape.max_bias = 8;
    expect_close(shape, "ALiBi");
    shape.soft_cap = 3, shape.sinks = true;
    expect_close(shape, "ALiBi, cap and sinks");
    shape.mask_heads = 6, shape.max_bias = 0;
    shape.mask = [](uint64_t head, uint64_t token, uint64_t cell) {
      return (cell + head + token) % 3 == 0 ? kHide : 0.0f;
    };
    expect_close(shape, "a mask for every head");
  }
}

TEST(GgmlAttention, StreamsAndBroadcast) {
  Shape shape{.tokens = 2, .cells = 1100, .heads = 4, .kv_heads = 2, .streams = 6};
  shape.k = RowType::bf16, shape.v = RowType::q5_1;
  shape.kv_streams = 3, shape.mask_streams = 2;
  shape.mask = [shape](uint64_t, uint64_t token, uint64_t cell) {
    return causal(shape, token, cell);
  };
  expect_close(shape, "streams");
}

TEST(GgmlAttention, RowsThatSeeNothingAreZero) {
  for (const uint64_t tokens : {1, 40}) {
    Shape shape{.tokens = tokens, .cells = 1200};
    shape.mask = [](uint64_t, uint64_t token, uint64_t) { return token % 2 == 0 ? kHide : 0.0f; };
    expect_close(shape, "hidden rows");
    with_each_target([&] {
      const std::vector<float> got = Memory(shape).run(2);
      EXPECT_TRUE(std::all_of(got.begin(), got.begin() + 4 * 64, [](float x) { return x == 0; }));
    });
    shape.sinks = true;
    expect_close(shape, "sinks alone");
  }
}

// Cells that a row does not see may hold anything.
TEST(GgmlAttention, HiddenCellsAreNotRead) {
  for (const uint64_t tokens : {1, 30}) {
    for (const RowType type : {RowType::f16, RowType::q8_0}) {
      Shape shape{.tokens = tokens, .cells = 600};
      shape.k = shape.v = type;
      shape.mask = [](uint64_t, uint64_t, uint64_t cell) { return cell % 3 == 1 ? kHide : 0.0f; };
      Memory memory(shape);
      const std::vector<float> clean = memory.run(1);
      for (const Rows* rows : {&memory.problem.k, &memory.problem.v}) {
        auto& bytes = rows == &memory.problem.k ? memory.k : memory.v;
        for (uint64_t cell = 1; cell < shape.cells; cell += 3)
          std::fill_n(bytes.begin() + static_cast<int64_t>(cell * rows->strides[0]),
                      rows->strides[0], uint8_t{0xFF});  // NaN
      }
      const std::vector<double> want(clean.begin(), clean.end());
      with_each_target([&] { EXPECT_LE(nmse(memory.run(1), want), kBound); });
    }
  }
}

TEST(GgmlAttention, ThreadsDoNotChangeTheBits) {
  for (const uint64_t tokens : {1, 70}) {
    Shape shape{.tokens = tokens, .cells = 3000, .heads = 8, .kv_heads = 2};
    shape.k = shape.v = RowType::q4_0;
    Memory memory(shape);
    with_each_target([&] {
      const std::vector<float> one = memory.run(1);
      for (const uint32_t threads : {2u, 3u, 7u}) EXPECT_EQ(memory.run(threads), one) << threads;
    });
  }
}

TEST(GgmlProblem, HostileShapesAreRefused) {
  const auto refused = [](auto change) {
    Memory memory(Shape{});
    change(memory.problem);
    return refusal(memory.problem) != nullptr;
  };
  EXPECT_FALSE(refused([](Problem&) {}));
  EXPECT_TRUE(refused([](Problem& p) { p.k_dim = 0; }));
  EXPECT_TRUE(refused([](Problem& p) { p.v_dim = 4096; }));
  EXPECT_TRUE(refused([](Problem& p) { p.k.type = RowType::q8_0, p.k_dim = 40; }));
  EXPECT_TRUE(refused([](Problem& p) { p.tokens = 0; }));
  EXPECT_TRUE(refused([](Problem& p) { p.cells = 0; }));
  EXPECT_TRUE(refused([](Problem& p) { p.cells = uint64_t{1} << 40; }));
  EXPECT_TRUE(refused([](Problem& p) { p.tokens = ~uint64_t{0} / 8; }));
  EXPECT_TRUE(refused([](Problem& p) { p.k.heads = 3; }));
  EXPECT_TRUE(refused([](Problem& p) { p.k.heads = p.v.heads = 0; }));
  EXPECT_TRUE(refused([](Problem& p) { p.k.streams = 2; }));
  EXPECT_TRUE(refused([](Problem& p) { p.mask.heads = 3; }));
  EXPECT_TRUE(refused([](Problem& p) { p.k.strides[0] += 1; }));
  EXPECT_TRUE(refused([](Problem& p) { p.out_strides[0] += 2; }));
  EXPECT_TRUE(refused([](Problem& p) { p.max_bias = std::nanf(""); }));
  EXPECT_TRUE(refused([](Problem& p) { p.soft_cap = -1; }));
  EXPECT_TRUE(refused([](Problem& p) { p.scale = HUGE_VALF; }));
}

TEST(GgmlPlan, ItemsCoverEveryRowAndCellOnce) {
  for (const uint64_t tokens : {1, 5, 64, 200}) {
    for (const uint64_t cells : {1, 511, 513, 16384}) {
      for (const uint64_t kv_heads : {1, 3, 8}) {
        for (const uint64_t streams : {1, 9}) {
          Problem p;
          p.tokens = tokens, p.cells = cells, p.heads = 3 * kv_heads, p.streams = streams;
          p.k.heads = p.v.heads = kv_heads;
          p.k_dim = p.v_dim = 64;
          const Plan plan(p);
          uint64_t covered = 0;
          for (uint64_t i = 0; i < plan.items; ++i) {
            const Item item = plan.item(p, i);
            ASSERT_LT(item.stream, streams);
            ASSERT_LT(item.key_begin, item.key_end);
            ASSERT_LE(item.row_end - item.row_begin, kMaxItemRows);
            covered += (item.head_end - item.head_begin) * (item.row_end - item.row_begin) *
                       (item.key_end - item.key_begin);
          }
          EXPECT_EQ(covered, streams * p.heads * tokens * cells);
        }
      }
    }
  }
}

}  // namespace
}  // namespace gyre::ggml::test
