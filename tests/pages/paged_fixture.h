#pragma once
// Sequences with keys, values and queries by position, put into pages by kv_write and attended to
// in any order, company and cut.

#include <numeric>

#include "gyre_test.h"
#include "pages/page_memory.h"
#include "run_now.h"

namespace gyre::test {

// A few queries of one sequence, as one call takes them: the newest of its first `length` tokens.
struct Part {
  uint64_t sequence = 0, length = 0, tokens = 1;
  bool prompt = false;
};

// Bits of out and lse, row by row, by sequence and position.
using RowBits = std::map<std::pair<uint64_t, uint64_t>, Bytes>;

class PagedWorld {
 public:
  // `gain`: of the values at a position.
  PagedWorld(const Device& device, const KvPageShape& shape, uint64_t heads,
             std::vector<uint64_t> kv_lengths, uint32_t page_seed = 1,
             std::function<float(uint64_t)> gain = {})
      : device_(device),
        shape_(shape),
        heads_(heads),
        kv_lengths_(std::move(kv_lengths)),
        gain_(std::move(gain)) {
    for (const uint64_t length : kv_lengths_) pages_ += pages_for(length);
    memory_ = KvPages::allocate(device_, shape_, pages_ + 2);
    std::vector<int32_t> free(pages_ + 2);
    std::iota(free.begin(), free.end(), 0);
    std::mt19937 random(page_seed);
    std::shuffle(free.begin(), free.end(), random);
    for (uint64_t s = 0; s < kv_lengths_.size(); ++s) {
      std::vector<int32_t>& row = tables_.emplace_back();
      for (uint64_t i = 0; i < pages_for(kv_lengths_[s]); ++i) {
        row.push_back(free.back());
        free.pop_back();
      }
      write(s, 0, kv_lengths_[s]);
    }
  }

  const Device& device() const { return device_; }
  const KvPages& pages() const { return memory_; }
  const std::vector<int32_t>& table(uint64_t sequence) const { return tables_[sequence]; }
  PagedAttentionOptions options{};

  // Rows of a kind at positions [first, first + count): the same in every world.
  std::vector<float> values(char kind, uint64_t sequence, uint64_t first, uint64_t count) const {
    const uint64_t dim = kind == 'v' ? v_dim_of(shape_) : shape_.head_dim;
    const uint64_t row_heads = kind == 'q' ? heads_ : shape_.kv_heads;
    std::vector<float> values(count * row_heads * dim);
    std::normal_distribution<float> normal;
    for (uint64_t t = 0; t < count; ++t) {
      std::seed_seq seed{uint64_t(kind), sequence, first + t};
      std::mt19937 random(seed);
      const float factor = kind == 'v' && gain_ ? gain_(first + t) : 1;
      for (uint64_t i = 0; i < row_heads * dim; ++i)
        values[t * row_heads * dim + i] = factor * normal(random);
    }
    return values;
  }
  Tensor rows(char kind, uint64_t sequence, uint64_t first, uint64_t count) const {
    const uint64_t dim = kind == 'v' ? v_dim_of(shape_) : shape_.head_dim;
    const uint64_t row_heads = kind == 'q' ? heads_ : shape_.kv_heads;
    return filled(device_.tensor(DType::f32, {count, row_heads, dim}),
                  values(kind, sequence, first, count));
  }

  // Tokens [first, first + count) of a sequence, as if `salt` were the sequence.
  void write(uint64_t sequence, uint64_t first, uint64_t count, uint64_t salt = 0) const {
    if (count == 0) return;
    std::vector<int64_t> slots(count);
    for (uint64_t i = 0; i < count; ++i) slots[i] = slot_of(sequence, first + i);
    kv_write(RunNow(device_), {.k = rows('k', sequence + salt, first, count),
                               .v = rows('v', sequence + salt, first, count),
                               .pages = memory_,
                               .slots = filled(device_.tensor(DType::i64, {count}), slots)});
  }

  // The call over these parts, and its bounds.
  PagedAttentionInputs inputs(const std::vector<Part>& parts, PagedAttentionOptions& bounds) const {
    uint64_t tokens = 0, width = 1;
    bounds = options;
    bounds.max_query_length = 1;
    for (const Part& part : parts) {
      tokens += part.tokens;
      width = std::max(width, pages_for(part.length));
      bounds.max_query_length = std::max(bounds.max_query_length, part.tokens);
    }
    bounds.scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
    const uint64_t count = parts.size();
    PagedAttentionInputs in{.q = device_.tensor(DType::f32, {tokens, heads_, shape_.head_dim}),
                            .pages = memory_,
                            .page_table = device_.tensor(DType::i32, {count, width}),
                            .kv_lengths = device_.tensor(DType::i32, {count}),
                            .cu_seqlens_q = device_.tensor(DType::i32, {count + 1}),
                            .is_prefill = device_.tensor(DType::u8, {count}),
                            .out = device_.tensor(DType::f32, {tokens, heads_, v_dim_of(shape_)}),
                            .lse = device_.tensor(DType::f32, {tokens, heads_})};
    std::vector<float> q;
    std::vector<int32_t> table(count * width), kv_lengths, cu_seqlens_q = {0};
    std::vector<uint8_t> is_prefill;
    for (uint64_t i = 0; i < count; ++i) {
      const Part& part = parts[i];
      const auto of_part = values('q', part.sequence, part.length - part.tokens, part.tokens);
      q.insert(q.end(), of_part.begin(), of_part.end());
      std::copy_n(tables_[part.sequence].begin(), pages_for(part.length),
                  table.begin() + static_cast<ptrdiff_t>(i * width));
      kv_lengths.push_back(static_cast<int32_t>(part.length));
      is_prefill.push_back(part.prompt ? 1 : 0);
      cu_seqlens_q.push_back(cu_seqlens_q.back() + static_cast<int32_t>(part.tokens));
    }
    filled(in.q, q), filled(in.page_table, table), filled(in.kv_lengths, kv_lengths);
    filled(in.cu_seqlens_q, cu_seqlens_q), filled(in.is_prefill, is_prefill);
    return in;
  }

  RowBits attend(const std::vector<Part>& parts) const {
    PagedAttentionOptions bounds;
    const PagedAttentionInputs in = inputs(parts, bounds);
    attention(RunNow(device_), in, bounds);
    return bits_of(parts, in.out, in.lse);
  }

  // The next tokens of the first sequence over a linear cache, which has `length` of them.
  RowBits step(KvCache& cache, uint64_t length, uint64_t tokens) const {
    const Tensor out = device_.tensor(DType::f32, {tokens, heads_, v_dim_of(shape_)});
    const Tensor lse = device_.tensor(DType::f32, {tokens, heads_});
    Encoder encoder(device_);
    cache.begin_step(encoder, tokens);
    cache.append(encoder, 0, rows('k', 0, length, tokens), rows('v', 0, length, tokens));
    cache.attend(encoder, 0, {.q = rows('q', 0, length, tokens), .out = out, .lse = lse},
                 {.scale = 1 / 8.0f});
    encoder.submit().wait();
    return bits_of({{0, length + tokens, tokens}}, out, lse);
  }

  RowBits bits_of(const std::vector<Part>& parts, const Tensor& out, const Tensor& lse) const {
    RowBits bits;
    uint64_t row = 0;
    for (const Part& part : parts) {
      for (uint64_t t = 0; t < part.tokens; ++t, ++row) {
        Bytes of_row = read_bytes(out.slice(0, row, 1));
        for (const std::byte b : read_bytes(lse.slice(0, row, 1))) of_row.push_back(b);
        bits[{part.sequence, part.length - part.tokens + t}] = std::move(of_row);
      }
    }
    return bits;
  }

  int64_t slot_of(uint64_t sequence, uint64_t key) const {
    const auto page = static_cast<uint64_t>(tables_[sequence][key / shape_.page_tokens]);
    return static_cast<int64_t>(page * shape_.page_tokens + key % shape_.page_tokens);
  }

 private:
  uint64_t pages_for(uint64_t length) const {
    return (length + shape_.page_tokens - 1) / shape_.page_tokens;
  }
  template <class T>
  static Tensor filled(Tensor tensor, const std::vector<T>& values) {
    tensor.write_from<T>(values);
    return tensor;
  }

  Device device_;
  KvPageShape shape_;
  uint64_t heads_;
  std::vector<uint64_t> kv_lengths_;
  std::function<float(uint64_t)> gain_;
  uint64_t pages_ = 0;
  KvPages memory_;
  std::vector<std::vector<int32_t>> tables_;
};

constexpr KvPageShape shape_of(KvFormat k, KvFormat v, uint64_t page_tokens) {
  return {k, v, 2, 64, 0, page_tokens};
}

struct Formats {
  KvFormat k, v;
};
constexpr Formats kFormats[] = {{KvFormat::tq8, KvFormat::tq4},
                                {KvFormat::f16, KvFormat::f16},
                                {KvFormat::bf16, KvFormat::tq3},
                                {KvFormat::f32, KvFormat::mlx_native4}};

inline std::string text(const Formats& f) {
  return std::string(name(f.k)) + "/" + std::string(name(f.v));
}

inline Device device_with(uint32_t threads) { return Device::open("cpu", {.threads = threads}); }

// Rows that are in both must have the same bits; returns how many there were.
inline uint64_t compare(const RowBits& all, const RowBits& some) {
  uint64_t same = 0;
  for (const auto& [where, bits] : some) {
    const auto found = all.find(where);
    if (found == all.end()) continue;
    EXPECT_EQ(found->second, bits) << "sequence " << where.first << " position " << where.second;
    ++same;
  }
  return same;
}

// Sequence 0 claims more queries than there may be: all its rows become NaN. The one behind it has
// the bits that it has alone.
inline void expect_too_many_are_nan(const Device& device, const KvPageShape& shape, uint64_t heads,
                                    uint64_t max_query_length, uint64_t tokens) {
  SCOPED_TRACE(std::to_string(tokens) + " queries of at most " + std::to_string(max_query_length));
  const PagedWorld world(device, shape, heads, {300, 90});
  const std::vector<Part> parts = {{0, 300, tokens}, {1, 90, 1}};
  PagedAttentionOptions bounds;
  PagedAttentionInputs in = world.inputs(parts, bounds);
  in.is_prefill = {};
  bounds.max_query_length = max_query_length;
  for (const Tensor& x : {in.out, in.lse})
    x.write_from<float>(std::vector<float>(x.elements(), 7.0f));
  Encoder encoder(device);
  attention(encoder, in, bounds);
  encoder.submit().wait();
  const RowBits bits = world.bits_of(parts, in.out, in.lse);
  for (const auto& [row, bytes] : bits) {
    if (row.first != 0) continue;
    std::vector<float> of_row(bytes.size() / sizeof(float));
    std::memcpy(of_row.data(), bytes.data(), bytes.size());
    for (const float x : of_row) ASSERT_TRUE(std::isnan(x)) << x << " at " << row.second;
  }
  EXPECT_EQ(compare(world.attend({parts[1]}), bits), 1u);
}

}  // namespace gyre::test
