#pragma once
// What rope, norm_rope and rope_append check alike, and the Params they fill alike.

#include <span>

#include "abi/rope.h"
#include "gyre/encoder.h"
#include "gyre/rope.h"

namespace gyre {

// q (x) or k, with what goes with it.
struct RopeSide {
  const char* name;
  const Tensor* x;
  const Tensor* out;     // null: it goes into a cache
  const Tensor* weight;  // null where the op has none
  const Tensor* second;
};

struct RopeCall {
  const char* op;
  RopeSide x;
  RopeSide k;
  const Tensor& positions;
  const Tensor& frequencies;
  const Tensor& factors;
  const RopeOptions* rope;  // null: no rotation
  bool norm;
  float epsilon;
  float weight_offset;

  bool adjacent() const { return rope != nullptr && rope->pairing == RopePairing::adjacent; }
};

// A tensor of a call, for the check that nothing written is anything else.
struct RopePart {
  const Tensor* tensor;
  const char* name;
  bool written;
  size_t own_input = ~size_t{0};  // index of a part that this one may be
};

abi::RopeSpec rope_spec(DType x, DType out, bool adjacent, bool norm);

inline bool has(const Tensor* tensor) { return tensor != nullptr && tensor->defined(); }

void check_norm(const char* op, float epsilon, float weight_offset);
void check_rope_side(const RopeCall& call, const RopeSide& side);
// k must be like x.
void check_rope_sides(const RopeCall& call);
void check_rope_parts(const char* op, std::span<const RopePart> parts);

// Checks what the options and tables say, and fills all of `params` but for tokens, head_dim and
// streams. Returns the frequencies.
Tensor fill_rope(const Encoder& encoder, const RopeCall& call, abi::RopeParams& params);
void fill_rope_side(const RopeSide& side, abi::RopeStream& stream);

}  // namespace gyre
