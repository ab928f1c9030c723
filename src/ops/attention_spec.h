#pragma once
// The pipeline keys of attention's kernels.

#include "gyre/dtype.h"
#include "gyre/kv_format.h"
#include "runtime/kernels.h"

namespace gyre {

inline abi::AttentionSpec make_spec(DType q, KvFormat k, KvFormat v, DType out) {
  return spec_from_key<abi::AttentionSpec>(
      static_cast<uint64_t>(q) | static_cast<uint64_t>(out) << 8 | static_cast<uint64_t>(k) << 16 |
      static_cast<uint64_t>(v) << 24);
}

inline abi::AttentionMergeSpec make_merge_spec(DType out) {
  return spec_from_key<abi::AttentionMergeSpec>(static_cast<uint64_t>(out));
}

inline abi::AttentionDecodeSpec make_decode_spec(KvFormat k, KvFormat v, uint64_t head_dim,
                                                 uint64_t rows, uint64_t cluster) {
  return {.k_format = static_cast<uint8_t>(k),
          .v_format = static_cast<uint8_t>(v),
          .rows = static_cast<uint8_t>(rows),
          .cluster = static_cast<uint8_t>(cluster),
          .unused = {},
          .head_dim = static_cast<uint16_t>(head_dim)};
}

}  // namespace gyre
