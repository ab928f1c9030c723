// Attention against double precision over the dequantized cache, with NaN in every slot that is not
// seen.
#include <gtest/gtest.h>

#include "attention/attention_fixture.h"
#include "format_classes.h"

namespace gyre::test {
namespace {

const Device& device() {
  static const Device device = Device::open("cpu");
  return device;
}

constexpr KvFormat kPairFormats[] = {KvFormat::f16, KvFormat::tq8, KvFormat::tq4, KvFormat::tq3};

void expect_holds(const AttentionCase& c) { EXPECT_TRUE(attention_holds(device(), c)); }

// K and V of one format.
void expect_holds(KvFormat format, AttentionCase c) {
  c.k = c.v = format;
  expect_holds(c);
}

TEST(Attention, EveryPairOfFormatsAtEveryLength) {
  for (const KvFormat k : kPairFormats) {
    for (const KvFormat v : kPairFormats) {
      for (const uint64_t length : {0, 1, 31, 32, 33, 1000, 4097}) {
        expect_holds({.length = length, .k = k, .v = v});
      }
    }
  }
}

TEST(Attention, EveryGroupSize) {
  for (const uint64_t group : {1, 2, 4, 6, 7, 8, 12, 16, 40, 71}) {
    for (const KvFormat format : kPairFormats) {
      expect_holds(format, {.heads = 2 * group, .kv_heads = 2, .length = 133});
    }
  }
}

TEST(Attention, EveryHeadDim) {
  for (const uint64_t dim : {16, 24, 40, 64, 80, 88, 96, 128, 192, 256, 512, 576, 1016, 1024}) {
    for (const KvFormat format : kv_formats()) {
      if (!stores(format, dim)) continue;
      expect_holds(format, {.k_dim = dim, .length = 75});
    }
  }
  for (const uint64_t dim : {256, 512}) {
    for (const KvFormat v : kv_formats()) {
      for (const uint64_t tokens : {1, 4}) expect_holds({.tokens = tokens, .k_dim = dim, .v = v});
    }
  }
  for (const uint64_t dim : {520, 768, 1024})
    expect_holds({.tokens = 20, .k_dim = dim, .length = 40});
  expect_holds({.k_dim = 192, .v_dim = 128, .k = KvFormat::tq8, .v = KvFormat::tq4});
  expect_holds({.k_dim = 576, .v_dim = 512, .k = KvFormat::f16, .v = KvFormat::f16});
}

TEST(Attention, WindowsAndRings) {
  for (const KvFormat format : kPairFormats) {
    for (const uint64_t window : {0, 1, 17, 200}) {
      for (uint64_t start = 0; start < 67; start += window == 17 ? 1 : 13) {
        expect_holds(format, {.length = 67, .capacity = 67, .ring_start = start, .window = window});
      }
      expect_holds(
          format,
          {.tokens = 5, .length = 100, .capacity = 131, .ring_start = 90, .window = window});
    }
  }
}

// Every format, at the head dims that have two scales a row; caches that were written with a
// factor.
TEST(Attention, RingsOfLargeHeads) {
  for (const KvFormat format : kv_formats()) {
    for (const uint64_t dim : {256, 512}) {
      for (const uint64_t window : {0, 40}) {
        for (const uint64_t start : {0, 70, 149}) {
          AttentionCase c{.heads = 16,
                          .kv_heads = 8,
                          .k_dim = dim,
                          .length = 150,
                          .capacity = 150,
                          .ring_start = start,
                          .causal = window == 0 || start != 70,
                          .window = window};
          expect_holds(format, c);
          if (dim != 512 || class_of(format) != FormatClass::mlx_native) continue;
          c.scale_factor = format == KvFormat::mlx_native4 ? 0.7f : 2.0f;
          expect_holds(format, c);
        }
      }
    }
  }
}

// A prefill in bf16 that begins, or goes on behind older keys.
TEST(Attention, PrefillAtEveryOffset) {
  for (const uint64_t dim : {64, 256, 512}) {
    for (const uint64_t offset : {0, 8, 32}) {
      for (const uint64_t window : {0, 20}) {
        expect_holds({.tokens = 56,
                      .kv_heads = 2,
                      .k_dim = dim,
                      .length = offset + 56,
                      .k = KvFormat::bf16,
                      .v = KvFormat::bf16,
                      .q_dtype = DType::bf16,
                      .out_dtype = DType::bf16,
                      .window = window});
      }
    }
  }
}

TEST(Attention, SeveralQueries) {
  for (const KvFormat format : kPairFormats) {
    for (uint64_t tokens = 1; tokens <= 16; ++tokens) {
      expect_holds(format, {.tokens = tokens, .heads = 4, .kv_heads = 2, .length = 200});
    }
    expect_holds(format, {.tokens = 130, .length = 150});
    expect_holds(format, {.tokens = 9, .length = 5});  // more queries than keys
  }
}

TEST(Attention, EverythingTogether) {
  for (const KvFormat format : kPairFormats) {
    for (const uint64_t tokens : {1, 7, 33}) {
      for (const uint64_t splits : {0, 1, 3, 32}) {
        expect_holds(format, {.tokens = tokens,
                              .heads = 6,
                              .kv_heads = 3,
                              .length = 300,
                              .capacity = 311,
                              .ring_start = 200,
                              .window = 170,
                              .soft_cap = 3,
                              .sink_logits = true,
                              .alibi_slopes = true,
                              .tree_mask = true,
                              .splits = splits});
      }
    }
  }
}

TEST(Attention, ManySplitsOfALongCache) {
  expect_holds({.heads = 16, .kv_heads = 8, .k_dim = 256, .length = 3000, .splits = 32});
}

TEST(Attention, SharpQueries) {
  for (const KvFormat k : kPairFormats) {
    for (const KvFormat v : kPairFormats) {
      expect_holds({.length = 1000, .k = k, .v = v, .q_gain = 8});
    }
  }
}

}  // namespace
}  // namespace gyre::test
