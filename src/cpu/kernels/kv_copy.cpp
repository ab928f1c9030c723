// kv_copy on the CPU: rows of head_dim contiguous values, cache[slot(t), h, :] = convert(source[t,
// h, :]). Rows are numbered stream first, then in the order in which the source lies in memory; a
// task is an equal share of them. Moves every source byte once and every cache byte once.
#include "abi/kv_copy.h"

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/kernels/select.h"
#include "gyre/dtype.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/kv_copy.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/kernels/copy-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

template <class Source, class Target>
void KvCopy(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  // Four places at once: one stream of loads does not fill the memory bus.
  constexpr uint64_t kPlaces = 4;
  // By value: the stores below could otherwise alias every field.
  const abi::KvCopyParams p = *static_cast<const abi::KvCopyParams*>(params);
  const uint64_t base[4] = {args[0], args[1], args[2], args[3]};
  const uint64_t stream_rows = p.tokens * p.heads;
  const Share share = share_of(p.streams * stream_rows, task, tasks);
  const uint64_t each = (share.end - share.begin + kPlaces - 1) / kPlaces;
  for (uint64_t i = 0; i < each; ++i) {
    for (uint64_t row = share.begin + i; row < share.end; row += each) {
      const uint64_t stream = row < stream_rows ? 0 : 1;
      const abi::KvCopyStream& s = p.stream[stream];
      const uint64_t within = row - stream * stream_rows;
      // The source is read in the order of its memory, which the prefetcher follows; a head-major
      // cache takes one sequential run per head from the store buffers. The opposite order is a
      // third slower.
      const bool token_inner = s.source_token_stride < s.source_head_stride;
      const uint64_t inner_count = token_inner ? p.tokens : p.heads;
      const uint64_t outer = within / inner_count;
      const uint64_t inner = within % inner_count;
      const uint64_t token = token_inner ? inner : outer;
      const uint64_t head = token_inner ? outer : inner;
      CopyRow(
          pointer<const Source>(base[2 * stream] + token * s.source_token_stride +
                                head * s.source_head_stride),
          pointer<Target>(base[2 * stream + 1] + abi::kv_copy_slot(p, token) * s.cache_slot_stride +
                          head * s.cache_head_stride),
          s.row_elements);
    }
  }
}

TaskFn SelectKvCopy(uint64_t key) {
  const auto spec = spec_from_key<abi::KvCopySpec>(key);
  return select_float(spec.source_dtype, [&](auto source) {
    return select_float(spec.cache_dtype, [](auto cache) -> TaskFn {
      return KvCopy<decltype(source), decltype(cache)>;
    });
  });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectKvCopy);

TaskFn select_kv_copy(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectKvCopy)(spec); }

uint32_t kv_copy_tasks(const void* params, uint64_t spec) {
  // Long tasks let the loads run ahead; small copies are cut finer, down to about a microsecond, so
  // that all threads get some.
  constexpr uint64_t kLongTask = 512 << 10, kShortTask = 32 << 10, kFewTasks = 8;
  const auto& p = *static_cast<const abi::KvCopyParams*>(params);
  const auto types = spec_from_key<abi::KvCopySpec>(spec);
  uint64_t elements = 0;
  for (uint64_t i = 0; i < p.streams; ++i)
    elements += p.heads * p.tokens * p.stream[i].row_elements;
  const uint64_t bytes = elements * (size_bytes(static_cast<DType>(types.source_dtype)) +
                                     size_bytes(static_cast<DType>(types.cache_dtype)));
  const uint64_t wanted = std::max(bytes / kLongTask, std::min(bytes / kShortTask, kFewTasks));
  return task_count(wanted, p.streams * p.heads * p.tokens);
}

}  // namespace gyre::cpu
#endif
