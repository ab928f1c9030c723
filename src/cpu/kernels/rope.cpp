// rope and norm_rope on the CPU. A task is a run of tokens. Every byte of x is read once (a second
// time from L1 with the norm), every byte of out written once.
#include "abi/rope.h"

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/rope.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/kernels/rope_token-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

template <class In, class Out, bool kAdjacent, bool kNorm>
void Rope(const void* params, const uint64_t* arguments, uint32_t task, uint32_t tasks) noexcept {
  // By value: the stores could otherwise alias them.
  const abi::RopeParams p = *static_cast<const abi::RopeParams*>(params);
  uint64_t args[kRope.info.arg_count];
  std::copy_n(arguments, kRope.info.arg_count, args);
  RopeTokens<In, Out, kAdjacent, kNorm>(p, args, share_of(p.tokens, task, tasks));
}

template <class In, class Out>
TaskFn SelectVariant(const abi::RopeSpec& spec) {
  if (spec.norm != 0) {
    return spec.adjacent != 0 ? Rope<In, Out, true, true> : Rope<In, Out, false, true>;
  }
  return spec.adjacent != 0 ? Rope<In, Out, true, false> : Rope<In, Out, false, false>;
}

TaskFn SelectRope(uint64_t key) {
  const auto spec = spec_from_key<abi::RopeSpec>(key);
  return select_float(spec.x_dtype, [&](auto x) {
    return select_float(spec.out_dtype,
                        [&](auto out) { return SelectVariant<decltype(x), decltype(out)>(spec); });
  });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectRope);

TaskFn select_rope(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectRope)(spec); }

uint32_t rope_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kElementsPerTask =
      16 << 10;  // a few microseconds; the tables of a task cost a tenth of one
  const auto& p = *static_cast<const abi::RopeParams*>(params);
  const uint64_t heads = p.stream[0].heads + (p.streams == 2 ? p.stream[1].heads : 0);
  const uint64_t wanted = p.tokens * heads * p.head_dim / kElementsPerTask;
  return task_count(wanted, p.tokens);
}

}  // namespace gyre::cpu
#endif
