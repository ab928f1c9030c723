// attention_many_rows against double precision, its text run on the host: tiles of rows and stages
// of keys that are full, short and empty, masks, splits, every way to an operand.
#include "attention_host_device.h"

namespace gyre::test {
namespace {

class ManyRowsHost : public testing::Test {
 protected:
  ManyRowsHost() { many_rows = true; }
  ~ManyRowsHost() override {
    many_rows = false;
    limits = kLarge;
  }
};

void expect_many_rows(const AttentionCase& c, uint32_t threads = 1) {
  const uint32_t before = many_rows_calls;
  expect_holds(c);
  EXPECT_GT(many_rows_calls, before) << c.text();
  if (threads != 1) expect_close(c, threads);
}

// Queries that the operands hold.
AttentionCase case_of(KvFormat format, uint64_t tokens, uint64_t heads, uint64_t dim,
                      uint64_t length) {
  AttentionCase c = {
      .tokens = tokens, .heads = heads, .k_dim = dim, .length = length, .k = format, .v = format};
  if (format == KvFormat::f16) c.q_dtype = DType::f16;
  if (format == KvFormat::bf16) c.q_dtype = DType::bf16;
  return c;
}

// 128 rows and a rest, 64 rows, fewer than a warp's 16; keys of one stage, several, and a rest.
TEST_F(ManyRowsHost, RowsAndKeysOfEverySize) {
  for (const uint64_t tokens : {2, 5, 16, 17, 35}) {
    for (const uint64_t length : {40, 128, 300}) {
      expect_many_rows(case_of(KvFormat::f16, tokens, 4, 64, std::max(tokens, length)));
      if (tokens > 4)
        expect_many_rows(case_of(KvFormat::tq4, tokens, 4, 128, std::max(tokens, length)));
    }
  }
}

TEST_F(ManyRowsHost, EveryFormatAndHeadDim) {
  for (const auto& [format, dim] :
       std::initializer_list<std::pair<KvFormat, uint64_t>>{{KvFormat::f16, 80},
                                                            {KvFormat::bf16, 128},
                                                            {KvFormat::f16, 256},
                                                            {KvFormat::tq2, 64},
                                                            {KvFormat::tq3, 128},
                                                            {KvFormat::tq5, 128},
                                                            {KvFormat::tq6, 64},
                                                            {KvFormat::tq8, 64}})
    expect_many_rows(case_of(format, 20, 4, dim, 150));
  for (const auto& [format, dim] : std::initializer_list<std::pair<KvFormat, uint64_t>>{
           {KvFormat::f16, 256}, {KvFormat::bf16, 112}, {KvFormat::tq8, 64}, {KvFormat::tq4, 128}})
    expect_many_rows(case_of(format, 10, 4, dim, 150));
}

TEST_F(ManyRowsHost, PairsAndDifferentDims) {
  AttentionCase c = case_of(KvFormat::bf16, 20, 4, 192, 150);
  c.v_dim = 128;
  expect_many_rows(c);
  for (const uint64_t tokens : {9, 20}) {
    c = case_of(KvFormat::tq8, tokens, 4, 256, 150);
    c.v = KvFormat::tq4;
    expect_many_rows(c);
  }
  c = case_of(KvFormat::f16, 20, 4, 64, 150);
  c.v = KvFormat::tq4;
  expect_many_rows(c);
  c = case_of(KvFormat::tq8, 20, 4, 128, 150);
  c.v = KvFormat::bf16;
  expect_many_rows(c);
}

TEST_F(ManyRowsHost, MasksRingsAndTrees) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq4}) {
    const uint64_t dim = format == KvFormat::f16 ? 64 : 128;
    for (const uint64_t tokens : {10, 30}) {
      AttentionCase c = case_of(format, tokens, 8, dim, 200);
      c.kv_heads = 2;
      c.capacity = 219;
      c.ring_start = 70;
      c.window = 90;
      c.soft_cap = 20;
      c.sink_logits = c.alibi_slopes = true;
      expect_many_rows(c);
      c = case_of(format, tokens, 4, dim, 140);
      c.tree_mask = true;
      expect_many_rows(c);
      c = case_of(format, tokens, 4, dim, 140);
      c.causal = false;
      c.window = 33;
      expect_many_rows(c);
    }
  }
}

TEST_F(ManyRowsHost, SplitsAndEmptyOnes) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq4}) {
    AttentionCase c = case_of(format, 10, 4, format == KvFormat::f16 ? 64 : 128, 600);
    c.splits = 3;
    c.sink_logits = true;
    expect_many_rows(c);
    c.length = 70;
    expect_many_rows(c);
    expect_many_rows(case_of(format, 10, 4, format == KvFormat::f16 ? 64 : 128, 900), 4);
  }
  expect_many_rows(case_of(KvFormat::f16, 20, 4, 64, 0));
  expect_many_rows(case_of(KvFormat::f16, 20, 4, 64, 3));
}

TEST_F(ManyRowsHost, SharpQueriesAndOutliers) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq4}) {
    AttentionCase c = case_of(format, 20, 4, format == KvFormat::f16 ? 64 : 128, 300);
    c.q_gain = 8;
    c.outliers = 4;
    expect_many_rows(c);
  }
}

// Values of later tokens that are infinite or NaN must not show in the rows before them.
TEST_F(ManyRowsHost, ValuesThatAreNotFinite) {
  constexpr uint64_t kTokens = 40, kHeads = 4, kLength = 140;
  for (const auto& [format, dtype, dim] :
       std::initializer_list<std::tuple<KvFormat, DType, uint64_t>>{
           {KvFormat::f16, DType::f16, 64}, {KvFormat::bf16, DType::bf16, 128}}) {
    std::vector<float> values = gaussian_rows(kLength, dim, 2);
    values[110 * dim + 3] = std::numeric_limits<float>::infinity();
    values[111 * dim + 3] = kMinusInfinity;
    values[120 * dim + 7] = kMinusInfinity;
    for (uint64_t c = 0; c < dim; ++c)
      values[135 * dim + c] = std::numeric_limits<float>::quiet_NaN();
    const auto attend_on = [&, format = format, dtype = dtype, dim = dim](const Device& d) {
      AttentionInputs in;
      in.q = d.tensor(dtype, {kTokens, kHeads, dim});
      Encoder encoder(d);
      kv_copy(encoder,
              {.k = tensor_of(d, gaussian_rows(kTokens * kHeads, dim, 3), {kTokens, kHeads, dim}),
               .k_cache = in.q});
      encoder.submit().wait();
      in.k_cache = cache_of(d, format, KvRole::k, gaussian_rows(kLength, dim, 1), {1, dim});
      in.v_cache = cache_of(d, format, KvRole::v, values, {1, dim});
      in.out = d.tensor(DType::f32, {kTokens, kHeads, dim});
      return attended(d, in, {.length = kLength, .scale = 0.1f});
    };
    const uint32_t before = many_rows_calls;
    const std::vector<float> got = attend_on(host_device()), wanted = attend_on(cpu_device(1));
    EXPECT_EQ(many_rows_calls, before + 1);
    std::vector<double> finite, wanted_finite;
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(std::isnan(got[i]), std::isnan(wanted[i])) << name(format) << " element " << i;
      EXPECT_EQ(std::isinf(got[i]), std::isinf(wanted[i])) << name(format) << " element " << i;
      if (!std::isfinite(wanted[i]) || !std::isfinite(got[i])) continue;
      finite.push_back(got[i]), wanted_finite.push_back(wanted[i]);
    }
    EXPECT_GT(finite.size(), got.size() / 2);
    EXPECT_LT(finite.size(), got.size());
    EXPECT_LE(nmse(finite, wanted_finite), 1e-5) << name(format);
  }
}

// A row's bits do not depend on the chunk that it came in.
TEST_F(ManyRowsHost, ChunksGiveTheSameBits) {
  for (const auto& [format, dtype, dim] :
       std::initializer_list<std::tuple<KvFormat, DType, uint64_t>>{
           {KvFormat::f16, DType::f16, 64}, {KvFormat::tq4, DType::f32, 128}}) {
    constexpr uint64_t kTokens = 90, kLength = 330, kHeads = 4;
    const Device d = host_device();
    const std::vector<float> keys = gaussian_rows(kLength, dim, 1),
                             values = gaussian_rows(kLength, dim, 2),
                             queries = gaussian_rows(kTokens * kHeads, dim, 3);
    // The tokens [first, last) of the last kTokens, when the cache has as many keys.
    const auto chunk = [&, format = format, dtype = dtype, dim = dim](uint64_t first,
                                                                      uint64_t last) {
      const uint64_t length = kLength - kTokens + last, tokens = last - first;
      const auto begin_of = [&](const std::vector<float>& rows, uint64_t count) {
        return std::vector<float>(rows.begin(), rows.begin() + count * dim);
      };
      const std::vector<float> part(queries.begin() + first * kHeads * dim,
                                    queries.begin() + last * kHeads * dim);
      AttentionInputs in;
      in.q = d.tensor(dtype, {tokens, kHeads, dim});
      Encoder encoder(d);
      kv_copy(encoder, {.k = tensor_of(d, part, {tokens, kHeads, dim}), .k_cache = in.q});
      encoder.submit().wait();
      in.k_cache = cache_of(d, format, KvRole::k, begin_of(keys, length), {1, dim});
      in.v_cache = cache_of(d, format, KvRole::v, begin_of(values, length), {1, dim});
      in.out = d.tensor(DType::f32, {tokens, kHeads, dim});
      return attended(d, in, {.length = length, .scale = 0.1f, .mask = {.window = 200}});
    };
    const std::vector<float> whole = chunk(0, kTokens);
    std::vector<float> pieces = chunk(0, 37);
    for (const auto& [first, last] : {std::pair(37, 60), std::pair(60, 90)}) {
      const std::vector<float> more = chunk(first, last);
      pieces.insert(pieces.end(), more.begin(), more.end());
    }
    EXPECT_EQ(whole, pieces) << name(format);
  }
}

TEST_F(ManyRowsHost, OtherGpus) {
  limits = {108, 163 << 10, 164 << 10, 80};
  expect_many_rows(case_of(KvFormat::f16, 40, 4, 64, 200));
  expect_many_rows(case_of(KvFormat::tq4, 20, 4, 256, 200));
  limits = {84, 99 << 10, 100 << 10, 86};
  AttentionCase c = case_of(KvFormat::f16, 20, 4, 192, 200);
  c.v_dim = 128;
  expect_many_rows(c);
  expect_many_rows(case_of(KvFormat::tq4, 20, 4, 128, 200));
}

}  // namespace
}  // namespace gyre::test
