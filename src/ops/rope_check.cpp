#include "ops/rope_check.h"

#include <cmath>

#include "abi/kernels.h"
#include "ops/rope_layout.h"
#include "runtime/device_impl.h"
#include "runtime/layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

void check_output(const RopeCall& call, const RopeSide& s, const char* what, const Tensor& out) {
  require(out.defined(), call.op, ": ", what, " of ", s.name, " is undefined");
  require(is_float(out.dtype()), call.op, ": ", what, " of ", s.name,
          " must be f32, f16 or bf16, got ", out.dtype());
  require(out.shape() == s.x->shape(), call.op, ": ", what, " of ", s.name, " must have the shape ",
          s.x->shape(), ", got ", out.shape());
  require(out.stride(2) == 1 || out.shape(2) == 1, call.op, ": head_dim of the ", what, " of ",
          s.name, " must be contiguous, got stride ", out.stride(2));
  require(out.is_injective(), call.op, ": strides ", out.strides(), " make elements of the ", what,
          " of ", s.name, " share memory");
}

void check_positions(const RopeCall& call, const RopeLayout& layout, uint64_t tokens) {
  const Tensor& p = call.positions;
  require(p.defined(), call.op, ": positions are undefined");
  require(p.dtype() == DType::i32 || p.dtype() == DType::u32, call.op,
          ": positions must be i32 or u32, got ", p.dtype());
  if (layout.axes == 1) {
    require(p.rank() == 1 && p.shape(0) == tokens, call.op, ": positions must be [tokens] = [",
            tokens, "], got ", p.shape());
  } else {
    require(p.rank() == 2 && p.shape(0) == layout.axes && p.shape(1) == tokens, call.op,
            ": positions must be [axes, tokens] = [", layout.axes, ", ", tokens,
            "] in this mode, got ", p.shape());
  }
}

void check_frequencies(const RopeCall& call, const RopeLayout& layout) {
  const Tensor& f = call.frequencies;
  if (f.defined()) {
    const bool exact = f.dtype() == DType::u32;
    require(exact || f.dtype() == DType::f32, call.op,
            ": frequencies must be f32 or a table from rope_table, got ", f.dtype());
    require(f.rank() == (exact ? 2 : 1) && f.shape(0) == layout.pairs && f.is_contiguous() &&
                (!exact || f.shape(1) == 2),
            call.op, ": frequencies must be contiguous with one entry for each of ", layout.pairs,
            " pairs, got shape ", f.shape());
  }
  const Tensor& factors = call.factors;
  if (factors.defined()) {
    require(factors.dtype() == DType::f32, call.op, ": factors must be f32, got ", factors.dtype());
    require(factors.rank() == 1 && factors.shape(0) == layout.pairs && factors.is_contiguous(),
            call.op, ": factors must be contiguous [pairs] = [", layout.pairs, "], got ",
            factors.shape());
  }
}

uint32_t dtype_code(const Tensor* tensor) {
  return has(tensor) ? static_cast<uint32_t>(tensor->dtype()) : abi::kRopeNoDtype;
}

void fill_rotation(const RopeCall& call, const RopeLayout& layout, abi::RopeParams& params) {
  params.blocks = layout.blocks;
  params.block_pairs = layout.block_pairs;
  params.distance = layout.distance;
  params.block_stride = layout.block_stride;
  params.position_token_stride = call.positions.stride(layout.axes == 1 ? 0 : 1);
  params.position_axis_stride = layout.axes == 1 ? 0 : call.positions.stride(0);
  params.position_signed = call.positions.dtype() == DType::i32 ? 1 : 0;
  params.mode = static_cast<uint32_t>(call.rope->mode);
  for (uint32_t i = 0; i < 4; ++i) params.sections[i] = call.rope->sections[i];
  params.magnitude = call.rope->magnitude;
}

}  // namespace

abi::RopeSpec rope_spec(DType x, DType out, bool adjacent, bool norm) {
  return spec_from_key<abi::RopeSpec>(static_cast<uint64_t>(x) | static_cast<uint64_t>(out) << 8 |
                                      uint64_t{adjacent} << 16 | uint64_t{norm} << 24);
}

void check_norm(const char* op, float epsilon, float weight_offset) {
  require(std::isfinite(epsilon) && epsilon >= 0, op,
          ": epsilon must be finite and not negative, got ", epsilon);
  require(std::isfinite(weight_offset), op, ": weight_offset must be finite, got ", weight_offset);
}

void check_rope_side(const RopeCall& call, const RopeSide& s) {
  require(s.x->defined(), call.op, ": ", s.name, " is undefined");
  require(s.x->rank() == 3, call.op, ": ", s.name, " must be [tokens, heads, head_dim], got shape ",
          s.x->shape());
  require(is_float(s.x->dtype()), call.op, ": ", s.name, " must be f32, f16 or bf16, got ",
          s.x->dtype());
  require(s.x->shape(0) > 0, call.op, ": ", s.name, " must have at least one token, got 0");
  require(s.x->shape(1) > 0, call.op, ": ", s.name, " must have at least one head, got 0");
  // GPUs count these in 32 bits.
  require(s.x->shape(0) < uint64_t{1} << 32, call.op, ": ", s.name, " must have fewer than 2^32 ",
          "tokens, got ", s.x->shape(0));
  require(s.x->shape(1) <= uint64_t{1} << 20, call.op, ": ", s.name,
          " must have at most 2^20 heads, got ", s.x->shape(1));
  require(s.x->shape(2) > 0, call.op, ": head_dim of ", s.name, " must be at least 2, got 0");
  require(s.x->shape(2) <= abi::kRopeMaxHeadDim, call.op, ": head_dim must be at most ",
          abi::kRopeMaxHeadDim, ", got ", s.x->shape(2));
  require(s.x->stride(2) == 1, call.op, ": head_dim of ", s.name,
          " must be contiguous, got stride ", s.x->stride(2));
  if (s.out != nullptr) check_output(call, s, "out", *s.out);
  if (has(s.second)) check_output(call, s, "second", *s.second);
  if (has(s.weight)) {
    const Tensor& w = *s.weight;
    require(w.rank() == 1 && w.shape(0) == s.x->shape(2), call.op, ": the weight of ", s.name,
            " must be [head_dim] = [", s.x->shape(2), "], got ", w.shape());
    require(is_float(w.dtype()), call.op, ": the weight of ", s.name,
            " must be f32, f16 or bf16, got ", w.dtype());
    require(w.is_contiguous(), call.op, ": the weight of ", s.name,
            " must be contiguous, got stride ", w.stride(0));
  }
}

void check_rope_sides(const RopeCall& call) {
  const Tensor& x = *call.x.x;
  const Tensor& k = *call.k.x;
  const char* const name = call.x.name;
  require(k.shape(0) == x.shape(0), call.op, ": k must have the tokens of ", name, ": ", x.shape(0),
          ", got ", k.shape(0));
  require(k.shape(2) == x.shape(2), call.op, ": k must have the head_dim of ", name, ": ",
          x.shape(2), ", got ", k.shape(2));
  require(k.dtype() == x.dtype(), call.op, ": k must have the dtype of ", name, ": ", x.dtype(),
          ", got ", k.dtype());
}

// Heads are done in any order: an output may be its own input, and otherwise nothing that is
// written may be anything else that is read or written.
void check_rope_parts(const char* op, std::span<const RopePart> parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!has(parts[i].tensor)) continue;
    for (size_t j = i + 1; j < parts.size(); ++j) {
      if (!has(parts[j].tensor) || !(parts[i].written || parts[j].written)) continue;
      if (parts[j].own_input == i && is_same_view(*parts[i].tensor, *parts[j].tensor)) continue;
      require(!may_overlap(*parts[i].tensor, *parts[j].tensor), op, ": ", parts[i].name, " and ",
              parts[j].name, " share memory");
    }
  }
}

void fill_rope_side(const RopeSide& s, abi::RopeStream& stream) {
  const uint64_t x_unit = size_bytes(s.x->dtype());
  stream.heads = s.x->shape(1);
  stream.x_token_stride = s.x->stride(0) * x_unit;
  stream.x_head_stride = s.x->stride(1) * x_unit;
  if (s.out != nullptr) {
    const uint64_t out_unit = size_bytes(s.out->dtype());
    stream.out_token_stride = s.out->stride(0) * out_unit;
    stream.out_head_stride = s.out->stride(1) * out_unit;
  }
  stream.second_dtype = dtype_code(s.second);
  stream.weight_dtype = dtype_code(s.weight);
  if (has(s.second)) {
    const uint64_t second_unit = size_bytes(s.second->dtype());
    stream.second_token_stride = s.second->stride(0) * second_unit;
    stream.second_head_stride = s.second->stride(1) * second_unit;
  }
}

Tensor fill_rope(const Encoder& encoder, const RopeCall& call, abi::RopeParams& params) {
  params.blocks = 1;
  params.block_stride = params.head_dim;
  params.epsilon = call.epsilon;
  params.weight_offset = call.weight_offset;
  Tensor frequencies = call.frequencies;
  if (call.rope == nullptr) return frequencies;
  const RopeLayout layout = checked_rope_layout(call.op, params.head_dim, *call.rope);
  check_positions(call, layout, params.tokens);
  check_frequencies(call, layout);
  fill_rotation(call, layout, params);
  if (!frequencies.defined()) {
    // A table keeps no whole turns, so a factor could not divide them.
    require(!call.factors.defined() || call.rope->base >= 1, call.op,
            ": factors need a base of at least 1, got ", call.rope->base);
    frequencies = base_frequencies(*impl_of(encoder.device()), params.head_dim, *call.rope, layout);
  }
  params.frequency_kind = frequencies.dtype() == DType::u32 ? abi::kRopeTurns : abi::kRopeRadians;
  return frequencies;
}

}  // namespace gyre
