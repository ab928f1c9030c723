#include "ops/kv_calibration.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <vector>

#include "ops/kv_layout.h"
#include "ops/table.h"
#include "runtime/layout.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

abi::KvFeedbackSpec encode_spec(DType source, uint64_t k_format, uint64_t v_format) {
  return spec_from_key<abi::KvFeedbackSpec>(static_cast<uint64_t>(source) | k_format << 8 |
                                            v_format << 16);
}

abi::KvTransformSpec transform_spec(DType x, DType out) {
  return spec_from_key<abi::KvTransformSpec>(static_cast<uint64_t>(x) | static_cast<uint64_t>(out)
                                                                            << 8);
}

struct Calibrated {
  const char* op;
  const char* name;
  uint64_t kv_heads, head_dim;

  Dims matrix() const { return {kv_heads, head_dim, head_dim}; }
  Dims vector() const { return {kv_heads, head_dim}; }
  void check(const char* what, const Tensor& t, const Dims& shape) const {
    require(t.dtype() == DType::f32 && t.shape() == shape && t.is_contiguous(), op, ": ", what,
            " of ", name, " must be contiguous f32 ", shape, ", got ", t.dtype(), " ", t.shape(),
            " with strides ", t.strides());
  }
};

void check_transform(const Calibrated& c, const KvTransform& transform) {
  if (!transform.defined()) return;
  require(transform.matrix.defined() && transform.inverse.defined(), c.op, ": the transform of ",
          c.name, " needs matrix and inverse, ", transform.matrix.defined() ? "inverse" : "matrix",
          " is undefined");
  c.check("the transform matrix", transform.matrix, c.matrix());
  c.check("the transform inverse", transform.inverse, c.matrix());
  if (transform.mean.defined()) c.check("the mean", transform.mean, c.vector());
}

void check_feedback(const Calibrated& c, const KvFeedback& feedback) {
  require(feedback.factor.defined() == feedback.diagonal.defined(), c.op, ": the feedback of ",
          c.name, " needs factor and diagonal, only ",
          feedback.factor.defined() ? "factor" : "diagonal", " is defined");
  if (feedback.factor.defined()) {
    c.check("the feedback factor", feedback.factor, c.matrix());
    c.check("the feedback diagonal", feedback.diagonal, c.vector());
  }
  require(feedback.gains.size() <= abi::kKvMaxGains, c.op, ": at most ", abi::kKvMaxGains,
          " gains, ", c.name, " has ", feedback.gains.size());
  for (const float gain : feedback.gains) {
    require(gain >= 0.25f && gain <= 4.0f, c.op, ": gains of ", c.name,
            " must be from 0.25 to 4, got ", gain);
  }
}

abi::KvFeedbackStream stream_of(const CalibratedStream& s) {
  const uint64_t unit = size_bytes(s.source.dtype());
  abi::KvFeedbackStream made{};
  made.source_token_stride = s.source.stride(0) * unit;
  made.source_head_stride = s.source.stride(1) * unit;
  made.head_dim = static_cast<uint32_t>(s.source.shape(2));
  made.format = static_cast<uint32_t>(s.format);
  const std::vector<float>& gains = s.calibration.feedback.gains;
  made.gains = static_cast<uint32_t>(std::max<size_t>(gains.size(), 1));
  made.gain[0] = 1.0f;
  std::ranges::copy(gains, made.gain);
  return made;
}

void dispatch_encode(Recording& recording, const abi::KvFeedbackSpec& spec,
                     const abi::KvFeedbackParams& params, const CalibratedStream& k,
                     const CalibratedStream& v, const WriterSources& made) {
  const Tensor none;
  const auto arg = [&](uint32_t i, const Tensor& t) {
    return (made.calibrated >> i & 1) != 0 ? &t : &none;
  };
  const KvCalibration &kc = k.calibration, &vc = v.calibration;
  recording.dispatch(
      kKvFeedback, spec, params,
      {arg(0, k.source), arg(0, kc.transform.matrix), arg(0, kc.transform.inverse),
       arg(0, kc.transform.mean), arg(0, kc.feedback.factor), arg(0, kc.feedback.diagonal),
       arg(0, made.of[0]), arg(1, v.source), arg(1, vc.transform.matrix),
       arg(1, vc.transform.inverse), arg(1, vc.transform.mean), arg(1, vc.feedback.factor),
       arg(1, vc.feedback.diagonal), arg(1, made.of[1])});
}

void check_product_rows(const char* op, const char* what, const Tensor& t) {
  require(t.defined() && t.rank() == 3, op, ": ", what, " must be [tokens, heads, head_dim]");
  require(is_float(t.dtype()), op, ": ", what, " must be f32, f16 or bf16, got ", t.dtype());
  require(t.stride(2) == 1, op, ": head_dim of ", what, " must be contiguous, got stride ",
          t.stride(2));
}

}  // namespace

std::string kv_feedback_shape(const void* params) {
  const auto& p = *static_cast<const abi::KvFeedbackParams*>(params);
  return join("tokens=", p.tokens, " heads=", p.heads, " head_dim=", p.stream[0].head_dim, "/",
              p.stream[1].head_dim, " gains=", p.stream[0].gains, "/", p.stream[1].gains);
}

std::string kv_transform_shape(const void* params) {
  const auto& p = *static_cast<const abi::KvTransformParams*>(params);
  return join("tokens=", p.tokens, " heads=", p.heads, " head_dim=", p.head_dim);
}

std::span<const uint64_t> kv_feedback_specs() {
  return spec_list([](auto add) {
    std::vector<uint64_t> formats = {0};
    for (uint64_t format = abi::kFirstNative; format <= abi::kLastNative; ++format)
      formats.push_back(format);
    for (const DType source : kFloats) {
      for (const uint64_t k : formats) {
        for (const uint64_t v : formats) {
          if (k + v != 0) add(encode_spec(source, k, v));
        }
      }
    }
  });
}

std::span<const uint64_t> kv_transform_specs() {
  return spec_list([](auto add) {
    for (const DType in : kFloats) {
      for (const DType out : kFloats) add(transform_spec(in, out));
    }
  });
}

void check_calibration(const char* op, const char* name, const KvCalibration& calibration,
                       KvFormat format, uint64_t kv_heads, uint64_t head_dim) {
  if (!calibration.defined()) return;
  const bool transform_alone = !is_native(format) && !describe(format).compressed;
  require(is_native(format) || transform_alone, op, ": a calibration is for native formats, ", name,
          " is ", gyre::name(format));
  require(abi::kv_takes_calibration(head_dim), op,
          ": a calibration is for head dims that are a power of two from 16 to ",
          abi::kKvMaxCalibratedDim, ", ", name, " has ", head_dim);
  const Calibrated c{op, name, kv_heads, head_dim};
  check_transform(c, calibration.transform);
  check_feedback(c, calibration.feedback);
}

WriterSources encode_rows(Recording& recording, const Device& device, const CalibratedStream& k,
                          const CalibratedStream& v) {
  WriterSources made{{k.source, v.source}, 0};
  abi::KvFeedbackParams params{};
  uint64_t format[2] = {};
  const CalibratedStream* const streams[2] = {&k, &v};
  for (uint32_t i = 0; i < 2; ++i) {
    const CalibratedStream& s = *streams[i];
    if (!s.source.defined() || !s.calibration.defined()) continue;
    const uint64_t tokens = s.source.shape(0), heads = s.source.shape(1), dim = s.source.shape(2);
    if (!is_native(s.format)) {
      if (!s.calibration.transform.defined()) continue;
      made.of[i] = device.tensor(DType::f32, {tokens, heads, dim});
      dispatch_transform(
          recording,
          {s.source, s.calibration.transform.matrix, s.calibration.transform.mean, {}, made.of[i]});
      continue;
    }
    params.tokens = tokens;
    params.heads = heads;
    params.stream[i] = stream_of(s);
    format[i] = static_cast<uint64_t>(s.format);
    made.of[i] = device.tensor(DType::u8, {tokens, heads, abi::kv_calibrated_bytes(dim)});
    made.calibrated |= 1u << i;
  }
  if (made.calibrated == 0) return made;
  const DType dtype = (made.calibrated & 1) != 0 ? k.source.dtype() : v.source.dtype();
  dispatch_encode(recording, encode_spec(dtype, format[0], format[1]), params, k, v, made);
  return made;
}

void dispatch_transform(Recording& recording, const KvTransformInputs& in) {
  const uint64_t x_unit = size_bytes(in.x.dtype()), out_unit = size_bytes(in.out.dtype());
  abi::KvTransformParams params{};
  params.tokens = in.x.shape(0);
  params.heads = in.x.shape(1);
  params.x_token_stride = in.x.stride(0) * x_unit;
  params.x_head_stride = in.x.stride(1) * x_unit;
  params.out_token_stride = in.out.stride(0) * out_unit;
  params.out_head_stride = in.out.stride(1) * out_unit;
  params.head_dim = static_cast<uint32_t>(in.x.shape(2));
  params.group = static_cast<uint32_t>(in.x.shape(1) / in.matrix.shape(0));
  recording.dispatch(kKvTransform, transform_spec(in.x.dtype(), in.out.dtype()), params,
                     {&in.x, &in.matrix, &in.before, &in.after, &in.out});
}

TransformAttention enter_transform(Recording& recording, const Device& device,
                                   const TransformPair& transforms, const Tensor& q,
                                   const Tensor& out, bool is_dense) {
  if (!transforms.defined()) return {q, out};
  const DType dtype = is_dense ? q.dtype() : DType::f32;
  TransformAttention inside{device.tensor(dtype, q.shape()),
                            device.tensor(DType::f32, out.shape())};
  const auto enter = [&](const KvTransform& by, uint64_t first) {
    const uint64_t dim = by.inverse.shape(2);
    dispatch_transform(recording,
                       {q.slice(2, first, dim), by.inverse, {}, {}, inside.q.slice(2, first, dim)});
  };
  enter(transforms.k, 0);
  if (transforms.latent) enter(transforms.v, transforms.k.inverse.shape(2));
  return inside;
}

void leave_transform(Recording& recording, const TransformPair& transforms,
                     const TransformAttention& inside, const Tensor& out) {
  if (!transforms.defined()) return;
  const KvTransform& by = transforms.of_outputs();
  dispatch_transform(recording, {inside.out, by.inverse, {}, by.mean, out});
}

void check_means(const char* op, const TransformPair& transforms, const MeanConflicts& with) {
  const auto refuse = [&](bool conflict, const char* role, const char* what) {
    require(!conflict, op, ": the transform of ", role, " has a mean, which ", what,
            " does not go with; calibrate without a mean");
  };
  const bool k = transforms.k.mean.defined(), v = transforms.v.mean.defined();
  const bool scores = k || (transforms.latent && v);
  refuse(scores && with.lse, k ? "k" : "v", "lse");
  refuse(scores && with.soft_cap, k ? "k" : "v", "soft_cap");
  refuse((k || v) && with.sink_logits, k ? "k" : "v", "sink_logits");
  refuse(v && with.tree_mask, "v", "a tree_mask");
}

void kv_transform(Encoder& encoder, const KvTransformInputs& in) try {
  constexpr const char* kOp = "kv_transform";
  Recording recording(encoder, kOp);
  check_product_rows(kOp, "x", in.x);
  check_product_rows(kOp, "out", in.out);
  require(in.out.shape() == in.x.shape(), kOp, ": out must have the shape of x ", in.x.shape(),
          ", got ", in.out.shape());
  const uint64_t heads = in.x.shape(1), dim = in.x.shape(2);
  require(dim >= 16 && dim <= abi::kKvMaxHeadDim && dim % 16 == 0, kOp,
          ": head_dim must be a multiple of 16 from 16 to ", abi::kKvMaxHeadDim, ", got ", dim);
  require(in.matrix.defined() && in.matrix.rank() == 3 && in.matrix.shape(0) != 0 &&
              heads % in.matrix.shape(0) == 0,
          kOp, ": matrix must be [kv_heads, head_dim, head_dim], kv_heads a divisor of ", heads);
  // A grid has room for that many, and caches allow no more.
  require(in.matrix.shape(0) <= uint64_t{1} << 14, kOp, ": at most 2^14 matrices, got ",
          in.matrix.shape(0));
  const Calibrated c{kOp, "x", in.matrix.shape(0), dim};
  c.check("matrix", in.matrix, c.matrix());
  if (in.before.defined()) c.check("before", in.before, c.vector());
  if (in.after.defined()) c.check("after", in.after, c.vector());
  require(in.out.is_injective(), kOp, ": strides ", in.out.strides(),
          " make elements of out share memory");
  require(is_same_view(in.x, in.out) || !may_overlap(in.x, in.out), kOp,
          ": x and out share memory");
  for (const Tensor* read : {&in.matrix, &in.before, &in.after}) {
    require(!read->defined() || !may_overlap(*read, in.out), kOp,
            ": out shares memory with matrix, before or after");
  }
  if (in.x.elements() == 0) return;
  dispatch_transform(recording, in);
  recording.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("kv_transform");
}

}  // namespace gyre
