#pragma once
// Rows on their way into a calibrated cache, and queries and outputs on theirs through attention.

#include "abi/kv_codec.h"
#include "gyre/kv_coding.h"
#include "gyre/kv_format.h"

namespace gyre {

class Recording;

// What a coding has to fit: one of K and V.
struct CodedStream {
  const Tensor& source;
  const KvCoding& coding;
  KvFormat format;
};

// Refuses tensors that are missing or of another shape or dtype; `op` and `name`, k or v, are for
// messages. A coding that is not defined is fine.
void check_coding(const char* op, const char* name, const KvCoding& coding, KvFormat format,
                  uint64_t kv_heads, uint64_t head_dim);

// What the writers read in place of k and v, and which of them are coded rows (a mask: 1 K, 2 V).
struct WriterSources {
  Tensor of[2];
  uint32_t coded = 0;
};

// Records what makes coded rows of the streams that have a coding; the others stay as they are.
// Codings are checked already. A dense format takes the basis alone: its rows are then f32.
WriterSources encode_rows(Recording& recording, const Device& device, const CodedStream& k,
                          const CodedStream& v);

// Calls visit(k, v, coded) for every pair of formats of which one or both may be coded rows.
template <class Visit>
void for_coded_formats(const Visit& visit) {
  for (uint64_t coded = 1; coded <= 3; ++coded) {
    for (uint32_t k = abi::kFirstNative; k <= abi::kLastNative; ++k) {
      for (uint32_t v = abi::kFirstNative; v <= abi::kLastNative; ++v)
        visit(static_cast<KvFormat>(k), static_cast<KvFormat>(v), coded);
    }
  }
}

void dispatch_basis(Recording& recording, const KvBasisInputs& in);

// Attention over a cache in a basis: queries enter by way of K's inverse, outputs leave by way of
// V's. Without bases q and out are the caller's.
struct BasisAttention {
  Tensor q;
  Tensor out;
};
struct BasisPair {
  const KvBasis& k;
  const KvBasis& v;
  bool defined() const { return k.defined(); }
};
// Refuses what a mean would make wrong. is_dense: some keys are 16 bits, whose kernels want queries
// of 16 bits.
BasisAttention enter_basis(Recording& recording, const Device& device, const BasisPair& bases,
                           const Tensor& q, const Tensor& out, bool is_dense);
void leave_basis(Recording& recording, const BasisPair& bases, const BasisAttention& inside,
                 const Tensor& out);

// Options that a mean does not go with.
struct MeanConflicts {
  bool lse, sinks, soft_cap, tree;
};
void check_means(const char* op, const BasisPair& bases, const MeanConflicts& with);

}  // namespace gyre
