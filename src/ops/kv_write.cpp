// kv_write and kv_page_copy: ops over pages.
#include <algorithm>
#include <vector>

#include "gyre/write.h"
#include "ops/kv_calibration.h"
#include "ops/kv_layout.h"
#include "ops/kv_pages.h"
#include "ops/table.h"
#include "ops/writers.h"
#include "runtime/layout.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

void check_rows(const char* op, const KvWriteInputs& in) {
  const KvPageShape& shape = in.pages.shape;
  const uint64_t v_dim = shape.v_head_dim != 0 ? shape.v_head_dim : shape.head_dim;
  const auto rows_of = [&](KvFormat format, KvRole role, uint64_t head_dim) {
    return KvShape{format, role, shape.kv_heads, shape.page_tokens, head_dim};
  };
  check_kv_rows(op, "k", in.k, rows_of(shape.k, KvRole::k, shape.head_dim));
  check_kv_rows(op, "v", in.v, rows_of(shape.v, KvRole::v, v_dim));
  check_rows_pair(op, in.k, in.v);
  check_calibration(op, "k", in.k_calibration, shape.k, shape.kv_heads, shape.head_dim);
  check_calibration(op, "v", in.v_calibration, shape.v, shape.kv_heads, v_dim);
  const bool dense = !describe(shape.k).compressed || !describe(shape.v).compressed;
  require(!dense || in.k_calibration.transform.defined() == in.v_calibration.transform.defined(),
          op, ": where k or v is not compressed both have a transform or neither, got one of ",
          in.k_calibration.transform.defined() ? "k" : "v", " alone");
  // Work is counted in 64 bits from these.
  require(in.k.shape(0) <= uint64_t{1} << 32, op, ": at most 2^32 tokens, got ", in.k.shape(0));
}

void check_slots(const char* op, const KvWriteInputs& in) {
  const Tensor& slots = in.slots;
  require(slots.defined(), op, ": slots is undefined");
  require(slots.dtype() == DType::i64 || slots.dtype() == DType::i32, op,
          ": slots must be i64 or i32, got ", slots.dtype());
  require(slots.rank() == 1 && slots.shape(0) == in.k.shape(0) && slots.is_contiguous(), op,
          ": slots must be contiguous [", in.k.shape(0), "], got ", slots.shape(), " with strides ",
          slots.strides());
}

void check_apart(const char* op, const char* what, const Tensor& read, const KvPages& pages) {
  require(!may_overlap(read, pages.bytes), op, ": ", what, " and pages share memory");
}

void check_page_list(const char* what, const Tensor& list) {
  require(list.defined(), "kv_page_copy: ", what, " is undefined");
  require(list.dtype() == DType::i32 && list.rank() == 1 && list.is_contiguous(),
          "kv_page_copy: ", what, " must be contiguous i32 [count], got ", list.dtype(), " ",
          list.shape(), " with strides ", list.strides());
}

}  // namespace

std::string kv_write_shape(const void* params) {
  const auto& p = *static_cast<const abi::WriteParams*>(params);
  return join("tokens=", p.tokens, " heads=", p.heads, " head_dim=", p.stream[0].cache.head_dim,
              "/", p.stream[1].cache.head_dim, " pages=", p.pages.pages, " x ",
              p.pages.page_tokens);
}

std::string kv_page_copy_shape(const void* params) {
  const auto& p = *static_cast<const abi::KvPageCopyParams*>(params);
  return join("count=", p.count, " page_bytes=", p.page_bytes);
}

std::span<const uint64_t> kv_write_specs() {
  static const auto& kSpecs = *new std::vector<uint64_t>(
      write_specs({.formats = kv_formats(), .slot_bytes = {4, 8}, .few_rows = true}));
  return kSpecs;
}

abi::WriteParams checked_write(const char* op, const KvWriteInputs& in, KvPageParts& parts) {
  check_pages(op, in.pages);
  check_rows(op, in);
  check_slots(op, in);
  check_apart(op, "k", in.k, in.pages);
  check_apart(op, "v", in.v, in.pages);
  check_apart(op, "slots", in.slots, in.pages);
  parts = page_parts(in.pages);
  abi::WriteParams params{};
  params.tokens = in.k.shape(0);
  params.heads = in.pages.shape.kv_heads;
  params.streams = 2;
  params.where = abi::kWriteSlots;
  params.pages = {in.pages.bytes.shape(0), parts.page_stride,
                  static_cast<uint32_t>(in.pages.shape.page_tokens),
                  static_cast<uint32_t>(size_bytes(in.slots.dtype()))};
  params.stream[0] = write_stream(in.k, parts.k);
  params.stream[1] = write_stream(in.v, parts.v);
  return params;
}

void dispatch_write(Recording& recording, const Device& device, const KvWriteInputs& in,
                    const KvPageParts& parts, abi::WriteParams params) {
  const KvPageShape& shape = in.pages.shape;
  const WriterSources rows = encode_rows(recording, device, {in.k, in.k_calibration, shape.k},
                                         {in.v, in.v_calibration, shape.v});
  params.stream[0] = write_stream(rows.of[0], parts.k);
  params.stream[1] = write_stream(rows.of[1], parts.v);
  const bool calibrated_k = (rows.calibrated & 1) != 0, calibrated_v = (rows.calibrated & 2) != 0;
  const DType dtype =
      calibrated_k && calibrated_v ? in.k.dtype() : rows.of[calibrated_k ? 1 : 0].dtype();
  const uint64_t tokens = params.tokens;
  WriteTypes types{.source = dtype,
                   .k_format = parts.k.format,
                   .v_format = parts.v.format,
                   .calibrated = rows.calibrated,
                   .slot_bytes = params.pages.slot_bytes};
  if (rows.calibrated == 0 && tokens <= abi::kWriteFewTokens)
    types.lane_quads =
        abi::kv_lane_quads({parts.k.format, parts.v.format, parts.k.head_dim, parts.v.head_dim});
  const abi::WriteSpec spec = write_spec(types);
  for (uint64_t first = 0; first < tokens; first += params.tokens) {
    params.tokens = std::min(tokens - first, abi::kWriteMaxTokens);
    const auto part = [&](const Tensor& x) { return x.slice(0, first, params.tokens); };
    const Tensor k = part(rows.of[0]), v = part(rows.of[1]), slots = part(in.slots);
    recording.dispatch(kKvWrite, spec, params,
                       {&slots, &k, &parts.k_codes, &parts.k_scales, nullptr, &v, &parts.v_codes,
                        &parts.v_scales, nullptr});
  }
}

void kv_write(Encoder& encoder, const KvWriteInputs& in) try {
  Recording recording(encoder, "kv_write");
  KvPageParts parts;
  const abi::WriteParams params = checked_write("kv_write", in, parts);
  if (params.tokens == 0) return;
  dispatch_write(recording, encoder.device(), in, parts, params);
  recording.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("kv_write");
}

void kv_page_copy(Encoder& encoder, const KvPageCopyInputs& in) try {
  Recording recording(encoder, "kv_page_copy");
  check_pages("kv_page_copy", in.pages);
  check_page_list("from", in.from);
  check_page_list("to", in.to);
  require(in.to.shape(0) == in.from.shape(0),
          "kv_page_copy: to must have as many pages as from: ", in.from.shape(0), ", got ",
          in.to.shape(0));
  require(in.from.shape(0) <= in.pages.bytes.shape(0), "kv_page_copy: at most as many pairs as ",
          in.pages.bytes.shape(0), " pages, got ", in.from.shape(0));
  check_apart("kv_page_copy", "from", in.from, in.pages);
  check_apart("kv_page_copy", "to", in.to, in.pages);
  if (in.from.shape(0) == 0) return;
  abi::KvPageCopyParams params{};
  params.count = in.from.shape(0);
  params.pages = in.pages.bytes.shape(0);
  params.page_stride = page_parts(in.pages).page_stride;
  params.page_bytes = in.pages.bytes.shape(1);
  recording.dispatch(kKvPageCopy, abi::KvPageCopySpec{}, params,
                     {&in.pages.bytes, &in.from, &in.to});
  recording.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("kv_page_copy");
}

}  // namespace gyre
