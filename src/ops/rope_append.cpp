// rope_append: to slots of pages, or into a KvCache.
#include "gyre/rope_append.h"

#include <array>
#include <functional>
#include <vector>

#include "ops/cache_ops.h"
#include "ops/kv_pages.h"
#include "ops/rope_check.h"
#include "ops/table.h"
#include "ops/writers.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

struct SpecFields {
  uint64_t dtype, k_format, v_format, adjacent, norm, slot_bytes, lane_quads;
};
abi::RopeAppendSpec make_spec(const SpecFields& f) {
  return spec_from_key<abi::RopeAppendSpec>(f.dtype | f.k_format << 8 | f.v_format << 16 |
                                            f.adjacent << 24 | f.norm << 32 | f.slot_bytes << 40 |
                                            f.lane_quads << 48);
}

// Where k and v go: the args from "where" on, and the memory that is written.
struct Target {
  const Tensor* where;
  uint64_t slot_bytes;  // 0: where is a cache's state
  bool calibrated;      // rows are encoded by a command of their own
  KvFormat k_format, v_format;
  std::array<const Tensor*, 3> k, v;           // codes, scales, sink tokens and tail
  std::array<RopePart, 2> written;             // for the check of overlaps
  std::function<void(const Tensor& k)> store;  // the same by a command of its own, k rotated
};

RopeCall make_call(const char* op, const RopeAppendInputs& in, const RopeAppendOptions& options) {
  const RopeNorm norm = options.norm.value_or(RopeNorm{.epsilon = 0});
  check_norm(op, norm.epsilon, norm.weight_offset);
  require(options.rope || options.norm, op, ": neither rope nor norm is asked for");
  require(options.norm || (!in.q_weight.defined() && !in.k_weight.defined()), op,
          ": q_weight or k_weight is defined without a norm");
  return {.op = op,
          .x = {"q", &in.q, &in.q_out, &in.q_weight, nullptr},
          .k = {"k", &in.k, nullptr, &in.k_weight, nullptr},
          .positions = in.positions,
          .frequencies = in.frequencies,
          .factors = in.factors,
          .rope = options.rope ? &*options.rope : nullptr,
          .norm = options.norm.has_value(),
          .epsilon = norm.epsilon,
          .weight_offset = norm.weight_offset};
}

void check_call(const RopeCall& call, const Tensor& v) {
  check_rope_side(call, call.k);
  require(v.defined(), call.op, ": v is undefined");
  require(call.x.x->defined() || (!call.x.out->defined() && !call.x.weight->defined()), call.op,
          ": q_out or q_weight is defined without q");
  if (!call.x.x->defined()) return;
  check_rope_side(call, call.x);
  check_rope_sides(call);
  require(call.x.out->dtype() == call.x.x->dtype(), call.op,
          ": q_out must have the dtype of q: ", call.x.x->dtype(), ", got ", call.x.out->dtype());
}

void check_overlap(const RopeCall& call, const Tensor& v, const Target& to) {
  constexpr size_t kQ = 0;
  check_rope_parts(call.op, std::array<RopePart, 12>{{{call.x.x, "q", false},
                                                      {call.x.out, "q_out", true, kQ},
                                                      {call.k.x, "k", false},
                                                      {&v, "v", false},
                                                      {call.x.weight, "q_weight", false},
                                                      {call.k.weight, "k_weight", false},
                                                      {&call.positions, "positions", false},
                                                      {&call.frequencies, "frequencies", false},
                                                      {&call.factors, "factors", false},
                                                      {to.where, "slots", false},
                                                      to.written[0],
                                                      to.written[1]}});
}

// For devices without a kernel for many tokens, where a second command costs little; and for rows
// with a calibration.
void dispatch_two(Recording& recording, const Encoder& encoder, const RopeCall& call,
                  const Target& to, abi::RopeParams params, const Tensor& frequencies) {
  const Tensor& k = *call.k.x;
  const Tensor rotated = encoder.device().tensor(k.dtype(), k.shape());
  const RopeSide key{"k", &k, &rotated, call.k.weight, nullptr};
  const RopeSide none{"", nullptr, nullptr, nullptr, nullptr};
  const bool has_q = call.x.x->defined();
  const RopeSide& x = has_q ? call.x : key;
  const RopeSide& second = has_q ? key : none;
  params.streams = has_q ? 2 : 1;
  fill_rope_side(x, params.stream[0]);
  if (has_q) fill_rope_side(second, params.stream[1]);
  recording.dispatch(kRope, rope_spec(k.dtype(), k.dtype(), call.adjacent(), call.norm), params,
                     {x.x, &call.positions, x.out, &frequencies, &call.factors, x.weight, nullptr,
                      second.x, second.out, second.weight, nullptr});
  to.store(rotated);
}

void dispatch(Recording& recording, const Encoder& encoder, const RopeCall& call, const Tensor& v,
              const Target& to, abi::RopeAppendParams& params) {
  params.rope.tokens = call.k.x->shape(0);
  params.rope.head_dim = call.k.x->shape(2);
  params.rope.streams = call.x.x->defined() ? 1 : 0;
  if (call.x.x->defined()) fill_rope_side(call.x, params.rope.stream[0]);
  fill_rope_side(call.k, params.rope.stream[1]);
  const Tensor frequencies = fill_rope(encoder, call, params.rope);
  check_overlap(call, v, to);
  const abi::KvRowShape rows{static_cast<uint32_t>(to.k_format), static_cast<uint32_t>(to.v_format),
                             params.rope.head_dim, v.shape(2)};
  const uint32_t quads = params.rope.tokens <= abi::kRopeFewTokens ? abi::kv_lane_quads(rows) : 0;
  const abi::RopeAppendSpec spec =
      make_spec({static_cast<uint64_t>(call.k.x->dtype()), rows.k_format, rows.v_format,
                 call.adjacent() ? 1u : 0u, call.norm ? 1u : 0u, to.slot_bytes, quads});
  if (to.calibrated ||
      (quads == 0 && !impl_of(encoder.device())->has(kRopeAppend.info, spec_key(spec))))
    return dispatch_two(recording, encoder, call, to, params.rope, frequencies);
  recording.dispatch(kRopeAppend, spec, params,
                     {call.x.x, &call.positions, call.x.out, &frequencies, &call.factors,
                      call.x.weight, call.k.weight, to.where, call.k.x, to.k[0], to.k[1], to.k[2],
                      &v, to.v[0], to.v[1], to.v[2]});
}

}  // namespace

std::string rope_append_shape(const void* params) {
  const auto& p = *static_cast<const abi::RopeAppendParams*>(params);
  return join("tokens=", p.rope.tokens, " heads=", p.rope.streams != 0 ? p.rope.stream[0].heads : 0,
              "/", p.rope.stream[1].heads, " head_dim=", p.rope.head_dim, "/",
              p.write.stream[1].cache.head_dim, p.write.where == abi::kWriteSlots ? " pages" : "");
}

std::span<const uint64_t> rope_append_specs() {
  return spec_list([](auto add) {
    for (const DType dtype : kFloats) {
      for (const KvFormat k : kv_formats()) {
        for (const KvFormat v : kv_formats()) {
          for (const uint64_t quads : lane_quads_of(k, v)) {
            for (uint64_t i = 0; i < 4; ++i) {
              for (const uint64_t slot_bytes : {0u, 4u, 8u})
                add(make_spec({static_cast<uint64_t>(dtype), static_cast<uint64_t>(k),
                               static_cast<uint64_t>(v), i & 1, i >> 1, slot_bytes, quads}));
            }
          }
        }
      }
    }
  });
}

void rope_append(Encoder& encoder, const RopeAppendInputs& in, const KvSlots& to,
                 const RopeAppendOptions& options) try {
  constexpr const char* kOp = "rope_append";
  Recording recording(encoder, kOp);
  const RopeCall call = make_call(kOp, in, options);
  require(!to.pages.shape.latent, kOp, ": the shape of the pages", kLatentIsNotRotated);
  check_call(call, in.v);
  KvPageParts parts;
  abi::RopeAppendParams params{};
  params.write = checked_write(
      kOp, {in.k, in.v, to.pages, to.slots, to.k_calibration, to.v_calibration}, parts);
  const Target target{
      .where = &to.slots,
      .slot_bytes = size_bytes(to.slots.dtype()),
      .calibrated = to.k_calibration.defined() || to.v_calibration.defined(),
      .k_format = to.pages.shape.k,
      .v_format = to.pages.shape.v,
      .k = {&parts.k_codes, &parts.k_scales, nullptr},
      .v = {&parts.v_codes, &parts.v_scales, nullptr},
      .written = {{{&to.pages.bytes, "pages", true}, {nullptr, "", false}}},
      .store = [&](const Tensor& k) {
        const KvWriteInputs write{k, in.v, to.pages, to.slots, to.k_calibration, to.v_calibration};
        dispatch_write(recording, encoder.device(), write, parts, checked_write(kOp, write, parts));
      }};
  dispatch(recording, encoder, call, in.v, target, params);
  recording.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("rope_append");
}

void rope_append_cache(Encoder& encoder, const RopeAppendInputs& in,
                       const RopeAppendOptions& options, const CacheSegments& segments,
                       const NewNote* note) {
  constexpr const char* kOp = "kv_cache.rope_append";
  Recording recording(encoder, kOp);
  const RopeCall call = make_call(kOp, in, options);
  check_call(call, in.v);
  abi::RopeAppendParams params{};
  params.write = checked_append(kOp, {in.k, in.v, segments});
  const CacheSegment& body = segments.of[0];
  const Target target{
      .where = &body.at.state,
      .slot_bytes = 0,
      .calibrated = segments.calibration.k.defined() || segments.calibration.v.defined(),
      .k_format = body.k.shape.format,
      .v_format = body.v.shape.format,
      .k = {&body.k.codes, &body.k.scales, &segments.k_f16},
      .v = {&body.v.codes, &body.v.scales, &segments.v_f16},
      .written = {{{&body.k.codes, "the cache's keys", true},
                   {&body.v.codes, "the cache's values", true}}},
      .store = [&](const Tensor& k) {
        const CacheAppend append{k, in.v, segments};
        dispatch_append(recording, encoder.device(), append, checked_append(kOp, append));
      }};
  dispatch(recording, encoder, call, in.v, target, params);
  if (note != nullptr) recording.note(*note);
  recording.commit();
}

}  // namespace gyre
