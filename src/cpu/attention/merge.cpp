// attention_merge on the CPU: the partial states of a row's splits become its output.

#include "abi/attention.h"
#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/merge.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/attention/epilogue-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// A task is an equal share of the rows. Splits are merged in their order, whoever runs the task.
template <class Out>
void Merge(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::AttentionMergeParams*>(params);
  const uint64_t rows = p.tokens * p.heads, stride = StateFloats(p.head_dim);
  alignas(64) float values[abi::kKvMaxHeadDim];
  const Share share = share_of(rows, task, tasks);
  for (uint64_t row = share.begin; row < share.end; ++row) {
    const float* const first = pointer<const float>(args[0]) + row * stride;
    const SoftmaxState state = MergeStates(first, p.splits, rows * stride, p.head_dim, values);
    const uint64_t token = row / p.heads, head = row % p.heads;
    StoreRow(state, values, p.head_dim,
             {pointer<const float>(args[3]), head,
              args[1] + token * p.out_token_stride + head * p.out_head_stride,
              args[2] == 0 ? 0 : args[2] + token * p.lse_token_stride + head * p.lse_head_stride,
              DTypeOf<Out>::value});
  }
}

TaskFn SelectMerge(uint64_t key) {
  return select_float(spec_from_key<abi::AttentionMergeSpec>(key).out_dtype,
                      [](auto out) -> TaskFn { return Merge<decltype(out)>; });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectMerge);

TaskFn select_attention_merge(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectMerge)(spec); }

uint32_t attention_merge_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kFloatsPerTask = 32 << 10;
  const auto& p = *static_cast<const abi::AttentionMergeParams*>(params);
  const uint64_t rows = p.tokens * p.heads;
  return task_count(rows * p.splits * p.head_dim / kFloatsPerTask, rows);
}

}  // namespace gyre::cpu
#endif
