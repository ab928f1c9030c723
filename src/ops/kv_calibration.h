#pragma once
// Rows on their way into a calibrated cache, and queries and outputs on theirs through attention.

#include "abi/kv_codec.h"
#include "gyre/calibration.h"
#include "gyre/format.h"

namespace gyre {

class Recording;

// What a calibration has to fit: one of K and V.
struct CalibratedStream {
  const Tensor& source;
  const KvCalibration& calibration;
  KvFormat format;
};

// Refuses tensors that are missing or of another shape or dtype; `op` and `name`, k or v, are for
// messages. A calibration that is not defined is fine.
void check_calibration(const char* op, const char* name, const KvCalibration& calibration,
                       KvFormat format, uint64_t kv_heads, uint64_t head_dim);

// What the writers read in place of k and v, and which of them are calibrated rows (a mask: 1 K, 2
// V).
struct WriterSources {
  Tensor of[2];
  uint32_t calibrated = 0;
};

// Records what makes calibrated rows of the streams that have a calibration; the others stay as
// they are. Calibrations are checked already. A dense format takes the basis alone: its rows are
// then f32.
WriterSources encode_rows(Recording& recording, const Device& device, const CalibratedStream& k,
                          const CalibratedStream& v);

// Calls visit(k, v, calibrated) for every pair of formats of which one or both may be calibrated
// rows.
template <class Visit>
void for_calibrated_formats(const Visit& visit) {
  for (uint64_t calibrated = 1; calibrated <= 3; ++calibrated) {
    for (uint32_t k = abi::kFirstNative; k <= abi::kLastNative; ++k) {
      for (uint32_t v = abi::kFirstNative; v <= abi::kLastNative; ++v)
        visit(static_cast<KvFormat>(k), static_cast<KvFormat>(v), calibrated);
    }
  }
}

void dispatch_transform(Recording& recording, const KvTransformInputs& in);

// Attention over a cache in a basis: queries enter by way of K's inverse, outputs leave by way of
// V's. Over a latent, which is K and V, both pass through its inverse, and the rotary coordinates
// of queries through that of the rotary part. Without bases q and out are the caller's.
struct TransformAttention {
  Tensor q;
  Tensor out;
};
struct TransformPair {
  const KvTransform& k;
  const KvTransform& v;
  bool latent = false;
  bool defined() const { return k.defined(); }
  const KvTransform& of_outputs() const { return latent ? k : v; }
};
// Refuses what a mean would make wrong. is_dense: some keys are 16 bits, whose kernels want queries
// of 16 bits.
TransformAttention enter_transform(Recording& recording, const Device& device,
                                   const TransformPair& transforms, const Tensor& q,
                                   const Tensor& out, bool is_dense);
void leave_transform(Recording& recording, const TransformPair& transforms,
                     const TransformAttention& inside, const Tensor& out);

// Options that a mean does not go with.
struct MeanConflicts {
  bool lse, sink_logits, soft_cap, tree_mask;
};
void check_means(const char* op, const TransformPair& transforms, const MeanConflicts& with);

}  // namespace gyre
