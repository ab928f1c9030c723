// kv_copy on the CPU: rows of head_dim contiguous values, cache[slot(t), h, :] = convert(source[t, h, :]).
// Rows are numbered stream, head, token (token fastest), so that a task writes a head-major cache front to
// back; a task is an equal share of the rows. Moves every source byte once and every cache byte once.
#include <algorithm>

#include "abi/kv_copy.h"
#include "cpu/kernels.h"
#include "gyre/dtype.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kv_copy.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

template <class T>
struct BitsOf {
  using Type = uint16_t;
};
template <>
struct BitsOf<float> {
  using Type = uint32_t;
};

// Same type: bits, so that no NaN changes.
template <class T>
HWY_INLINE void CopyRow(const T* HWY_RESTRICT source, T* HWY_RESTRICT target, size_t count) {
  using Bits = typename BitsOf<T>::Type;
  const hn::ScalableTag<Bits> d;
  const size_t lanes = hn::Lanes(d);
  const auto* from = reinterpret_cast<const Bits*>(source);
  auto* to = reinterpret_cast<Bits*>(target);
  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    const auto v0 = hn::LoadU(d, from + i);
    const auto v1 = hn::LoadU(d, from + i + lanes);
    const auto v2 = hn::LoadU(d, from + i + 2 * lanes);
    const auto v3 = hn::LoadU(d, from + i + 3 * lanes);
    hn::StoreU(v0, d, to + i);
    hn::StoreU(v1, d, to + i + lanes);
    hn::StoreU(v2, d, to + i + 2 * lanes);
    hn::StoreU(v3, d, to + i + 3 * lanes);
  }
  for (; i + lanes <= count; i += lanes) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
  for (; i < count; ++i) to[i] = from[i];
}

template <class Source, class Target>
HWY_INLINE void CopyRow(const Source* HWY_RESTRICT source, Target* HWY_RESTRICT target, size_t count) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    const auto v0 = LoadF32(d, source + i);
    const auto v1 = LoadF32(d, source + i + lanes);
    StoreF32(d, v0, target + i);
    StoreF32(d, v1, target + i + lanes);
  }
  for (; i + lanes <= count; i += lanes) StoreF32(d, LoadF32(d, source + i), target + i);
  for (; i < count; ++i) target[i] = static_cast<Target>(static_cast<float>(source[i]));
}

template <class Source, class Target>
void KvCopy(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::KvCopyParams*>(params);
  const Share rows = share_of(p.streams * p.heads * p.tokens, task, tasks);
  for (uint64_t row = rows.begin; row < rows.end;) {
    const uint64_t head = row / p.tokens % p.heads;
    const uint64_t stream = row / p.tokens / p.heads;
    const uint64_t first = row % p.tokens;
    const uint64_t last = std::min(p.tokens, first + (rows.end - row));
    const abi::KvCopyStream& s = p.stream[stream];
    const std::byte* source = pointer<const std::byte>(args[2 * stream]) + head * s.source_head_stride;
    std::byte* cache = pointer<std::byte>(args[2 * stream + 1]) + head * s.cache_head_stride;
    for (uint64_t token = first; token < last; ++token) {
      CopyRow(reinterpret_cast<const Source*>(source + token * s.source_token_stride),
              reinterpret_cast<Target*>(cache + abi::kv_copy_slot(p, token) * s.cache_slot_stride),
              s.row_elements);
    }
    row += last - first;
  }
}

template <class Source>
TaskFn SelectTarget(DType cache) {
  switch (cache) {
    case DType::f32:
      return KvCopy<Source, float>;
    case DType::f16:
      return KvCopy<Source, Half>;
    case DType::bf16:
      return KvCopy<Source, BFloat16>;
    default:
      return nullptr;
  }
}

TaskFn SelectKvCopy(uint64_t key) {
  const auto spec = spec_from_key<abi::KvCopySpec>(key);
  const auto cache = static_cast<DType>(spec.cache_dtype);
  switch (static_cast<DType>(spec.source_dtype)) {
    case DType::f32:
      return SelectTarget<float>(cache);
    case DType::f16:
      return SelectTarget<Half>(cache);
    case DType::bf16:
      return SelectTarget<BFloat16>(cache);
    default:
      return nullptr;
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectKvCopy);

TaskFn select_kv_copy(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectKvCopy)(spec); }

uint32_t kv_copy_tasks(const void* params, uint64_t key) {
  constexpr uint64_t kBytesPerTask = 32 << 10;  // about a microsecond: several times what a task costs
  constexpr uint64_t kMostTasks = 1 << 20;
  const auto& p = *static_cast<const abi::KvCopyParams*>(params);
  const auto spec = spec_from_key<abi::KvCopySpec>(key);
  uint64_t elements = 0;
  for (uint64_t i = 0; i < p.streams; ++i) elements += p.heads * p.tokens * p.stream[i].row_elements;
  const uint64_t bytes = elements * (size_bytes(static_cast<DType>(spec.source_dtype)) +
                                     size_bytes(static_cast<DType>(spec.cache_dtype)));
  const uint64_t most = std::min(p.streams * p.heads * p.tokens, kMostTasks);
  return static_cast<uint32_t>(std::clamp<uint64_t>(bytes / kBytesPerTask, 1, most));
}

}  // namespace gyre::cpu
#endif
