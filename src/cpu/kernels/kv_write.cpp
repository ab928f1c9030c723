// kv_write and kv_page_copy on the CPU. kv_write's work items are the tokens whose slots share a
// tile, for every head of K and V; the first of them in the list stands for the tile.
#include "abi/kv_write.h"

#include <algorithm>
#include <cstring>

#include "abi/kv_codec.h"
#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/kv_write.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/kernels/kv_write-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

template <class Source, class Slot, uint32_t kCalibrated>
void KvWrite(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::KvWriteParams*>(params);
  const SlotList<Slot> list{pointer<const Slot>(args[6]), p.tokens, p.pages * p.page_tokens};
  const KvHead heads[2] = {MakeHead(p.stream[0].cache), MakeHead(p.stream[1].cache)};
  KvScratch scratch;
  scratch.facts.Clear(std::max(heads[0].scales.count, heads[1].scales.count));
  const uint64_t rows = 2 * p.heads;
  const Share share = share_of(p.tokens * rows, task, tasks);
  for (uint64_t at = share.begin; at < share.end;) {
    const uint64_t token = at / rows, end = std::min(share.end, (token + 1) * rows);
    if (list.leads(token)) {
      const TileRun run = FindRun(list, token);
      for (; at < end; ++at) {
        KvTileJob job = FindTile(p, args, run, at - token * rows);
        job.head = &heads[job.stream];
        SetSources(p, args, run, (at - token * rows) % p.heads, job);
        WriteTile<Source, kCalibrated>(p.stream[job.stream].cache, job, scratch);
      }
    }
    at = end;
  }
}

TaskFn SelectKvWrite(uint64_t key) {
  const auto spec = spec_from_key<abi::KvWriteSpec>(key);
  return select_source(
      spec.source_dtype, spec.calibrated, [&](auto source, auto calibrated) -> TaskFn {
        constexpr uint32_t kCalibrated = decltype(calibrated)::value;
        if (spec.slot_bytes == 8) return KvWrite<decltype(source), int64_t, kCalibrated>;
        return spec.slot_bytes == 4 ? KvWrite<decltype(source), int32_t, kCalibrated> : nullptr;
      });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectKvWrite);

TaskFn select_kv_write(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectKvWrite)(spec); }

uint32_t kv_write_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kCoordinatesPerTask = 8 << 10;  // some microseconds
  const auto& p = *static_cast<const abi::KvWriteParams*>(params);
  const uint64_t head_dims = uint64_t{p.stream[0].cache.head_dim} + p.stream[1].cache.head_dim;
  const uint64_t coordinates = p.heads * p.tokens * head_dims;
  return task_count(coordinates / kCoordinatesPerTask, 2 * p.heads * p.tokens);
}

namespace {

// A task is an equal share of the bytes of all pairs.
void copy_pages(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::KvPageCopyParams*>(params);
  auto* const pages = pointer<std::byte>(args[0]);
  const auto* const from = pointer<const int32_t>(args[1]);
  const auto* const to = pointer<const int32_t>(args[2]);
  const auto is_page = [&](int32_t page) {
    return page >= 0 && static_cast<uint64_t>(page) < p.pages;
  };
  const Share share = share_of(p.count * p.page_bytes, task, tasks);
  for (uint64_t at = share.begin; at < share.end;) {
    const uint64_t pair = at / p.page_bytes, first = at % p.page_bytes;
    const uint64_t bytes = std::min(share.end - at, p.page_bytes - first);
    if (is_page(from[pair]) && is_page(to[pair]) && from[pair] != to[pair]) {
      std::memcpy(pages + static_cast<uint64_t>(to[pair]) * p.page_stride + first,
                  pages + static_cast<uint64_t>(from[pair]) * p.page_stride + first, bytes);
    }
    at += bytes;
  }
}

}  // namespace

TaskFn select_kv_page_copy(uint64_t /*spec*/) { return copy_pages; }

uint32_t kv_page_copy_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kBytesPerTask = 1 << 20;
  const auto& p = *static_cast<const abi::KvPageCopyParams*>(params);
  const uint64_t bytes = p.count * p.page_bytes;
  return task_count(bytes / kBytesPerTask, bytes);
}

}  // namespace gyre::cpu
#endif
