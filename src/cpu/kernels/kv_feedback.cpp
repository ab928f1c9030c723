// kv_feedback and kv_transform on the CPU. A task is a share of the rows; rows of one head follow
// each other, so that its matrices stay in the cache.
#include "abi/kv_feedback.h"

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/kv_feedback.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/kv_calibrated-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

constexpr uint32_t kStreamArgs = 7;  // source, matrix, inverse, mean, factor, diagonal, calibrated

inline HeadCalibration CalibrationOf(const abi::KvFeedbackStream& s, const uint64_t* args,
                                     uint64_t head, bool is_v) {
  const uint64_t n = s.head_dim;
  const auto at = [&](uint64_t address, uint64_t size) {
    return address != 0 ? pointer<const float>(address) + head * size : nullptr;
  };
  return {at(args[1], n * n),
          at(args[2], n * n),
          at(args[3], n),
          at(args[4], n * n),
          at(args[5], n),
          s.gain,
          s.gains,
          s.format,
          is_v};
}

void EncodeRows(const abi::KvFeedbackParams& p, const uint64_t* args, uint32_t stream, Share rows,
                DType source, CalibratedWork& work) {
  const abi::KvFeedbackStream& s = p.stream[stream];
  const uint64_t* const at = args + kStreamArgs * stream;
  const uint64_t row_bytes = abi::kv_calibrated_bytes(s.head_dim);
  for (uint64_t row = rows.begin; row < rows.end; ++row) {
    const uint64_t head = row / p.tokens, token = row % p.tokens;
    RowToF32(at[0] + token * s.source_token_stride + head * s.source_head_stride, source, work.y,
             s.head_dim);
    EncodeCalibratedRow(CalibrationOf(s, at, head, stream == 1), s.head_dim, work,
                        pointer<uint8_t>(at[6]) + (token * p.heads + head) * row_bytes);
  }
}

// Rows of K, then those of V.
void FeedbackTask(const void* params, const uint64_t* args, DType source, uint32_t task,
                  uint32_t tasks) {
  const auto& p = *static_cast<const abi::KvFeedbackParams*>(params);
  const uint64_t rows = p.tokens * p.heads;
  const uint64_t rows_k = p.stream[0].head_dim != 0 ? rows : 0;
  const uint64_t rows_v = p.stream[1].head_dim != 0 ? rows : 0;
  const Share share = share_of(rows_k + rows_v, task, tasks);
  CalibratedWork work;
  const auto encode = [&](uint32_t stream, Share part) {
    if (part.begin < part.end) EncodeRows(p, args, stream, part, source, work);
  };
  encode(0, {share.begin, std::min(share.end, rows_k)});
  encode(1, {std::max(share.begin, rows_k) - rows_k, std::max(share.end, rows_k) - rows_k});
}

template <class Source>
void KvFeedback(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  FeedbackTask(params, args, DTypeOf<Source>::value, task, tasks);
}

constexpr uint32_t kTransformRows = 4;  // that share what is loaded of a matrix

struct TransformDTypes {
  DType x, out;
};

void TransformTask(const void* params, const uint64_t* args, TransformDTypes dtypes, uint32_t task,
                   uint32_t tasks) {
  const auto& p = *static_cast<const abi::KvTransformParams*>(params);
  const uint64_t n = p.head_dim;
  alignas(64) float x[kTransformRows][abi::kKvMaxHeadDim], out[kTransformRows][abi::kKvMaxHeadDim];
  const Share share = share_of(p.heads * p.tokens, task, tasks);
  const uint64_t same = p.group * p.tokens;  // rows of one matrix
  for (uint64_t row = share.begin; row < share.end;) {
    const uint64_t of = row / same;
    const uint64_t count =
        std::min({uint64_t{kTransformRows}, share.end - row, (of + 1) * same - row});
    const auto at = [&](uint64_t i, uint64_t token_stride, uint64_t head_stride) {
      return (row + i) % p.tokens * token_stride + (row + i) / p.tokens * head_stride;
    };
    for (uint64_t i = 0; i < count; ++i) {
      RowToF32(args[0] + at(i, p.x_token_stride, p.x_head_stride), dtypes.x, x[i], n);
      for (uint64_t j = 0; j < n && args[2] != 0; ++j)
        x[i][j] -= pointer<const float>(args[2])[of * n + j];
    }
    const float* const matrix = pointer<const float>(args[1]) + of * n * n;
    if (count == kTransformRows) {
      MultiplyRows<kTransformRows>(matrix, x[0], abi::kKvMaxHeadDim, p.head_dim, out[0]);
    } else {
      for (uint64_t i = 0; i < count; ++i) MultiplyRows<1>(matrix, x[i], 0, p.head_dim, out[i]);
    }
    for (uint64_t i = 0; i < count; ++i) {
      for (uint64_t j = 0; j < n && args[3] != 0; ++j)
        out[i][j] += pointer<const float>(args[3])[of * n + j];
      RowFromF32(out[i], args[4] + at(i, p.out_token_stride, p.out_head_stride), dtypes.out, n);
    }
    row += count;
  }
}

template <class X, class Out>
void KvTransform(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  TransformTask(params, args, {DTypeOf<X>::value, DTypeOf<Out>::value}, task, tasks);
}

TaskFn SelectKvFeedback(uint64_t key) {
  return select_float(spec_from_key<abi::KvFeedbackSpec>(key).source_dtype,
                      [](auto source) -> TaskFn { return KvFeedback<decltype(source)>; });
}

TaskFn SelectKvTransform(uint64_t key) {
  const auto spec = spec_from_key<abi::KvTransformSpec>(key);
  return select_float(spec.x_dtype, [&](auto x) {
    return select_float(spec.out_dtype,
                        [](auto out) -> TaskFn { return KvTransform<decltype(x), decltype(out)>; });
  });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectKvFeedback);
HWY_EXPORT(SelectKvTransform);

TaskFn select_kv_feedback(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectKvFeedback)(spec); }
TaskFn select_kv_transform(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectKvTransform)(spec); }

uint32_t kv_feedback_tasks(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvFeedbackParams*>(params);
  const uint64_t streams =
      (p.stream[0].head_dim != 0 ? 1 : 0) + (p.stream[1].head_dim != 0 ? 1 : 0);
  const uint64_t rows = streams * p.heads * p.tokens;
  return task_count(rows / 2, rows);  // microseconds each
}

uint32_t kv_transform_tasks(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvTransformParams*>(params);
  constexpr uint64_t kProductsPerTask = 128 << 10;
  const uint64_t rows = p.heads * p.tokens;
  return task_count(rows / std::max<uint64_t>(1, kProductsPerTask / (p.head_dim * p.head_dim)),
                    rows);
}

}  // namespace gyre::cpu
#endif
