#include "ops/cache_ops.h"

#include <array>
#include <vector>

#include "ops/kv_calibration.h"
#include "ops/kv_layout.h"
#include "ops/table.h"
#include "ops/writers.h"
#include "runtime/layout.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

void check_tokens(const char* op, const char* what, const Tensor& rows, const KvBuffer& cache) {
  require(rows.defined(), op, ": ", what, " is undefined");
  require(rows.rank() == 3 && rows.shape(1) == cache.shape.kv_heads &&
              rows.shape(2) == cache.shape.head_dim,
          op, ": ", what, " must be [tokens, ", cache.shape.kv_heads, ", ", cache.shape.head_dim,
          "], got ", rows.shape());
  require(is_float(rows.dtype()), op, ": ", what, " must be f32, f16 or bf16, got ", rows.dtype());
  require(rows.stride(2) == 1, op, ": head_dim of ", what, " must be contiguous, got stride ",
          rows.stride(2));
  require(!may_overlap(rows, cache.codes), op, ": ", what, " shares memory with the cache");
}

abi::WriteStream make_stream(const Tensor& source, const KvBuffer& body,
                             const abi::KvPlaces& places) {
  const uint64_t row_bytes = body.shape.head_dim * size_bytes(DType::f16);
  abi::WriteStream stream = write_stream(source, kv_cache_layout(body));
  stream.sinks_head_stride = places.sink_tokens * row_bytes;
  stream.tail_head_stride = places.tail_capacity * row_bytes;
  stream.tail_offset = body.shape.kv_heads * places.sink_tokens * row_bytes;
  return stream;
}

}  // namespace

std::string kv_extend_shape(const void* params) {
  const auto& p = *static_cast<const abi::KvExtendParams*>(params);
  return join("start=", p.state.start, " length=", p.state.length);
}

std::string kv_append_shape(const void* params) {
  const auto& p = *static_cast<const abi::WriteParams*>(params);
  return join("tokens=", p.tokens, " heads=", p.heads, " head_dim=", p.stream[0].cache.head_dim,
              "/", p.stream[1].cache.head_dim, " sink_tokens=", p.places.sink_tokens,
              " tail=", p.places.tail);
}

std::string bytes_copy_shape(const void* params) {
  const auto& p = *static_cast<const abi::BytesCopyParams*>(params);
  return p.rows == 1 ? join("bytes=", p.bytes) : join("rows=", p.rows, " bytes=", p.bytes);
}

std::span<const uint64_t> plain_specs() {
  static constexpr std::array<uint64_t, 1> kSpecs = {0};
  return kSpecs;
}

std::span<const uint64_t> kv_append_specs() {
  static const auto& kSpecs = *new std::vector<uint64_t>(write_specs({.formats = kv_formats()}));
  return kSpecs;
}

Dims f16_shape(const KvShape& body, const abi::KvPlaces& places) {
  return {body.kv_heads, places.sink_tokens + places.tail_capacity, body.head_dim};
}

void add_f16(CacheSegments& segments, const Tensor& k_f16, const Tensor& v_f16) {
  const CacheSegment body = segments.of[0];
  const abi::KvPlaces& places = body.at.places;
  const auto part = [&](const KvShape& shape, const Tensor& rows, uint64_t first, uint64_t slots) {
    const uint64_t slot_elements = shape.kv_heads * shape.head_dim;
    KvBuffer made{shape, {}, {}};
    made.shape.format = KvFormat::f16;
    made.shape.capacity = slots;
    made.codes = rows.reshape({rows.elements()})
                     .slice(0, first * slot_elements, slots * slot_elements)
                     .reshape({shape.kv_heads, slots, shape.head_dim});
    return made;
  };
  const auto add = [&](abi::KvSegment kind, uint64_t first, uint64_t slots) {
    if (slots == 0) return;
    segments.of[segments.count++] = {part(body.k.shape, k_f16, first, slots),
                                     part(body.v.shape, v_f16, first, slots),
                                     {body.at.state, places, kind}};
  };
  add(abi::kSegmentSinks, 0, places.sink_tokens);
  add(abi::kSegmentTail, places.sink_tokens, places.tail_capacity);
  segments.k_f16 = k_f16;
  segments.v_f16 = v_f16;
}

void extend_cache(Encoder& encoder, const Tensor& state, const Tensor& positions,
                  const abi::KvExtendParams& params, const NewNote* note) {
  Recording recording(encoder, "kv_cache.begin_step");
  recording.dispatch(kKvExtend, abi::KvExtendSpec{}, params, {&state, &positions});
  if (note != nullptr) recording.note(*note);
  recording.commit();
}

abi::WriteParams checked_append(const char* op, const CacheAppend& in) {
  const CacheSegment& body = in.segments.of[0];
  check_tokens(op, "k", in.k, body.k);
  check_tokens(op, "v", in.v, body.v);
  check_rows_pair(op, in.k, in.v);
  abi::WriteParams params{};
  params.tokens = in.k.shape(0);
  params.heads = body.k.shape.kv_heads;
  params.streams = 2;
  params.where = abi::kWriteState;
  params.places = body.at.places;
  params.stream[0] = make_stream(in.k, body.k, params.places);
  params.stream[1] = make_stream(in.v, body.v, params.places);
  return params;
}

void dispatch_append(Recording& recording, const Device& device, const CacheAppend& in,
                     abi::WriteParams params) {
  const CacheSegment& body = in.segments.of[0];
  const KvLayerCalibration& calibration = in.segments.calibration;
  const WriterSources rows =
      encode_rows(recording, device, {in.k, calibration.k, body.k.shape.format},
                  {in.v, calibration.v, body.v.shape.format});
  params.stream[0] = make_stream(rows.of[0], body.k, params.places);
  params.stream[1] = make_stream(rows.of[1], body.v, params.places);
  recording.dispatch(
      kKvAppend,
      write_spec({.source = in.k.dtype(),
                  .k_format = static_cast<uint64_t>(body.k.shape.format),
                  .v_format = static_cast<uint64_t>(body.v.shape.format),
                  .calibrated = rows.calibrated}),
      params,
      {&body.at.state, &rows.of[0], &body.k.codes, &body.k.scales, &in.segments.k_f16, &rows.of[1],
       &body.v.codes, &body.v.scales, &in.segments.v_f16});
}

void append_cache(Encoder& encoder, const CacheAppend& in, const NewNote* note) {
  Recording recording(encoder, "kv_cache.append");
  dispatch_append(recording, encoder.device(), in, checked_append("kv_cache.append", in));
  if (note != nullptr) recording.note(*note);
  recording.commit();
}

void copy_bytes(Encoder& encoder, const Tensor& from, const Tensor& to, const NewNote* note) {
  if (!from.defined() || from.bytes() == 0) return;
  Recording recording(encoder, "kv_cache.fork");
  abi::BytesCopyParams params{from.bytes(), 1, 0, 0};
  if (!from.is_contiguous() || !to.is_contiguous()) {
    const uint64_t size = size_bytes(from.dtype()), rows = from.shape(0);
    params = {from.bytes() / rows, rows, from.stride(0) * size, to.stride(0) * size};
  }
  recording.dispatch(kBytesCopy, abi::BytesCopySpec{}, params, {&from, &to});
  if (note != nullptr) recording.note(*note);
  recording.commit();
}

}  // namespace gyre
