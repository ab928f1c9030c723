// attention_decode where logits and values are far apart, tiny, huge or not finite.
#include <cmath>
#include <functional>
#include <limits>

#include "cuda_host/emulated_device.h"

namespace gyre::test {
namespace {

// Sharp queries over many keys: the loudest so far is surpassed again and again.
TEST(AttentionDecodeValues, SharpQueries) {
  struct Sharp {
    KvFormat format;
    uint64_t heads, dim;
  };
  constexpr Sharp kCases[] = {{KvFormat::tq4, 4, 64},   {KvFormat::tq4, 12, 64},
                              {KvFormat::tq5, 4, 128},  {KvFormat::tq6, 4, 64},
                              {KvFormat::tq8, 4, 64},   {KvFormat::f16, 8, 64},
                              {KvFormat::f16, 16, 128}, {KvFormat::bf16, 7, 64}};
  for (const auto& [format, heads, dim] : kCases) {
    for (const double gain : {3.0, 6.0, 20.0}) {
      AttentionCase c = {.heads = heads, .k_dim = dim, .length = 4096, .k = format, .v = format};
      c.q_gain = static_cast<float>(gain);
      const AttentionProblem problem(emulated_device(), c);
      const AttentionAnswer answer = problem.run();
      EXPECT_LE(nmse(answer.out, answer.decoded.out), 5e-6) << problem.numbers().text();
    }
  }
}

// One query, as often as there are heads, over keys with these logits (to within the format's
// error) and values.
struct Form {
  KvFormat format = KvFormat::tq8;
  uint64_t heads = 1;
};
struct Logits {
  uint64_t keys;
  std::function<float(uint64_t)> logit;
  std::function<float(uint64_t)> value;  // of every coordinate, with signs that differ among them
  Form form = {};
};
// Levels as they are, with an offset by a table, in two parts, and with an offset alone.
constexpr Form kForms[] = {
    {KvFormat::tq8, 1}, {KvFormat::tq4, 12}, {KvFormat::tq4, 1}, {KvFormat::tq6, 1}};

struct OneRow {
  std::vector<float> out;
  float lse;
};

// All of the heads have the query.
OneRow attend(const Device& d, const Form& form, const std::vector<float>& q,
              const std::vector<float>& k, const std::vector<float>& v, float scale) {
  const uint64_t heads = form.heads, dim = q.size();
  std::vector<float> queries;
  for (uint64_t i = 0; i < heads; ++i) queries.insert(queries.end(), q.begin(), q.end());
  AttentionInputs in;
  in.q = tensor_of(d, queries, {1, heads, dim});
  in.k_cache = cache_of(d, form.format, KvRole::k, k, {1, dim});
  in.v_cache = cache_of(d, form.format, KvRole::v, v, {1, dim});
  in.out = d.tensor(DType::f32, {1, heads, dim});
  in.lse = d.tensor(DType::f32, {1, heads});
  attention(RunNow(d), in, {.length = k.size() / dim, .scale = scale});
  return {floats_of(in.out), floats_of(in.lse)[0]};
}

OneRow one_row(const Device& d, const Logits& of) {
  constexpr uint64_t kDim = 64;
  std::vector<float> q = gaussian_rows(1, kDim, 5), k(of.keys * kDim), v(of.keys * kDim);
  float square = 0;
  for (const float x : q) square += x * x;
  for (uint64_t key = 0; key < of.keys; ++key) {
    for (uint64_t i = 0; i < kDim; ++i) {
      k[key * kDim + i] = q[i] * of.logit(key) / square;
      v[key * kDim + i] = q[kDim - 1 - i] * of.value(key);
    }
  }
  return attend(d, of.form, q, k, v, 1.0f);
}

constexpr cuda::CudaLimits kOneWarp = {132, 18 << 10, 80 << 10, 90};  // room for one in a block
void expect_alike(const OneRow& got, const OneRow& wanted, double bound) {
  EXPECT_LE(nmse({got.out.begin(), got.out.end()}, {wanted.out.begin(), wanted.out.end()}), bound);
  EXPECT_NEAR(got.lse, wanted.lse, 1e-4 * (1 + std::abs(wanted.lse)));
}
void expect_row(const Logits& of, double bound) {
  const uint64_t before = decode_calls();
  expect_alike(one_row(emulated_device(), of), one_row(cpu_device(1), of), bound);
  EXPECT_EQ(decode_calls(), before + 1);
}

// Halves of a rotated query of 512 that differ in size: each is rounded for itself.
TEST(AttentionDecodeValues, QueriesWithUnevenHalves) {
  constexpr uint64_t kDim = 512;
  std::vector<float> q = gaussian_rows(1, kDim, 5), k = gaussian_rows(100, kDim, 6), v = k;
  for (uint32_t i = 0; i < kDim / 2; ++i) {
    const auto sign = [](uint32_t c) { return abi::kv_sign_bit(c) != 0 ? -1.0f : 1.0f; };
    q[i + kDim / 2] = q[i] * sign(i) * sign(i + kDim / 2) * 0.98f;
  }
  const auto of = [&](const Device& d) { return attend(d, {KvFormat::tq4, 1}, q, k, v, 0.1f); };
  expect_alike(of(emulated_device()), of(cpu_device(1)), 1e-5);
}

// A large value that does not matter any more once a louder key comes; keys so loud that, relative
// to the first ones, their weight is beyond a float; tails that matter beside one loud key, which
// they share a warp with.
TEST(AttentionDecodeValues, LoudKeysAndLargeValues) {
  for (const Form& form : kForms) {
    for (const float rise : {8.0f, 15.0f, 28.0f}) {
      const float large = std::exp(rise) * 0.3f;
      const auto logit = [&](uint64_t key) { return key == 0 ? 0.0f : key == 256 ? rise : -30.0f; };
      const auto value = [&](uint64_t key) { return key == 0 ? large : 1.0f; };
      expect_row({300, logit, value, form}, 1e-5);
    }
    const auto climbing = [](uint64_t key) {
      const uint64_t step = key / 256;
      return key % 32 == 0 ? 2.7f * static_cast<float>(step) : -20.0f;
    };
    expect_row({2048, climbing, [](uint64_t) { return 1.0f; }, form}, 1e-5);
    const auto leaping = [](uint64_t key) { return key < 1024 ? 0.0f : 92.0f; };
    const auto opposite = [](uint64_t key) { return key < 1024 ? 1e4f : -1e4f; };
    expect_row({2048, leaping, opposite, form}, 1e-5);
  }
  limits = kOneWarp;
  for (const float tail : {-8.0f, -9.0f, -10.0f, -11.0f}) {
    const auto logit = [&](uint64_t key) { return key == 0 ? 0.0f : tail; };
    const auto sign = [](uint64_t key) { return key / 16 % 2 == 0 ? 1.0f : -0.5f; };
    expect_row({16384, logit, sign}, 2e-4);
  }
  limits = kLarge;
}

// So many keys for one warp, nearly as loud as a weight can be after the first ones, and all with
// the same values: sums must be halved again and again.
TEST(AttentionDecodeValues, ManyLoudKeys) {
  limits = kOneWarp;
  const auto logit = [](uint64_t key) { return key < 32 ? 0.0f : 2.2f; };
  expect_row({200000, logit, [](uint64_t) { return 1.0f; }, {KvFormat::tq4, 12}}, 1e-5);
  // Then one far above them all: nothing of their sums may stay.
  const auto last = [&](uint64_t key) { return key == 30000 ? 25.0f : logit(key); };
  const auto other = [](uint64_t key) { return key == 30000 ? -0.5f : 1.0f; };
  for (const Form& form : {Form{KvFormat::tq4, 12}, Form{KvFormat::tq8, 1}})
    expect_row({30064, last, other, form}, 1e-5);
  limits = kLarge;
}

// An infinite value in a split whose probabilities are 0 beside those of the others.
TEST(AttentionDecodeValues, SplitsThatWeighNothing) {
  const auto logit = [](uint64_t key) { return key < 1100 ? -400.0f : 0.0f; };
  const auto value = [](uint64_t key) {
    return key == 5 ? std::numeric_limits<float>::infinity() : 1.0f;
  };
  for (const Form& form : kForms) {
    const OneRow row = one_row(emulated_device(8), {3000, logit, value, form});
    for (const float x : row.out) EXPECT_TRUE(std::isfinite(x)) << name(form.format);
  }
}

// A non-finite value shows in its own output coordinate and nowhere else.
TEST(AttentionDecodeValues, ValuesThatAreNotFinite) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const Form& form : kForms) {
      for (const uint64_t at : {0, 170, 299}) {
        const auto value = [&](uint64_t key) { return key == at ? bad : 1.0f; };
        for (const uint64_t keys : {300, 3000}) {  // the latter in splits
          const OneRow row = one_row(emulated_device(keys == 300 ? 1 : 8),
                                     {keys, [](uint64_t) { return 0.0f; }, value, form});
          for (const float x : row.out) EXPECT_FALSE(std::isfinite(x));
          EXPECT_NEAR(row.lse, std::log(static_cast<float>(keys)), 2e-3);
        }
      }
    }
  }
}

// Some rows see what is not finite, others do not: their query is the opposite one.
TEST(AttentionDecodeValues, RowsThatAreNotFinite) {
  constexpr uint64_t kDim = 64, kKeys = 300, kHeads = 12, kCoordinate = 9, kNanKey = 3;
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> base = gaussian_rows(1, kDim, 5);
  struct Case {
    float bad;  // a value of a loud key; one of 3e38 times its weight is infinite too
    uint64_t at;
    uint32_t loud;  // rows, a bit each
    bool nan_too;   // in another loud key
  };
  const auto attend_on = [&](const Device& d, const Case& c) {
    std::vector<float> q, k = gaussian_rows(kKeys, kDim, 6), v = gaussian_rows(kKeys, kDim, 7);
    for (uint64_t i = 0; i < kHeads * kDim; ++i)
      q.push_back((c.loud >> i / kDim & 1) != 0 ? base[i % kDim] : -base[i % kDim]);
    for (uint64_t i = 0; i < kDim; ++i) {
      k[c.at * kDim + i] = base[i] * 40, v[c.at * kDim + i] = 0;
      if (c.nan_too) k[kNanKey * kDim + i] = base[i] * 40;
    }
    v[c.at * kDim + kCoordinate] = c.bad;
    if (c.nan_too) v[kNanKey * kDim] = nan;
    return attended(d, one_head(d, KvFormat::tq4, q, k, v, kDim),
                    {.length = kKeys, .scale = 0.125f});
  };
  const auto expect_rows = [&](const Case& c) {
    const std::vector<float> got = attend_on(emulated_device(), c),
                             cpu = attend_on(cpu_device(1), c);
    std::vector<double> finite, wanted;
    for (uint64_t i = 0; i < kHeads * kDim; ++i) {
      ASSERT_EQ(std::isfinite(got[i]), std::isfinite(cpu[i])) << c.bad << " row " << i / kDim;
      if (std::isfinite(cpu[i])) finite.push_back(got[i]), wanted.push_back(cpu[i]);
      if (c.bad == 3e38f && (c.loud >> i / kDim & 1) != 0 && i % kDim == kCoordinate) {
        EXPECT_TRUE(c.nan_too ? std::isnan(got[i]) : got[i] == inf) << got[i];
      }
    }
    EXPECT_LE(nmse(finite, wanted), 1e-4);
  };
  for (const cuda::CudaLimits& room : {kLarge, kOneWarp}) {
    limits = room;
    for (const float bad : {inf, nan, 3e38f}) {
      for (const uint64_t at : {0, 170, 299}) {
        for (const uint32_t loud : {0x001u, 0xFFEu, 0x0F0u, 0xF0Fu, 0x222u}) {
          expect_rows({bad, at, loud, false});
          expect_rows({bad, at, loud, true});
        }
      }
    }
  }
  limits = kLarge;
}

// Outputs for queries, keys and values that are multiplied with numbers near the ends of what a
// format holds.
std::vector<float> decode_scaled(const Form& of, float q_scale, float k_scale, float v_scale) {
  constexpr uint64_t kDim = 64, kKeys = 300;
  const auto [format, heads] = of;
  const Device d = emulated_device();
  const auto scaled = [](std::vector<float> rows, float by) {
    for (float& x : rows) x *= by;
    return rows;
  };
  AttentionInputs in;
  in.q = tensor_of(d, scaled(gaussian_rows(heads, kDim, 3), q_scale), {1, heads, kDim});
  in.k_cache =
      cache_of(d, format, KvRole::k, scaled(gaussian_rows(kKeys, kDim, 1), k_scale), {1, kDim});
  in.v_cache =
      cache_of(d, format, KvRole::v, scaled(gaussian_rows(kKeys, kDim, 2), v_scale), {1, kDim});
  in.out = d.tensor(DType::f32, {1, heads, kDim});
  attention(RunNow(d), in, {.length = kKeys, .scale = 0.125f});
  std::vector<float> out = floats_of(in.out);
  for (float& x : out) x /= v_scale;
  return out;
}

TEST(AttentionDecodeValues, NumbersOfEverySize) {
  const auto expect_same = [](const Form& of, float q, float k, float v) {
    const std::vector<float> plain = decode_scaled(of, 1, 1, 1);
    const std::vector<float> scaled = decode_scaled(of, q, k, v);
    EXPECT_LE(nmse({scaled.begin(), scaled.end()}, {plain.begin(), plain.end()}), 1e-4)
        << name(of.format) << " " << q << " " << k << " " << v;
  };
  for (const Form& of : kForms) {
    for (const float v : {1e-30f, 1e-20f, 1e20f, 1e29f, 5e29f}) expect_same(of, 1, 1, v);
    expect_same(of, 1e-25f, 1e25f, 1);
    expect_same(of, 1e25f, 1e-25f, 1);
  }
  expect_same({KvFormat::bf16, 3}, 1e-33f, 1e33f, 1e30f);
  expect_same({KvFormat::bf16, 3}, 1e30f, 1e-30f, 1e-30f);
}

}  // namespace
}  // namespace gyre::test
