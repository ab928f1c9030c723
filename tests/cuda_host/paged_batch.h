#pragma once
// A batch of sequences in pages, the CUDA kernels over it on the host, and what double precision
// gives. A sequence's numbers follow from its own seed: the batch, the pages and the grid may
// differ.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "attention/attention_reference.h"
#include "attention/attention_small.h"
#include "attention_host.h"
#include "cuda/attention/planner.h"
#include "ops/kv_pages.h"

namespace gyre::test {

struct PagedSequence {
  uint64_t tokens, length;
  uint32_t seed = 1;
  bool prompt = false;
};

struct PagedNumbers {
  KvFormat k = KvFormat::tq4, v = KvFormat::tq4;
  uint64_t heads = 4, kv_heads = 1, dim = 128, page_tokens = 16;
  uint64_t window = 0;
  float soft_cap = 0;
  bool causal = true, sink_logits = false, alibi_slopes = false, states = false,
       settled_keys = false;
  // Which keys of a layer with 16-bit sink tokens and tail.
  abi::KvSegment segment = abi::kSegmentBody;
  uint64_t first_keys = 0, tail = 0;
  std::vector<int32_t> tail_begin = {};
  uint64_t ring_entries = 0;
  abi::AttentionPhase phase = abi::AttentionPhase::all;
  uint64_t max_query_length = 0;  // 0: the most there are
  uint32_t blocks = 4;            // multiprocessors
  uint32_t seed = 1;              // of the pages' order
};

struct PagedAnswer {
  std::vector<float> out, lse;  // with `states`: rows of dim + 2 in out
  bool operator==(const PagedAnswer& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
        return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
      });
    };
    return same(out, other.out) && same(lse, other.lse);
  }
};

class PagedBatch {
 public:
  static constexpr float kScale = 0.1f, kUntouched = 77;

  PagedBatch(const PagedNumbers& numbers, const std::vector<PagedSequence>& sequences)
      : n_(numbers), sequences_(sequences) {
    for (const PagedSequence& s : sequences_) {
      begin_.push_back(static_cast<int32_t>(tokens_));
      kv_lengths_.push_back(static_cast<int32_t>(s.length));
      is_prefill_.push_back(s.prompt ? 1 : 0);
      tokens_ += s.tokens;
      if (numbers.max_query_length == 0)
        n_.max_query_length = std::max(n_.max_query_length, s.tokens);
      width_ = std::max(width_, (s.length + n_.page_tokens - 1) / n_.page_tokens);
      // A token's query follows from its position: chunks of a prompt have those of the whole.
      const auto rows = gaussian_rows(std::max(s.length, s.tokens) * n_.heads, n_.dim, s.seed * 3);
      q_.insert(q_.end(), rows.end() - static_cast<int64_t>(s.tokens * n_.heads * n_.dim),
                rows.end());
    }
    begin_.push_back(static_cast<int32_t>(tokens_));
    if (n_.ring_entries != 0) width_ = n_.ring_entries;
    max_kv_length_ = n_.ring_entries != 0 ? 1 << 20 : width_ * n_.page_tokens;
    for (uint64_t h = 0; h < n_.heads; ++h) {
      sinks_.push_back(0.3f * static_cast<float>(h) - 0.5f);
      slopes_.push_back(-0.01f * static_cast<float>(h + 1));
    }
    fill_pages();
  }

  // Device memory that a test may spoil.
  std::vector<int32_t>& table() { return table_; }
  std::vector<int32_t>& kv_lengths() { return kv_lengths_; }
  std::vector<int32_t>& begins() { return begin_; }
  uint64_t tokens() const { return tokens_; }
  uint64_t width() const { return width_; }
  uint64_t first_row(size_t s) const { return static_cast<uint64_t>(begin_[s]) * n_.heads; }

  // Between the schedule and the attention that reads it.
  std::function<void()> after_schedule{};

  // The plan that the GPU's planner makes.
  abi::AttentionPlan plan() const {
    const KvPageParts parts = page_parts(pages_);
    abi::AttentionProblem p{};
    p.tokens = tokens_, p.heads = n_.heads, p.kv_heads = n_.kv_heads;
    p.capacity = p.keys = max_kv_length_;
    p.addresses = pages_.bytes.address();
    p.k = parts.k, p.v = parts.v;
    p.sequences = sequences_.size(), p.page_stride = parts.page_stride;
    p.page_tokens = static_cast<uint32_t>(n_.page_tokens);
    p.max_query_length = static_cast<uint32_t>(n_.max_query_length);
    p.states = n_.states ? 1 : 0;
    p.phase = n_.phase;
    // attention_many_rows has the variants that were compiled.
    const auto has = [](uint64_t spec, const cuda::CudaLimits& gpu) {
      return cuda::fits_attention_many_rows(spec, gpu) && many_rows(spec) != nullptr;
    };
    return cuda::plan_attention(p, limits(), cuda::fits_attention_decode, has);
  }

  PagedAnswer run(int times = 1) {
    std::vector<float> scratch(plan().scratch_floats);
    return run_with(scratch, times);
  }

  // With zeros that calls of other shapes may have used before.
  PagedAnswer run_with(std::vector<float>& scratch, int times = 1) {
    const abi::AttentionPlan plan = this->plan();
    EXPECT_GE(scratch.size(), plan.scratch_floats);
    const uint64_t row = n_.states ? n_.dim + 2 : n_.dim;
    PagedAnswer answer{std::vector<float>(tokens_ * n_.heads * row, kUntouched),
                       std::vector<float>(tokens_ * n_.heads, kUntouched)};
    const abi::AttentionParams p = params(plan);
    const auto at = [](const auto& x) {
      return x.empty() ? 0 : reinterpret_cast<uint64_t>(x.data());
    };
    const auto part = [](const Tensor& x) { return x.defined() ? x.address() : 0; };
    const KvPageParts parts = page_parts(pages_);
    const uint64_t args[16] = {at(q_),
                               part(parts.k_codes),
                               part(parts.k_scales),
                               part(parts.v_codes),
                               part(parts.v_scales),
                               at(answer.out),
                               n_.states ? 0 : at(answer.lse),
                               n_.sink_logits && !n_.states ? at(sinks_) : 0,
                               n_.alibi_slopes ? at(slopes_) : 0,
                               0,
                               at(scratch),
                               at(n_.tail_begin),
                               at(table_),
                               at(kv_lengths_),
                               at(begin_),
                               at(is_prefill_)};
    for (int i = 0; i < times; ++i) launch(plan, p, args);
    // For the next replay.
    const auto* const counters = reinterpret_cast<const uint32_t*>(scratch.data());
    if (plan.scratch_floats != 0) {
      for (uint32_t b = 0; b < plan.schedule.blocks; ++b)
        EXPECT_EQ(counters[b], 0u) << "block " << b;
    }
    return answer;
  }

  // A sequence's rows in double precision, over what the pages hold of it.
  reference::AttentionResult expected(size_t s) const {
    const PagedSequence& of = sequences_[s];
    reference::AttentionShape shape{.tokens = of.tokens,
                                    .heads = n_.heads,
                                    .kv_heads = n_.kv_heads,
                                    .k_dim = n_.dim,
                                    .v_dim = n_.dim,
                                    .length = of.length,
                                    .capacity = of.length,
                                    .scale = double{kScale},
                                    .causal = n_.causal,
                                    .window = n_.window,
                                    .soft_cap = double{n_.soft_cap}};
    reference::AttentionData data;
    const auto from = q_.begin() + static_cast<int64_t>(first_row(s) * n_.dim);
    data.q.assign(from, from + static_cast<int64_t>(of.tokens * n_.heads * n_.dim));
    data.k = stored(n_.k, KvRole::k, of);
    data.v = stored(n_.v, KvRole::v, of);
    if (n_.sink_logits) data.sink_logits.assign(sinks_.begin(), sinks_.end());
    if (n_.alibi_slopes) data.alibi_slopes.assign(slopes_.begin(), slopes_.end());
    return reference::attention(shape, data);
  }

  std::vector<float> rows_of(const PagedAnswer& answer, size_t s) const {
    const uint64_t row = n_.states ? n_.dim + 2 : n_.dim;
    const auto from = answer.out.begin() + static_cast<int64_t>(first_row(s) * row);
    return {from, from + static_cast<int64_t>(sequences_[s].tokens * n_.heads * row)};
  }

  void expect_sequence(const PagedAnswer& answer, size_t s, double bound) const {
    const reference::AttentionResult wanted = expected(s);
    double error = 0, energy = 0;
    const std::vector<float> got = rows_of(answer, s);
    for (size_t i = 0; i < got.size(); ++i) {
      const double difference = double{got[i]} - wanted.out[i];
      error += difference * difference, energy += wanted.out[i] * wanted.out[i];
    }
    EXPECT_LE(error, bound * energy) << "sequence " << s << " length " << sequences_[s].length;
    for (size_t i = 0; i < wanted.lse.size(); ++i) {
      const double lse = double{answer.lse[first_row(s) + i]}, right = wanted.lse[i];
      EXPECT_TRUE(lse == right || std::abs(lse - right) <= 5e-4 * (1 + std::abs(right)))
          << "sequence " << s << ": " << lse << " instead of " << right;
    }
  }

 private:
  cuda::CudaLimits limits() const { return {n_.blocks, 227 << 10, 228 << 10, 90}; }

  std::vector<float> keys(KvRole role, const PagedSequence& s) const {
    return gaussian_rows(s.length * n_.kv_heads, n_.dim, s.seed * 3 + (role == KvRole::k ? 1 : 2));
  }
  std::vector<double> stored(KvFormat format, KvRole role, const PagedSequence& s) const {
    if (s.length == 0) return {};
    const std::vector<float> rows = keys(role, s);
    std::vector<double> all;
    if (describe(format).compressed) {
      const auto values = decoded(cpu_, cache_of(cpu_, format, role, rows, {n_.kv_heads, n_.dim}));
      return {values.begin(), values.end()};
    }
    for (const float x : rows) {
      if (format == KvFormat::f16) all.push_back(double{static_cast<float>(Half(x))});
      if (format == KvFormat::bf16) all.push_back(double{static_cast<float>(BFloat16(x))});
      if (format == KvFormat::f32) all.push_back(double{x});
    }
    return all;
  }

  // Pages in any order; what belongs to no key is all ones, and entries of no key are no pages.
  void fill_pages() {
    const uint64_t count = width_ * sequences_.size() + 3;
    std::vector<int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(n_.seed));
    pages_ =
        KvPages::allocate(cpu_, {n_.k, n_.v, n_.kv_heads, n_.dim, n_.dim, n_.page_tokens}, count);
    pages_.bytes.write_from(
        std::span<const uint8_t>(std::vector<uint8_t>(pages_.bytes.bytes(), 0xFF)));
    table_.assign(width_ * sequences_.size(), -7);
    size_t next = 0;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const uint64_t length = sequences_[s].length, page = n_.page_tokens;
      const uint64_t oldest = n_.ring_entries == 0 || length <= n_.ring_entries * page
                                  ? 0
                                  : (length + page - 1) / page * page - n_.ring_entries * page;
      std::vector<int64_t> slots(length, -1);
      for (uint64_t j = oldest; j < length; ++j) {
        const uint64_t nth = j / page, entry = n_.ring_entries == 0 ? nth : nth % n_.ring_entries;
        int32_t& number = table_[s * width_ + entry];
        if (number < 0) number = order[next++];
        slots[j] = static_cast<int64_t>(static_cast<uint64_t>(number) * page + j % page);
      }
      write(sequences_[s], slots);
    }
  }
  void write(const PagedSequence& s, const std::vector<int64_t>& slots) const {
    if (slots.empty()) return;
    const Dims shape = {s.length, n_.kv_heads, n_.dim};
    const Tensor list = cpu_.tensor(DType::i64, {s.length});
    list.write_from(std::span<const int64_t>(slots));
    Encoder encoder(cpu_);
    kv_write(encoder, {.k = tensor_of(cpu_, keys(KvRole::k, s), shape),
                       .v = tensor_of(cpu_, keys(KvRole::v, s), shape),
                       .pages = pages_,
                       .slots = list});
    encoder.submit().wait();
  }

  abi::AttentionParams params(const abi::AttentionPlan& plan) const {
    const KvPageParts parts = page_parts(pages_);
    abi::AttentionParams p{};
    p.tokens = tokens_, p.heads = n_.heads, p.kv_heads = n_.kv_heads;
    p.group = static_cast<uint32_t>(n_.heads / n_.kv_heads);
    p.window = n_.window;
    p.splits = plan.splits;
    p.q_head_stride = n_.dim * 4, p.q_token_stride = n_.heads * n_.dim * 4;
    p.out_head_stride = n_.dim * 4, p.out_token_stride = n_.heads * n_.dim * 4;
    p.lse_head_stride = 4, p.lse_token_stride = n_.heads * 4;
    p.k = parts.k, p.v = parts.v;
    p.table = {.sequences = sequences_.size(),
               .stride = width_,
               .pages = pages_.bytes.shape(0),
               .page_stride = parts.page_stride,
               .max_kv_length = max_kv_length_,
               .max_query_length = static_cast<uint32_t>(n_.max_query_length),
               .page_tokens = static_cast<uint32_t>(n_.page_tokens),
               .first_entry = 0,
               .ring_entries = static_cast<uint32_t>(n_.ring_entries),
               .page_inverse = abi::kv_page_inverse(static_cast<uint32_t>(n_.page_tokens))};
    p.segment = n_.segment;
    p.places.sink_tokens = n_.first_keys, p.places.tail = n_.tail;
    p.scale = kScale, p.soft_cap = n_.soft_cap;
    p.phase = n_.phase;
    p.causal = n_.causal ? 1 : 0;
    p.settled_keys = n_.settled_keys ? 1 : 0;
    p.partial = n_.states
                    ? abi::kAttentionStates
                    : (plan.scratch_floats != 0 ? abi::kAttentionMerged : abi::kAttentionWhole);
    return p;
  }

  static HostKernel many_rows(uint64_t spec) {
    const auto s = spec_from_key<abi::AttentionRowsSpec>(spec);
    return host_attention_many_rows(s.k_format, s.v_format, s.k_dim, s.v_dim, s.gpu);
  }
  // Words behind the schedule, which nobody may write.
  static constexpr uint32_t kBehind = 0x5A5A5A5A;

  // Writes the schedule as the op would, and tells the call.
  std::vector<uint32_t> schedule(const abi::AttentionPlan& plan, abi::AttentionParams& p,
                                 uint64_t* args) const {
    using enum abi::AttentionArg;
    abi::AttentionScheduleParams s{};
    s.call = p;
    s.group = plan.schedule.group, s.blocks = plan.schedule.blocks, s.rows = plan.schedule.rows;
    s.by_token = plan.schedule.by_token, s.key = 1234567;
    s.runs = abi::schedule_most_runs(p.phase, sequences_.size(), n_.kv_heads, n_.max_query_length,
                                     p.group, s.rows, s.by_token != 0, s.blocks);
    const uint64_t words = abi::schedule_words(s.blocks, s.runs);
    std::vector<uint32_t> memory(words + 16, kBehind);
    const uint64_t of[5] = {reinterpret_cast<uint64_t>(memory.data()), args[arg_kv_lengths],
                            args[arg_cu_seqlens_q], args[arg_is_prefill], args[arg_tail_begin]};
    const cuda::Launch shape = cuda::launch_attention_schedule(&s, 0, limits());
    host_attention_schedule(&s, of, {shape.grid, shape.block, shape.shared_bytes});
    for (uint64_t i = words; i < memory.size(); ++i) EXPECT_EQ(memory[i], kBehind);
    p.schedule_key = s.key;
    args[arg_schedule] = of[0];
    return memory;
  }

  void launch(const abi::AttentionPlan& plan, const abi::AttentionParams& called,
              const uint64_t* given) const {
    abi::AttentionParams p = called;
    uint64_t args[16];
    std::copy_n(given, 16, args);
    std::vector<uint32_t> memory;
    if (plan.schedule.blocks != 0) memory = schedule(plan, p, args);
    if (after_schedule) after_schedule();
    if (plan.kernel == abi::AttentionKernel::attention) {
      const cuda::Launch shape = cuda::launch_attention(&p, plan.spec, limits());
      const HostKernel kernel = host_attention(p.k.format, p.v.format);
      ASSERT_NE(kernel, nullptr) << name(n_.k) << " " << name(n_.v);
      kernel(&p, args, {shape.grid, shape.block, shape.shared_bytes});
      return;
    }
    if (plan.kernel == abi::AttentionKernel::attention_many_rows) {
      const cuda::Launch shape = cuda::launch_attention_many_rows(&p, plan.spec, limits());
      many_rows(plan.spec)(&p, args, {shape.grid, shape.block, shape.shared_bytes});
      return;
    }
    const auto spec = spec_from_key<abi::AttentionDecodeSpec>(plan.spec);
    const cuda::Launch shape = cuda::launch_attention_decode(&p, plan.spec, limits());
    const HostKernel kernel = host_attention_decode_paged(
        spec.k_format, spec.v_format, spec.head_dim, spec.rows, spec.paged == 2);
    ASSERT_NE(kernel, nullptr) << name(n_.k) << " " << name(n_.v) << " " << spec.head_dim
                               << " rows " << uint32_t{spec.rows};
    kernel(&p, args, {shape.grid, shape.block, shape.shared_bytes});
  }

  PagedNumbers n_;
  std::vector<PagedSequence> sequences_;
  Device cpu_ = cpu_device(1);
  KvPages pages_;
  uint64_t tokens_ = 0, width_ = 1, max_kv_length_ = 0;
  std::vector<int32_t> begin_, kv_lengths_, table_;
  std::vector<uint8_t> is_prefill_;
  std::vector<float> q_, sinks_, slopes_;
};

// The states of a layer's parts, merged, are the rows over all of its keys.
inline void expect_merged(const PagedNumbers& n, const std::vector<PagedAnswer>& parts,
                          const PagedAnswer& all) {
  const uint64_t row = n.dim + 2;
  for (uint64_t r = 0; r < all.lse.size(); ++r) {
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    for (const PagedAnswer& part : parts) max = std::max(max, double{part.out[r * row + n.dim]});
    std::vector<double> values(n.dim);
    for (const PagedAnswer& part : parts) {
      const double weight = std::exp(double{part.out[r * row + n.dim]} - max);
      sum += weight * double{part.out[r * row + n.dim + 1]};
      for (uint64_t c = 0; c < n.dim; ++c) values[c] += weight * double{part.out[r * row + c]};
    }
    EXPECT_NEAR(max + std::log(sum), double{all.lse[r]}, 1e-4) << "row " << r;
    for (uint64_t c = 0; c < n.dim; ++c)
      ASSERT_NEAR(values[c] / sum, double{all.out[r * n.dim + c]}, 2e-3) << "row " << r;
  }
}

}  // namespace gyre::test
