#include "attention.h"

#include <algorithm>
#include <thread>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention.cpp"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "item-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::ggml::HWY_NAMESPACE {

// A row's output from its state, the sink included.
void StoreRow(const Problem& p, const SoftmaxState& state, const float* values, uint64_t head,
              uint64_t token, uint64_t stream) {
  SoftmaxState whole = state;
  float factor = 1.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head] * kLog2E;
    factor = whole.raise(sink);
    whole.sum += cpu::HWY_NAMESPACE::Exp2One(sink - whole.max);
  }
  factor = whole.sum == 0 ? 0.0f : factor / whole.sum;
  auto* const out = reinterpret_cast<float*>(p.out + token * p.out_strides[0] +
                                             head * p.out_strides[1] + stream * p.out_strides[2]);
  for (uint64_t c = 0; c < p.v_dim; ++c) out[c] = factor == 0 ? 0.0f : values[c] * factor;
}

void RunItem(Call& call, uint64_t index, float* scratch) {
  const Problem& p = call.problem;
  const Item item = call.plan.item(p, index);
  ItemRun run(p, item, scratch);
  run.run();
  run.for_rows([&](uint64_t head, uint64_t token, const SoftmaxState& state, const float* values) {
    if (call.plan.chunks == 1) return StoreRow(p, state, values, head, token, item.stream);
    const uint64_t row = (item.stream * p.heads + head) * p.tokens + token;
    float* const partial = call.partials + (row * call.plan.chunks + item.chunk) * (p.v_dim + 2);
    partial[0] = state.max;
    partial[1] = state.sum;
    std::copy_n(values, p.v_dim, partial + 2);
  });
}

// Merges the chunks of one row.
void MergeRow(Call& call, uint64_t row, float* values) {
  const Problem& p = call.problem;
  SoftmaxState whole;
  std::fill_n(values, p.v_dim, 0.0f);
  for (uint64_t chunk = 0; chunk < call.plan.chunks; ++chunk) {
    const float* const partial = call.partials + (row * call.plan.chunks + chunk) * (p.v_dim + 2);
    const auto weights = whole.merge({partial[0], partial[1]});
    if (weights.other == 0) continue;
    const hn::CappedTag<float, 16> d;
    const auto own = hn::Set(d, weights.own), other = hn::Set(d, weights.other);
    uint64_t c = 0;
    for (; c + hn::Lanes(d) <= p.v_dim; c += hn::Lanes(d)) {
      const auto sum = hn::Mul(hn::LoadU(d, values + c), own);
      hn::StoreU(hn::MulAdd(hn::LoadU(d, partial + 2 + c), other, sum), d, values + c);
    }
    for (; c < p.v_dim; ++c) values[c] = values[c] * weights.own + partial[2 + c] * weights.other;
  }
  const uint64_t token = row % p.tokens, head = row / p.tokens % p.heads;
  StoreRow(p, whole, values, head, token, row / (p.tokens * p.heads));
}

const char* Name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace gyre::ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::ggml {
namespace {

HWY_EXPORT(RunItem);
HWY_EXPORT(MergeRow);
HWY_EXPORT(Name);

// Until all threads have come here. Those of ggml run together; where there are more than cores,
// the one that is waited for needs the core.
void wait_for_all(Call& call, uint32_t threads) {
  call.arrived.fetch_add(1, std::memory_order_acq_rel);
  for (uint32_t spins = 0; call.arrived.load(std::memory_order_acquire) < threads; ++spins) {
    if (spins < 4096) {
      hwy::Pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace

void run(Call& call, uint32_t threads, float* scratch) {
  const Plan& plan = call.plan;
  const auto take = [](std::atomic<uint64_t>& counter, uint64_t count) {
    return counter.fetch_add(count, std::memory_order_relaxed);
  };
  if (scratch == nullptr) return void(call.arrived.fetch_add(1, std::memory_order_acq_rel));
  for (uint64_t i = take(call.next_item, 1); i < plan.items; i = take(call.next_item, 1))
    HWY_DYNAMIC_DISPATCH(RunItem)(call, i, scratch);
  if (plan.chunks == 1) return;
  wait_for_all(call, threads);
  constexpr uint64_t kTogether = 4;
  const uint64_t rows = call.problem.streams * call.problem.heads * call.problem.tokens;
  for (uint64_t i = take(call.next_row, kTogether); i < rows; i = take(call.next_row, kTogether)) {
    for (uint64_t row = i; row < std::min(i + kTogether, rows); ++row)
      HWY_DYNAMIC_DISPATCH(MergeRow)(call, row, scratch);
  }
}

const char* instruction_set() { return HWY_DYNAMIC_DISPATCH(Name)(); }

}  // namespace gyre::ggml
#endif
