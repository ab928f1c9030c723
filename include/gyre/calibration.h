#pragma once

#include <cstdint>
#include <vector>

#include "gyre/encoder.h"
#include "gyre/export.h"
#include "gyre/tensor.h"

namespace gyre {

// What a calibration says about the rows of one layer's K or V. Bytes, levels and readers are those
// of the format; only the choice of codes changes. For native formats and head dims that are a
// power of two from 16 to 512. docs/quality.md says what it is worth, docs/kv_formats.md what is
// computed.

// The basis that rows are stored in: matrix (x - mean). All f32 and contiguous.
struct KvTransform {
  Tensor matrix{};   // [kv_heads, head_dim, head_dim], symmetric
  Tensor inverse{};  // of the matrix: caches and pools refuse another one
  Tensor mean{};     // [kv_heads, head_dim]; undefined: none

  bool defined() const { return matrix.defined() || inverse.defined() || mean.defined(); }
};

// How codes are chosen: the rounding error of a coordinate is fed into those after it, so that the
// error of the row is small in the metric T T^t, T an upper triangular matrix in the rotated basis.
// Each gain is tried, and the one with the smallest error kept.
struct KvFeedback {
  Tensor factor{};  // [kv_heads, head_dim, head_dim], f32: row i is what the error of coordinate i
                    // adds to later ones, T divided by its diagonal; undefined: no feedback
  Tensor diagonal{};           // [kv_heads, head_dim], f32: that of T
  std::vector<float> gains{};  // 1 to 8 of them, from 1/4 to 4; empty: 1 alone
};

struct KvCalibration {
  KvTransform transform{};
  KvFeedback feedback{};

  bool defined() const {
    return transform.defined() || feedback.factor.defined() || feedback.diagonal.defined() ||
           !feedback.gains.empty();
  }
};

struct KvLayerCalibration {
  KvCalibration k{};
  KvCalibration v{};
};

struct KvTransformInputs {
  Tensor x{};       // [tokens, heads, head_dim], f32, f16 or bf16, head_dim contiguous
  Tensor matrix{};  // f32 [kv_heads, head_dim, head_dim]: row i is what coordinate i adds to the
                    // result; heads is a multiple of kv_heads
  Tensor before{};  // f32 [kv_heads, head_dim]; undefined: 0
  Tensor after{};   // likewise
  Tensor out{};     // like x; may be x itself
};

// out = matrix (x - before) + after, head by head; sums are f32, in order.
GYRE_API void kv_transform(Encoder& encoder, const KvTransformInputs& inputs);

}  // namespace gyre
