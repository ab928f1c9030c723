// Every set of inner loops this machine can run gives attention within the same bounds.
#include <bit>
#include <cmath>

#include "attention/attention_fixture.h"
#include "attention/attention_small.h"
#include "cpu/attention/isa/kernels.h"
#include "format_classes.h"

namespace gyre::test {
namespace {

class AttentionKernelSets : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override { cpu::use_attention_kernels(cpu::attention_kernel_sets()[GetParam()]); }
  void TearDown() override { cpu::use_attention_kernels(cpu::attention_kernel_sets()[0]); }

  static void expect_near(const AttentionCase& c) {
    EXPECT_TRUE(attention_holds(Device::open("cpu", {.threads = 2}), c));
  }
};

TEST_P(AttentionKernelSets, EveryFormatOddShapesAndRows) {
  for (const KvFormat format : kv_formats()) {
    for (const uint64_t dim : {64, 80, 96, 128, 192, 256, 576}) {
      if (!stores(format, dim)) continue;
      for (const uint64_t heads : {1, 2, 3, 4, 7, 16}) {
        expect_near({.heads = heads, .k_dim = dim, .length = 77, .k = format, .v = format});
      }
    }
  }
}

TEST_P(AttentionKernelSets, MasksRingsAndSharpQueries) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16, KvFormat::tq8, KvFormat::tq4,
                                KvFormat::tq3, KvFormat::tq6}) {
    expect_near({.tokens = 3,
                 .heads = 8,
                 .kv_heads = 2,
                 .length = 200,
                 .capacity = 211,
                 .ring_start = 150,
                 .k = format,
                 .v = format,
                 .window = 70,
                 .soft_cap = 20,
                 .sinks = true,
                 .slopes = true});
    expect_near({.tokens = 4, .length = 131, .k = format, .v = format, .tree = true});
    expect_near({.heads = 4, .length = 1000, .k = format, .v = format, .q_gain = 8});
  }
}

enum class Kind : uint8_t { finite, infinity, minus_infinity, nan };
Kind kind_of(float x) {
  if (std::isnan(x)) return Kind::nan;
  if (std::isfinite(x)) return Kind::finite;
  return x > 0 ? Kind::infinity : Kind::minus_infinity;
}

// Some kernels take a query or a probability apart: an infinity then meets parts that are 0, or of
// the other sign.
TEST_P(AttentionKernelSets, WhatIsNotFiniteShowsAsInF32) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto payload = std::bit_cast<float>(0x7F800001u);  // lost if only the upper half is kept
  constexpr float kMost = std::numeric_limits<float>::max();
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16}) {
    for (const uint64_t tokens : {1, 2, 4}) {
      // Splits into two numbers of one sign, of both, into one alone, and what must not overflow.
      for (const float q : {1 + 0x1p-9f, 1 + 0x1p-7f - 0x1p-9f, 1.0f, -1 - 0x1p-9f, 0.0f, kMost,
                            kInfinity, -kInfinity, payload}) {
        for (const float k : {0.0f, 0x1p-10f, kInfinity, -kInfinity, payload}) {
          for (const float v : {1.0f, kInfinity, -kInfinity, payload}) {
            Small s = random_small(format, tokens, 71);
            s.options.causal = false;
            for (uint64_t t = 0; t < tokens; ++t) s.q[t * s.dim + 9] = q;
            s.k[30 * s.dim + 9] = k;
            s.v[68 * s.dim + 5] = v;  // the first of a last group that is not full
            const Small::Answer got = s.run();
            s.format = KvFormat::f32;
            cpu::use_attention_kernels(cpu::attention_kernel_sets().back());
            const Small::Answer wanted = s.run();
            cpu::use_attention_kernels(cpu::attention_kernel_sets()[GetParam()]);
            for (size_t i = 0; i < got.out.size(); ++i)
              EXPECT_EQ(kind_of(got.out[i]), kind_of(wanted.out[i]))
                  << name(format) << " q " << q << " k " << k << " v " << v << " at " << i << ": "
                  << got.out[i];
            EXPECT_EQ(kind_of(got.lse[0]), kind_of(wanted.lse[0])) << q << " " << k;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, AttentionKernelSets,
                         testing::Range<size_t>(0, cpu::attention_kernel_sets().size()),
                         [](const auto& set) {
                           return std::string(cpu::attention_kernel_sets()[set.param].name);
                         });

}  // namespace
}  // namespace gyre::test
