// Each attention function of the reference library as the Gyre call that replaces it, at the shapes
// that the reference takes.
#include <gtest/gtest.h>

#include "attention/attention_fixture.h"

namespace gyre::test {
namespace {

const Device& device() {
  static const Device device = Device::open("cpu");
  return device;
}

// One query at the newest position, over a cache with room to spare; 16 query heads over 8.
AttentionCase decode(uint64_t head_dim, KvFormat k, KvFormat v) {
  return {.heads = 16, .kv_heads = 8, .k_dim = head_dim, .length = 150, .k = k, .v = v};
}

// mask_type 0 and 1 are the same for the newest query; 2 is a window.
TEST(AttentionParity, FlashAttnVec) {
  for (const uint64_t head_dim : {256u, 512u}) {
    for (const KvFormat format : {KvFormat::f32, KvFormat::f16}) {
      for (const uint64_t window : {0u, 40u}) {
        for (const bool causal : {false, true}) {
          AttentionCase c = decode(head_dim, format, format);
          c.window = window;
          c.causal = causal;
          EXPECT_TRUE(attention_holds(device(), c));
        }
      }
    }
  }
}

void holds_on_a_ring(AttentionCase c) {
  for (const uint64_t window : {0u, 40u}) {
    for (const uint64_t start : {0u, 70u, 149u}) {
      c.window = window;
      c.capacity = c.length;
      c.ring_start = start;
      EXPECT_TRUE(attention_holds(device(), c));
    }
  }
}

TEST(AttentionParity, FlashAttnVecTq) {
  for (const uint64_t head_dim : {256u, 512u}) {
    for (const KvFormat format : {KvFormat::mlx_native4, KvFormat::tq4})
      holds_on_a_ring(decode(head_dim, format, format));
  }
}

TEST(AttentionParity, FlashAttnVecTqHb) {
  for (const uint64_t head_dim : {256u, 512u}) {
    for (const KvFormat format :
         {KvFormat::mlx_native5, KvFormat::mlx_native6, KvFormat::mlx_native8, KvFormat::tq5,
          KvFormat::tq6, KvFormat::tq8})
      holds_on_a_ring(decode(head_dim, format, format));
  }
}

// scale_factor_d512 of caches that were written with it.
TEST(AttentionParity, ScaleFactors) {
  for (const KvFormat format : {KvFormat::mlx_native4, KvFormat::mlx_native8}) {
    AttentionCase c = decode(512, format, format);
    c.scale_factor = format == KvFormat::mlx_native4 ? 0.7f : 2.0f;
    holds_on_a_ring(c);
    c.k = KvFormat::f16;
    c.tokens = 4;
    EXPECT_TRUE(attention_holds(device(), c));
  }
}

TEST(AttentionParity, FlashAttnVecPeerPortF16) {
  holds_on_a_ring(decode(256, KvFormat::f16, KvFormat::f16));
}

// 32 groups and a reduction.
TEST(AttentionParity, FlashAttnVecPeerPortF16Nwg32) {
  AttentionCase c = decode(256, KvFormat::f16, KvFormat::f16);
  c.splits = 32;
  holds_on_a_ring(c);
  c.length = 3000;
  EXPECT_TRUE(attention_holds(device(), c));
  EXPECT_EQ(attention_partial_shape(32, {1, 16, 256}, 256), (Dims{32, 1, 16, 258}));
}

TEST(AttentionParity, SdpaDecode) {
  for (const uint64_t head_dim : {32u, 96u, 256u, 512u}) {
    for (const uint64_t length : {1u, 31u, 100u, 300u}) {
      AttentionCase c = decode(head_dim, KvFormat::f32, KvFormat::f32);
      c.length = length;
      c.causal = false;
      EXPECT_TRUE(attention_holds(device(), c));
    }
  }
}

TEST(AttentionParity, Sdpa) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::bf16}) {
    for (const uint64_t tokens : {1u, 7u, 50u}) {
      AttentionCase c = decode(128, format, format);
      c.tokens = tokens;
      c.q_dtype = c.out_dtype = format == KvFormat::f32 ? DType::f32 : DType::bf16;
      EXPECT_TRUE(attention_holds(device(), c));
    }
  }
}

// The reference's window of W holds W + 1 keys.
TEST(AttentionParity, SdpaSliding) {
  for (const uint64_t window : {1u, 16u, 149u}) {
    for (const uint64_t tokens : {1u, 50u}) {
      AttentionCase c = decode(128, KvFormat::f32, KvFormat::f32);
      c.tokens = tokens;
      c.window = window + 1;
      EXPECT_TRUE(attention_holds(device(), c));
    }
  }
}

// Top-left aligned causal at offset q_offset is bottom-right aligned at length q_offset + T.
TEST(AttentionParity, FlashAttnPrefill) {
  for (const uint64_t head_dim : {64u, 256u, 512u}) {
    for (const uint64_t offset : {0u, 8u, 32u}) {
      for (const uint64_t window : {0u, 20u}) {
        AttentionCase c = decode(head_dim, KvFormat::bf16, KvFormat::bf16);
        c.heads = 4;
        c.kv_heads = 2;
        c.tokens = 56;
        c.length = offset + c.tokens;
        c.window = window;
        c.q_dtype = c.out_dtype = DType::bf16;
        EXPECT_TRUE(attention_holds(device(), c));
      }
    }
  }
}

TEST(AttentionParity, FlashAttnVecHybrid) {
  for (const uint64_t head_dim : {256u, 512u}) {
    for (const KvFormat v : {KvFormat::mlx_native5, KvFormat::mlx_native6, KvFormat::mlx_native8,
                             KvFormat::tq5, KvFormat::tq6, KvFormat::tq8, KvFormat::f16}) {
      for (const uint64_t tokens : {1u, 4u}) {
        AttentionCase c = decode(head_dim, KvFormat::f16, v);
        c.tokens = tokens;
        EXPECT_TRUE(attention_holds(device(), c));
      }
    }
  }
}

}  // namespace
}  // namespace gyre::test
