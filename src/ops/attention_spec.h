#pragma once
// The pipeline keys of attention's kernels.

#include "abi/kernels.h"
#include "gyre/dtype.h"
#include "gyre/format.h"

namespace gyre {

inline abi::AttentionSpec make_spec(DType q, KvFormat k, KvFormat v, DType out, bool paged = false,
                                    bool latent = false) {
  return spec_from_key<abi::AttentionSpec>(
      static_cast<uint64_t>(q) | static_cast<uint64_t>(out) << 8 | static_cast<uint64_t>(k) << 16 |
      static_cast<uint64_t>(v) << 24 | uint64_t{paged} << 32 | uint64_t{latent} << 40);
}

inline abi::AttentionMergeSpec make_merge_spec(DType out) {
  return spec_from_key<abi::AttentionMergeSpec>(static_cast<uint64_t>(out));
}

}  // namespace gyre
