// Attention over ggml's bytes against double precision: every pair of types, shapes that fill no
// vector, masks of every kind, and threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "ggml/ggml_problem.h"
#include "gyre/dtype.h"
#include "hwy/targets.h"
#include "integrations/ggml/attention.h"
#include "integrations/ggml/isa/kernels.h"
#include "integrations/ggml/plan.h"

namespace gyre::ggml::test {
namespace {

constexpr double kBound = 1e-9;  // of f32 sums; a query in 8 bits would have 1e-5
// A query in 16 bits per block of 32 is off by 3.5e-10 of its variance, and so is a logit; a
// logit's error is a relative one of its weight. Logits of these problems have variances up to 9.
constexpr double kLevelBound = 4e-9;
constexpr float kHide = -std::numeric_limits<float>::infinity();

float causal(const Shape& shape, uint64_t token, uint64_t cell) {
  return cell <= shape.cells - shape.tokens + token ? 0.0f : kHide;
}

bool uses_levels(const Problem& p) {
  return level_kernels() != nullptr && has_levels(p.k.type) && p.tokens * p.group() < kLevelRows;
}
double bound_of(const Problem& p) { return uses_levels(p) ? kLevelBound : kBound; }

// Calls check() with every instruction set of Highway that this machine has and the library uses,
// then with the kernels beside Highway.
template <class Check>
void with_each_target(const Check& check) {
  use_isa_kernels(false);
  for (int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    hwy::SetSupportedTargetsForTest(rest & -rest);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(instruction_set());
    check();
    hwy::SetSupportedTargetsForTest(0);
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  use_isa_kernels(true);
  SCOPED_TRACE("kernels beside Highway");
  check();
}

void expect_close(const Shape& shape, const std::string& what) {
  Memory memory(shape);
  ASSERT_EQ(refusal(memory.problem), nullptr) << what;
  const std::vector<double> want = memory.expected();
  with_each_target([&] { EXPECT_LE(nmse(memory.run(2), want), bound_of(memory.problem)) << what; });
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

TEST(GgmlAttention, HeadDimsOfModels) {
  constexpr uint64_t kDims[][2] = {{40, 40},   {72, 72},   {96, 64},
                                   {192, 128}, {320, 256}, {576, 512}};
  for (const auto& [k_dim, v_dim] : kDims) {
    for (const uint64_t group : {1, 5}) {
      for (const uint64_t tokens : {1, 18}) {
        Shape shape{.tokens = tokens, .cells = 530, .heads = 3 * group, .kv_heads = 3};
        shape.k_dim = k_dim, shape.v_dim = v_dim;
        if (k_dim % 32 == 0) shape.k = RowType::q8_0, shape.v = RowType::q4_0;
        shape.mask = [shape](uint64_t, uint64_t token, uint64_t cell) {
          return causal(shape, token, cell);
        };
        expect_close(shape, std::to_string(k_dim) + ", group of " + std::to_string(group) + ", " +
                                std::to_string(tokens) + " tokens");
      }
    }
  }
}

// Latent attention: V is the first 512 values of K's rows.
TEST(GgmlAttention, ValuesInTheRowsOfKeys) {
  for (const RowType type : {RowType::f16, RowType::q8_0}) {
    for (const uint64_t tokens : {1, 5}) {
      Shape shape{.tokens = tokens, .cells = 700, .heads = 16, .kv_heads = 1, .k_dim = 576};
      shape.v_dim = 512;
      shape.k = shape.v = type;
      Memory memory(shape);
      memory.problem.v = memory.problem.k;
      const std::vector<double> want = memory.expected();
      with_each_target([&] { EXPECT_LE(nmse(memory.run(2), want), bound_of(memory.problem)); });
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
      use_isa_kernels(false);
      const std::vector<float> clean = memory.run(1);
      for (const Rows* rows : {&memory.problem.k, &memory.problem.v}) {
        auto& bytes = rows == &memory.problem.k ? memory.k : memory.v;
        for (uint64_t cell = 1; cell < shape.cells; cell += 3)
          std::fill_n(bytes.begin() + static_cast<int64_t>(cell * rows->strides[0]),
                      rows->strides[0], uint8_t{0xFF});  // NaN
      }
      const std::vector<double> want(clean.begin(), clean.end());
      with_each_target([&] { EXPECT_LE(nmse(memory.run(1), want), bound_of(memory.problem)); });
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

// A scale that is not finite, of a cell that is seen: the same numbers are not finite as in f32.
TEST(GgmlAttention, ScalesThatAreNotFinite) {
  for (const uint64_t tokens : {1, 40}) {
    for (const RowType type : {RowType::q8_0, RowType::q4_0, RowType::q5_1, RowType::f16}) {
      for (const float special : {-kHide, kHide, std::nanf("")}) {
        for (const bool in_k : {true, false}) {
          Shape shape{.tokens = tokens, .cells = 200};
          shape.k = shape.v = type;
          shape.mask = [shape](uint64_t, uint64_t token, uint64_t cell) {
            return causal(shape, token, cell);
          };
          Memory memory(shape);
          const Rows& rows = in_k ? memory.problem.k : memory.problem.v;
          const uint16_t scale = Half(special).bits;
          std::memcpy((in_k ? memory.k : memory.v).data() + 170 * rows.strides[0], &scale, 2);
          use_isa_kernels(false);
          const std::vector<float> want = memory.run(1);
          use_isa_kernels(true);
          const std::vector<float> got = memory.run(1);
          bool some = false;
          for (size_t i = 0; i < want.size(); ++i) {
            some = some || !std::isfinite(want[i]);
            if (std::isfinite(want[i]))
              ASSERT_NEAR(got[i], want[i], 1e-3);
            else
              ASSERT_TRUE(std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i]);
          }
          EXPECT_TRUE(some) << "the scale was not read";
        }
      }
    }
  }
}

// Numbers whose parts bf16 does not hold, and blocks of zeros.
TEST(GgmlAttention, LargeAndSmallNumbers) {
  for (const float factor : {0.0f, 1e-34f, 1e-12f, 1e12f, 1e30f}) {
    for (const bool in_k : {true, false}) {
      Shape shape{.tokens = 40, .cells = 150};
      shape.k = shape.v = RowType::f32;
      if (in_k && factor > 0) shape.scale /= factor;
      Memory memory(shape);
      auto& bytes = in_k ? memory.k : memory.v;
      for (size_t at = 0; at < bytes.size(); at += 4) {
        float value = 0;
        std::memcpy(&value, bytes.data() + at, 4);
        value *= factor;
        std::memcpy(bytes.data() + at, &value, 4);
      }
      if (refusal(memory.problem) != nullptr) continue;
      const std::vector<double> want = memory.expected();
      with_each_target([&] {
        if (in_k || factor > 0)
          EXPECT_LE(nmse(memory.run(1), want), kBound) << factor << (in_k ? " K" : " V");
        else
          EXPECT_EQ(nmse(memory.run(1), want), 0);
      });
    }
  }
}

#if defined(__x86_64__)
// ggml gives a thread's tiles their shape once: it must find them so after a call.
TEST(GgmlAttention, TilesKeepTheShapeOfTheThread) {
  if (matrix_kernels() == nullptr) GTEST_SKIP() << "no matrix unit";
  struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 32, 32};
    uint8_t rows[16] = {8, 8, 16, 16};
  };
  const TileConfig before;
  TileConfig after;
  Memory memory(Shape{.tokens = 40, .cells = 100});
  const Plan plan(memory.problem);
  std::vector<float> partials(plan.partial_floats(memory.problem));
  Call call(memory.problem, plan, partials.data());
  const uint64_t bytes = (plan.scratch_floats(memory.problem) * 4 + 63) / 64 * 64;
  const std::unique_ptr<void, decltype(&std::free)> scratch(std::aligned_alloc(64, bytes),
                                                            &std::free);
  __asm__ volatile("ldtilecfg %0" : : "m"(before));
  run(call, 1, static_cast<float*>(scratch.get()));
  __asm__ volatile("sttilecfg %0\n\ttilerelease" : "=m"(after));
  EXPECT_EQ(std::memcmp(&before, &after, sizeof(before)), 0);
}
#endif

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
