#include "gyre/rope.h"

#include <array>
#include <cmath>

#include "ops/rope_layout.h"
#include "ops/table.h"
#include "runtime/layout.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

abi::RopeSpec make_spec(DType x, DType out, bool adjacent, bool norm) {
  return spec_from_key<abi::RopeSpec>(static_cast<uint64_t>(x) | static_cast<uint64_t>(out) << 8 |
                                      uint64_t{adjacent} << 16 | uint64_t{norm} << 24);
}

// x or k, with what goes with it.
struct Stream {
  const char* name;
  const Tensor& x;
  const Tensor& out;
  const Tensor* weight;  // null where the op has none
  const Tensor* second;
};

struct Call {
  const char* op;
  Stream x;
  Stream k;
  const Tensor& positions;
  const Tensor& frequencies;
  const Tensor& factors;
  const RopeOptions* rope;  // null: no rotation
  bool norm;
  float epsilon;
  float weight_offset;
};

bool has(const Tensor* tensor) { return tensor != nullptr && tensor->defined(); }

void check_output(const Call& call, const Stream& s, const char* what, const Tensor& out) {
  require(out.defined(), call.op, ": ", what, " of ", s.name, " is undefined");
  require(is_float(out.dtype()), call.op, ": ", what, " of ", s.name,
          " must be f32, f16 or bf16, got ", out.dtype());
  require(out.shape() == s.x.shape(), call.op, ": ", what, " of ", s.name, " must have the shape ",
          s.x.shape(), ", got ", out.shape());
  require(out.stride(2) == 1 || out.shape(2) == 1, call.op, ": head_dim of the ", what, " of ",
          s.name, " must be contiguous, got stride ", out.stride(2));
  require(out.is_injective(), call.op, ": strides ", out.strides(), " make elements of the ", what,
          " of ", s.name, " share memory");
}

void check_stream(const Call& call, const Stream& s) {
  require(s.x.defined(), call.op, ": ", s.name, " is undefined");
  require(s.x.rank() == 3, call.op, ": ", s.name, " must be [tokens, heads, head_dim], got shape ",
          s.x.shape());
  require(is_float(s.x.dtype()), call.op, ": ", s.name, " must be f32, f16 or bf16, got ",
          s.x.dtype());
  require(s.x.shape(0) > 0, call.op, ": ", s.name, " must have at least one token, got 0");
  require(s.x.shape(1) > 0, call.op, ": ", s.name, " must have at least one head, got 0");
  require(s.x.shape(2) > 0, call.op, ": head_dim of ", s.name, " must be at least 2, got 0");
  require(s.x.shape(2) <= abi::kRopeMaxHeadDim, call.op, ": head_dim must be at most ",
          abi::kRopeMaxHeadDim, ", got ", s.x.shape(2));
  require(s.x.stride(2) == 1, call.op, ": head_dim of ", s.name, " must be contiguous, got stride ",
          s.x.stride(2));
  check_output(call, s, "out", s.out);
  if (has(s.second)) check_output(call, s, "second", *s.second);
  if (has(s.weight)) {
    const Tensor& w = *s.weight;
    require(w.rank() == 1 && w.shape(0) == s.x.shape(2), call.op, ": the weight of ", s.name,
            " must be [head_dim] = [", s.x.shape(2), "], got ", w.shape());
    require(is_float(w.dtype()), call.op, ": the weight of ", s.name,
            " must be f32, f16 or bf16, got ", w.dtype());
    require(w.is_contiguous(), call.op, ": the weight of ", s.name,
            " must be contiguous, got stride ", w.stride(0));
  }
}

void check_second_stream(const Call& call) {
  const Stream& x = call.x;
  const Stream& k = call.k;
  require(k.x.shape(0) == x.x.shape(0), call.op, ": k must have the tokens of x: ", x.x.shape(0),
          ", got ", k.x.shape(0));
  require(k.x.shape(2) == x.x.shape(2), call.op, ": k must have the head_dim of x: ", x.x.shape(2),
          ", got ", k.x.shape(2));
  require(k.x.dtype() == x.x.dtype(), call.op, ": k must have the dtype of x: ", x.x.dtype(),
          ", got ", k.x.dtype());
  require(k.out.dtype() == x.out.dtype(), call.op,
          ": k_out must have the dtype of out: ", x.out.dtype(), ", got ", k.out.dtype());
}

// Heads are done in any order: an output may be its own input, and otherwise nothing that is
// written may be anything else that is read or written.
void check_overlap(const Call& call) {
  struct Part {
    const Tensor* tensor;
    const char* name;
    bool written;
  };
  const std::array<Part, 11> parts = {{{&call.x.x, "x", false},
                                       {&call.x.out, "out", true},
                                       {call.x.second, "second", true},
                                       {call.x.weight, "weight", false},
                                       {&call.k.x, "k", false},
                                       {&call.k.out, "k_out", true},
                                       {call.k.second, "k_second", true},
                                       {call.k.weight, "k_weight", false},
                                       {&call.positions, "positions", false},
                                       {&call.frequencies, "frequencies", false},
                                       {&call.factors, "factors", false}}};
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!has(parts[i].tensor)) continue;
    for (size_t j = i + 1; j < parts.size(); ++j) {
      if (!has(parts[j].tensor) || !(parts[i].written || parts[j].written)) continue;
      const bool own_input = (i == 0 && j == 1) || (i == 4 && j == 5);
      if (own_input && is_same_view(*parts[i].tensor, *parts[j].tensor)) continue;
      require(!may_overlap(*parts[i].tensor, *parts[j].tensor), call.op, ": ", parts[i].name,
              " and ", parts[j].name, " share memory");
    }
  }
}

void check_positions(const Call& call, const RopeLayout& layout) {
  const Tensor& p = call.positions;
  const uint64_t tokens = call.x.x.shape(0);
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

void check_frequencies(const Call& call, const RopeLayout& layout) {
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

void fill_stream(const Stream& s, abi::RopeStream& stream) {
  const uint64_t x_unit = size_bytes(s.x.dtype());
  const uint64_t out_unit = size_bytes(s.out.dtype());
  stream.heads = s.x.shape(1);
  stream.x_token_stride = s.x.stride(0) * x_unit;
  stream.x_head_stride = s.x.stride(1) * x_unit;
  stream.out_token_stride = s.out.stride(0) * out_unit;
  stream.out_head_stride = s.out.stride(1) * out_unit;
  stream.second_dtype = dtype_code(s.second);
  stream.weight_dtype = dtype_code(s.weight);
  if (has(s.second)) {
    const uint64_t second_unit = size_bytes(s.second->dtype());
    stream.second_token_stride = s.second->stride(0) * second_unit;
    stream.second_head_stride = s.second->stride(1) * second_unit;
  }
}

void fill_rotation(const Call& call, const RopeLayout& layout, abi::RopeParams& params) {
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

void check_streams(const Call& call) {
  const bool pair = call.k.x.defined();
  check_stream(call, call.x);
  require(pair || !call.k.out.defined(), call.op, ": k_out is defined without k");
  require(pair || (!has(call.k.weight) && !has(call.k.second)), call.op,
          ": k_weight or k_second is defined without k");
  if (!pair) return;
  check_stream(call, call.k);
  check_second_stream(call);
}

void record(Encoder& encoder, const Call& call) {
  Recording recording(encoder, call.op);
  check_streams(call);
  const bool pair = call.k.x.defined();
  const Tensor& x = call.x.x;
  abi::RopeParams params{};
  params.tokens = x.shape(0);
  params.head_dim = x.shape(2);
  params.blocks = 1;
  params.block_stride = params.head_dim;
  params.streams = pair ? 2 : 1;
  params.epsilon = call.epsilon;
  params.weight_offset = call.weight_offset;
  fill_stream(call.x, params.stream[0]);
  if (pair) fill_stream(call.k, params.stream[1]);
  Tensor frequencies = call.frequencies;
  bool adjacent = false;
  if (call.rope != nullptr) {
    const RopeLayout layout = checked_rope_layout(call.op, x.shape(2), *call.rope);
    check_positions(call, layout);
    check_frequencies(call, layout);
    fill_rotation(call, layout, params);
    adjacent = call.rope->pairing == RopePairing::adjacent;
    if (!frequencies.defined()) {
      // A table keeps no whole turns, so a factor could not divide them.
      require(!call.factors.defined() || call.rope->base >= 1, call.op,
              ": factors need a base of at least 1, got ", call.rope->base);
      frequencies = base_frequencies(*encoder.device().impl(), x.shape(2), *call.rope, layout);
    }
    params.frequency_kind = frequencies.dtype() == DType::u32 ? abi::kRopeTurns : abi::kRopeRadians;
  }
  check_overlap(call);
  recording.dispatch(kRope, make_spec(x.dtype(), call.x.out.dtype(), adjacent, call.norm), params,
                     {&x, &call.positions, &call.x.out, &frequencies, &call.factors, call.x.weight,
                      call.x.second, &call.k.x, &call.k.out, call.k.weight, call.k.second});
  recording.commit();
}

}  // namespace

std::string rope_shape(const void* params) {
  const auto& p = *static_cast<const abi::RopeParams*>(params);
  return join("tokens=", p.tokens,
              " heads=", p.stream[0].heads + (p.streams == 2 ? p.stream[1].heads : 0),
              " head_dim=", p.head_dim, " pairs=", p.blocks * p.block_pairs, " mode=", p.mode);
}

std::span<const uint64_t> rope_specs() {
  static const std::array<uint64_t, 36> kSpecs = [] {
    constexpr std::array kFloats = {DType::f32, DType::f16, DType::bf16};
    std::array<uint64_t, 36> specs{};
    for (size_t i = 0; i < specs.size(); ++i) {
      specs[i] =
          spec_key(make_spec(kFloats[i % 3], kFloats[i / 3 % 3], i / 9 % 2 == 1, i / 18 == 1));
    }
    return specs;
  }();
  return kSpecs;
}

bool Device::supports(const RopeTypes& types) const {
  require(impl_ != nullptr, "device.supports: the handle was moved from");
  return impl_->has(kRope.info, spec_key(make_spec(types.x, types.out, false, false)));
}

void rope(Encoder& encoder, const RopeInputs& in, const RopeOptions& options) {
  record(encoder, {.op = "rope",
                   .x = {"x", in.x, in.out, nullptr, nullptr},
                   .k = {"k", in.k, in.k_out, nullptr, nullptr},
                   .positions = in.positions,
                   .frequencies = in.frequencies,
                   .factors = in.factors,
                   .rope = &options,
                   .norm = false,
                   .epsilon = 0,
                   .weight_offset = 0});
}

void norm_rope(Encoder& encoder, const NormRopeInputs& in, const NormRopeOptions& options) {
  require(std::isfinite(options.epsilon) && options.epsilon >= 0,
          "norm_rope: epsilon must be finite and not negative, got ", options.epsilon);
  require(std::isfinite(options.weight_offset), "norm_rope: weight_offset must be finite, got ",
          options.weight_offset);
  record(encoder, {.op = "norm_rope",
                   .x = {"x", in.x, in.out, &in.weight, &in.second},
                   .k = {"k", in.k, in.k_out, &in.k_weight, &in.k_second},
                   .positions = in.positions,
                   .frequencies = in.frequencies,
                   .factors = in.factors,
                   .rope = options.rope ? &*options.rope : nullptr,
                   .norm = true,
                   .epsilon = options.epsilon,
                   .weight_offset = options.weight_offset});
}

}  // namespace gyre
