#pragma once
// The arguments of attention, in the order of abi::AttentionArg.
#include "abi/attention.h"
#include "metal/kernels/kernel.h"

#define GYRE_ATTENTION_ARGUMENTS                                                             \
  const device uchar *q [[buffer(1)]], const device uchar *k_codes [[buffer(2)]],            \
      const device uchar *k_scales [[buffer(3)]], const device uchar *v_codes [[buffer(4)]], \
      const device uchar *v_scales [[buffer(5)]], device uchar *out [[buffer(6)]],           \
      device uchar *lse [[buffer(7)]], const device uchar *sink_logits [[buffer(8)]],        \
      const device uchar *alibi_slopes [[buffer(9)]],                                        \
      const device uchar *tree_mask [[buffer(10)]], device uchar *partial [[buffer(11)]],    \
      const device uchar *state [[buffer(12)]], const device uchar *table [[buffer(13)]],    \
      const device uchar *kv_lengths [[buffer(14)]],                                         \
      const device uchar *cu_seqlens_q [[buffer(15)]],                                       \
      const device uchar *is_prefill [[buffer(16)]]
#define GYRE_ATTENTION_POINTERS                                                              \
  {                                                                                          \
    q, k_codes, k_scales, v_codes, v_scales, out, lse, sink_logits, alibi_slopes, tree_mask, \
        partial, state, table, kv_lengths, cu_seqlens_q, is_prefill                          \
  }

namespace gyre {
namespace metal {

struct AttentionPointers {
  const device uchar *q, *k_codes, *k_scales, *v_codes, *v_scales;
  device uchar *out, *lse;
  const device uchar *sink_logits, *alibi_slopes, *tree_mask;
  device uchar* partial;
  const device uchar *state, *table, *kv_lengths, *cu_seqlens_q, *is_prefill;
};

// What a kernel is made for.
struct AttentionShape {
  uint k_format, v_format, k_dim, v_dim;
  uint rows;  // of a group
  bool paged;
};

}  // namespace metal
}  // namespace gyre
