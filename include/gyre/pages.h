#pragma once

#include <cstdint>

#include "gyre/encoder.h"
#include "gyre/export.h"
#include "gyre/format.h"
#include "gyre/tensor.h"

namespace gyre {

// A page holds the K and V of some tokens of one layer: KV head after KV head, and of each head its
// K codes, V codes, K scales and V scales (docs/kv_formats.md). Nothing in it says which tokens.
struct KvPageShape {
  KvFormat k = KvFormat::tq8;
  KvFormat v = KvFormat::tq4;
  uint64_t kv_heads = 0;
  uint64_t head_dim = 0;
  uint64_t v_head_dim = 0;                   // 0: head_dim
  uint64_t page_tokens = 64;                 // a multiple of 8, up to 1024
  uint32_t signs_version = kKvSignsVersion;  // native formats: what the data was written with
  // Latent attention (MLA): K is the latent, which is V as well, and V the rotary part of K.
  // kv_heads is 1. See docs/latent.md.
  bool latent = false;
};

// A multiple of 16.
GYRE_API uint64_t kv_page_bytes(const KvPageShape& shape);

// Pages of one layer, in Gyre's memory or the caller's. Copying copies handles.
struct KvPages {
  KvPageShape shape{};
  Tensor bytes{};  // u8 [pages, kv_page_bytes], pages any multiple of 16 bytes apart

  GYRE_API static KvPages allocate(const Device& device, const KvPageShape& shape, uint64_t pages);
};

struct KvPageCopyInputs {
  KvPages pages{};
  Tensor from{};  // i32 [count]: pages; pairs with a page that is not there are skipped
  Tensor to{};    // i32 [count]: no page twice, none that is in `from`
};

GYRE_API void kv_page_copy(Encoder& encoder, const KvPageCopyInputs& inputs);

}  // namespace gyre
