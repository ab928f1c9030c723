#include "pages/paged_attention_case.h"

#include <numeric>

#include "attention/attention_expected.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

using reference::AttentionData;
using reference::AttentionShape;
using reference::KvSide;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

uint64_t pages_for(const PagedAttentionCase& c, uint64_t length) {
  return (length + c.shape.page_tokens - 1) / c.shape.page_tokens;
}

// Bounds that the host is told, and sizes.
struct Sizes {
  uint64_t rows, width, pages, max_query_length = 1, max_kv_length = 1;
};

Sizes sizes_of(const PagedAttentionCase& c) {
  Sizes sizes{};
  sizes.rows = c.rows_before + c.rows_behind;
  sizes.max_query_length = sizes.max_kv_length = 1;
  for (const PagedSequence& s : c.sequences) {
    sizes.rows += s.tokens;
    sizes.pages += pages_for(c, s.length);
    sizes.max_kv_length = std::max(sizes.max_kv_length, s.length);
    if (s.damage != Damage::many_queries)
      sizes.max_query_length = std::max(sizes.max_query_length, s.tokens);
  }
  sizes.pages += 3;
  sizes.width = pages_for(c, sizes.max_kv_length) + 1;
  return sizes;
}

uint64_t q_dim_of(const KvPageShape& shape) {
  return shape.head_dim + (shape.latent ? v_dim_of(shape) : 0);
}
uint64_t out_dim_of(const KvPageShape& shape) {
  return shape.latent ? shape.head_dim : v_dim_of(shape);
}
double scale_of(const PagedAttentionCase& c) {
  return 1 / std::sqrt(static_cast<double>(q_dim_of(c.shape)));
}

AttentionShape shape_of(const PagedAttentionCase& c, const PagedSequence& s) {
  return {s.tokens,
          c.heads,
          c.shape.kv_heads,
          q_dim_of(c.shape),
          out_dim_of(c.shape),
          s.length,
          std::max<uint64_t>(s.length, 1),
          0,
          scale_of(c),
          c.causal,
          c.window,
          double{c.soft_cap}};
}

KvSide q_side(const PagedAttentionCase& c) {
  return {c.q, c.q_layout, sizes_of(c).rows, c.heads, q_dim_of(c.shape), 0};
}
KvSide out_side(const PagedAttentionCase& c) {
  return {c.out, c.out_layout, sizes_of(c).rows, c.heads, out_dim_of(c.shape), 0};
}

struct Places {
  size_t q, pages, table, kv_lengths, cu_seqlens_q, is_prefill, out, lse, sink_logits, alibi_slopes;
};

// A call's memory before it runs, and its inputs in the clear.
class Maker {
 public:
  explicit Maker(const PagedAttentionCase& c)
      : c_(c),
        sizes_(sizes_of(c)),
        random_(random_of(c.name)),
        memory(c.shape, sizes_.pages, c.page_gap) {
    data.resize(c.sequences.size());
    add_pages();
    add_queries();
    at.kv_lengths = add(plain_block(DType::i32, kv_lengths()));
    at.cu_seqlens_q = add(plain_block(DType::i32, cu_seqlens_q()));
    Bytes is_prefill(c.sequences.size());
    for (size_t i = 0; i < is_prefill.size(); ++i)
      is_prefill[i] = std::byte{c.sequences[i].prompt ? uint8_t{255} : uint8_t{0}};
    at.is_prefill = add(plain_block(DType::u8, std::move(is_prefill)));
    const auto per_head = [&](float gain, std::vector<double>& values) {
      return add(per_head_block(
          c.heads, gain, [&] { return normal_(random_); }, values));
    };
    if (c.sink_logits) at.sink_logits = per_head(1.0f, sink_logits);
    if (c.alibi_slopes) at.alibi_slopes = per_head(0.05f, alibi_slopes);
    for (AttentionData& d : data) d.sink_logits = sink_logits, d.alibi_slopes = alibi_slopes;
    const uint64_t out_bytes = out_side(c).elements() * size_bytes(c.out);
    at.out = add(plain_block(c.out, pattern_bytes(out_bytes, 8)));
    const uint64_t lse_bytes = sizes_.rows * c.heads * sizeof(float);
    if (c.lse) at.lse = add(plain_block(DType::f32, pattern_bytes(lse_bytes, 9)));
  }

 private:
  PagedAttentionCase c_;
  Sizes sizes_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;

 public:
  PageMemory memory;
  std::vector<Block> blocks;
  Places at{};
  std::vector<AttentionData> data;  // of each sequence
  std::vector<double> sink_logits, alibi_slopes;

 private:
  size_t add(Block block) {
    blocks.push_back(std::move(block));
    return blocks.size() - 1;
  }

  // The oldest key that some query of the sequence sees.
  uint64_t first_needed(const PagedSequence& s) const {
    const uint64_t before = s.length >= s.tokens ? s.length - s.tokens + 1 : 0;
    return c_.window != 0 && before > c_.window ? before - c_.window : 0;
  }

  std::vector<float> row(uint64_t head_dim) {
    std::vector<float> values(head_dim);
    for (float& x : values) x = normal_(random_);
    return values;
  }

  void add_pages() {
    std::vector<int32_t> free(sizes_.pages);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random_);
    for (uint64_t page = 0; page < sizes_.pages; ++page) memory.spoil(page);
    const int32_t stale[] = {-1, static_cast<int32_t>(sizes_.pages),
                             std::numeric_limits<int32_t>::max(),
                             std::numeric_limits<int32_t>::min()};
    const uint64_t stride = sizes_.width + c_.table_gap;
    std::vector<int32_t> table(c_.sequences.size() * stride);
    for (size_t i = 0; i < table.size(); ++i) table[i] = stale[i % 4];
    for (size_t s = 0; s < c_.sequences.size(); ++s)
      add_sequence(s, free, std::span(table).subspan(s * stride, sizes_.width));
    at.table = add(plain_block(DType::i32, table));
    at.pages = add(plain_block(DType::u8, memory.bytes()));
    blocks[at.pages].aligned = true;
  }

  void add_sequence(size_t index, std::vector<int32_t>& free, std::span<int32_t> entries) {
    const PagedSequence& s = c_.sequences[index];
    const uint64_t page_tokens = c_.shape.page_tokens, needed = first_needed(s) / page_tokens;
    for (uint64_t nth = 0; nth < pages_for(c_, s.length); ++nth) {
      const auto page = static_cast<uint64_t>(free.back());
      if (nth >= needed) entries[nth] = free.back();
      free.pop_back();
      for (uint64_t key = nth * page_tokens; key < std::min(s.length, (nth + 1) * page_tokens);
           ++key) {
        for (uint64_t h = 0; h < c_.shape.kv_heads; ++h) {
          const uint64_t slot = page * page_tokens + key % page_tokens;
          append(data[index].k, memory.write(KvRole::k, slot, h, row(c_.shape.head_dim)));
          append(data[index].v, memory.write(KvRole::v, slot, h, row(v_dim_of(c_.shape))));
        }
      }
    }
    if (c_.shape.latent) reference::join_latent(c_.shape.head_dim, v_dim_of(c_.shape), data[index]);
    const uint64_t middle = (needed + pages_for(c_, s.length)) / 2;
    if (s.damage == Damage::negative_page) entries[middle] = -7;
    if (s.damage == Damage::page_beyond) entries[middle] = static_cast<int32_t>(sizes_.pages);
  }

  static void append(std::vector<double>& all, const std::vector<double>& more) {
    all.insert(all.end(), more.begin(), more.end());
  }

  void add_queries() {
    const KvSide side = q_side(c_);
    Bytes bytes = pattern_bytes(side.elements() * size_bytes(side.dtype), 3);
    uint64_t token = c_.rows_before;
    for (size_t s = 0; s < c_.sequences.size(); ++s) {
      for (uint64_t t = 0; t < c_.sequences[s].tokens; ++t, ++token) {
        for (uint64_t h = 0; h < c_.heads; ++h) {
          reference::store_row(side, bytes, token, h, row(side.head_dim));
          append(data[s].q, reference::load_row<double>(side, bytes, token, h));
        }
      }
    }
    at.q = add(plain_block(c_.q, std::move(bytes)));
  }

  std::vector<int32_t> kv_lengths() const {
    std::vector<int32_t> numbers;
    for (const PagedSequence& s : c_.sequences) {
      uint64_t length = s.length;
      if (s.damage == Damage::long_length) length = sizes_.max_kv_length + 1;
      numbers.push_back(s.damage == Damage::negative_length ? -1 : static_cast<int32_t>(length));
    }
    return numbers;
  }

  std::vector<int32_t> cu_seqlens_q() const {
    std::vector<int32_t> numbers = {static_cast<int32_t>(c_.rows_before)};
    for (const PagedSequence& s : c_.sequences)
      numbers.push_back(numbers.back() + static_cast<int32_t>(s.tokens));
    if (!c_.sequences.empty() && c_.sequences.back().damage == Damage::queries_beyond)
      numbers.back() = static_cast<int32_t>(sizes_.rows) + 1;
    return numbers;
  }
};

// What the call must leave; rows of no sequence keep what they hold.
class Expected {
 public:
  Expected(const PagedAttentionCase& c, const Places& at, const std::vector<AttentionData>& data)
      : c_(c), at_(at) {
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      const PagedSequence& sequence = c.sequences[s];
      for (uint64_t row = 0; row < sequence.tokens * c.heads; ++row)
        rows_.push_back(state_of(sequence, data[s], row / c.heads, row % c.heads));
    }
  }

  std::string fill(std::vector<Block>& blocks, const std::string& description) const {
    const AttentionTolerance bounds =
        attention_tolerance(description, c_.shape.k, c_.shape.latent ? c_.shape.k : c_.shape.v,
                            {.softened = c_.soft_cap != 0 || c_.alibi_slopes});
    for (uint64_t i = 0; i < rows_.size(); ++i) {
      const uint64_t row = c_.rows_before * c_.heads + i;
      expect_attention_row(
          rows_[i], row, bounds,
          {blocks[at_.out], out_side(c_), c_.lse ? &blocks[at_.lse] : nullptr, row});
    }
    // The NMSE of a block of few rows is its own luck.
    if (rows_.size() >= 8) blocks[at_.out].nmse = bounds.nmse + 2 * out_rounding(c_.out);
    return "paged " + bounds.name + (c_.out == DType::f32 ? "" : str_cat(" to ", c_.out));
  }

 private:
  reference::AttentionState state_of(const PagedSequence& s, const AttentionData& data,
                                     uint64_t token, uint64_t head) const {
    if (s.damage != Damage::none) {
      reference::AttentionState nan;
      nan.values.assign(out_dim_of(c_.shape), kNaN);
      nan.max = nan.sum = kNaN;
      return nan;
    }
    auto state = reference::attention_state(shape_of(c_, s), data, token, head, 0, s.length);
    if (c_.sink_logits) reference::add_sink(state, data.sink_logits[head]);
    return state;
  }

  PagedAttentionCase c_;
  Places at_;
  std::vector<reference::AttentionState> rows_;  // of the sequences, one behind the other
};

void record(const PagedAttentionCase& c, const PageMemory& memory, const Places& at,
            Encoder& encoder, std::span<const Tensor> t) {
  const Sizes sizes = sizes_of(c);
  const uint64_t sequences = c.sequences.size();
  const bool marks = std::any_of(c.sequences.begin(), c.sequences.end(),
                                 [](const PagedSequence& s) { return s.prompt; });
  PagedAttentionInputs in;
  in.q = kv_view(t[at.q], q_side(c));
  in.pages = pages_of(memory, t[at.pages]);
  in.page_table = t[at.table].reshape({sequences, sizes.width + c.table_gap});
  in.page_table = in.page_table.slice(1, 0, sizes.width);
  in.kv_lengths = t[at.kv_lengths];
  in.cu_seqlens_q = t[at.cu_seqlens_q];
  if (marks) in.is_prefill = t[at.is_prefill];
  in.out = kv_view(t[at.out], out_side(c));
  if (c.lse) in.lse = t[at.lse].reshape({sizes.rows, c.heads});
  PagedAttentionOptions options{
      .max_query_length = sizes.max_query_length,
      .max_kv_length = sizes.max_kv_length,
      .scale = static_cast<float>(scale_of(c)),
      .mask = {.causal = c.causal, .window = c.window, .soft_cap = c.soft_cap}};
  if (c.sink_logits) options.mask.sink_logits = t[at.sink_logits];
  if (c.alibi_slopes) options.mask.alibi_slopes = t[at.alibi_slopes];
  attention(encoder, in, options);
}

}  // namespace

OpCase make_case(const PagedAttentionCase& c) {
  const AttentionTypes types{c.q, c.shape.k, c.shape.v, c.out, true, c.shape.latent};
  const auto make = [c] {
    Maker maker(c);
    OpRun run;
    run.commands = {};  // one or two
    run.record = [c, memory = maker.memory, at = maker.at](Encoder& encoder,
                                                           std::span<const Tensor> t) {
      record(c, memory, at, encoder, t);
    };
    const auto expected = std::make_shared<const Expected>(c, maker.at, maker.data);
    run.expect = [expected](std::vector<Block>& blocks, const std::string& description) {
      return expected->fill(blocks, description);
    };
    run.blocks = std::move(maker.blocks);
    return run;
  };
  return {.name = str_cat(c.shape.latent ? "latent " : "", "paged attention ", c.shape.k, "/",
                          c.shape.v, " ", c.name),
          .supported = [types](const Device& device) { return supports(device, types); },
          .make = make};
}

}  // namespace gyre::test
