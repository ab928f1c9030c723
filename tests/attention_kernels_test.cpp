// Every set of inner loops this machine can run gives attention within the same bounds.
#include "cpu/attention_kernels.h"

#include "attention_fixture.h"

namespace gyre::test {
namespace {

class AttentionKernelSets : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override { cpu::use_attention_kernels(cpu::attention_kernel_sets()[GetParam()]); }
  void TearDown() override { cpu::use_attention_kernels(cpu::attention_kernel_sets()[0]); }

  static void expect_near(const AttentionCase& c) {
    const AttentionProblem problem(Device::open("cpu", {.threads = 2}), c);
    const AttentionAnswer answer = problem.run();
    const bool sharp = c.q_gain > 1;
    EXPECT_LE(nmse(answer.out, answer.decoded.out), sharp ? 1e-3 : 1e-6) << c.text();
  }
};

TEST_P(AttentionKernelSets, EveryFormatOddShapesAndRows) {
  for (const KvFormat format :
       {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::tq2, KvFormat::tq3, KvFormat::tq4,
        KvFormat::tq5, KvFormat::tq6, KvFormat::tq8, KvFormat::compat4}) {
    for (const uint64_t dim : {64, 80, 96, 128, 192, 256, 576}) {
      if (format == KvFormat::compat4 && dim != 256) continue;
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

INSTANTIATE_TEST_SUITE_P(Cpu, AttentionKernelSets,
                         testing::Range<size_t>(0, cpu::attention_kernel_sets().size()),
                         [](const auto& set) {
                           return std::string(cpu::attention_kernel_sets()[set.param].name);
                         });

}  // namespace
}  // namespace gyre::test
