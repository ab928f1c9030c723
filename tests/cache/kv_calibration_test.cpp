// Caches with a calibration: what they hold and attend to, against double precision over the
// calibrated rows; pool and cache alike; files name the calibration.
#include <numeric>

#include "cache/kv_cache_model.h"
#include "cache/snapshot_fixture.h"
#include "expect_error.h"
#include "gyre_test.h"
#include "kv_codec/calibrated_reference.h"

namespace gyre::test {
namespace {

constexpr uint64_t kGroup = kHeads / kKvHeads, kTokens = 70;

using Values = std::vector<float>;

class KvCalibrated : public testing::Test {
 public:
  // One of K and V of the layer: the numbers, and the same on the device.
  struct Side {
    Values matrix, inverse, mean, factor, diagonal;
    KvCalibration calibration;
  };

  Values normal(uint64_t count, float spread = 1.0f) {
    return normal_floats(count, random, spread);
  }
  Tensor tensor(const Values& values, const Dims& shape) const {
    return tensor_of(device, values, shape);
  }
  // 1 + e e^t and its inverse 1 - e e^t / (1 + |e|^2), per head.
  Side side(uint64_t n, bool with_mean) {
    Side s;
    for (uint64_t g = 0; g < kKvHeads; ++g) {
      const Values e = normal(n, 0.2f);
      const float square = std::inner_product(e.begin(), e.end(), e.begin(), 0.0f);
      for (uint64_t i = 0; i < n * n; ++i) {
        const float one = i / n == i % n ? 1.0f : 0.0f, product = e[i / n] * e[i % n];
        s.matrix.push_back(one + product);
        s.inverse.push_back(one - product / (1.0f + square));
      }
    }
    s.factor = normal(kKvHeads * n * n, 0.05f);
    s.diagonal.assign(kKvHeads * n, 1.25f);
    if (with_mean) s.mean = normal(kKvHeads * n, 2.0f);
    const Dims matrix = {kKvHeads, n, n}, vector = {kKvHeads, n};
    s.calibration.transform = {tensor(s.matrix, matrix), tensor(s.inverse, matrix), {}};
    if (with_mean) s.calibration.transform.mean = tensor(s.mean, vector);
    s.calibration.feedback = {
        tensor(s.factor, matrix), tensor(s.diagonal, vector), {0.9f, 1.0f, 1.1f}};
    return s;
  }
  KvCacheOptions options(const KvLayer& layer, const Side& k, const Side& v) const {
    KvCacheOptions made = small(layer, 100);
    made.calibration = {{k.calibration, v.calibration}};
    return made;
  }
  KvPool pool_of(const KvCacheOptions& o, uint64_t pages) const {
    return KvPool(device, {.kv_heads = o.kv_heads,
                           .head_dim = o.head_dim,
                           .v_head_dim = o.v_head_dim,
                           .layers = o.layers,
                           .pages = pages,
                           .page_tokens = 8,
                           .calibration = o.calibration});
  }
  Tensor rows(uint64_t count, uint64_t heads, uint64_t dim) {
    return normal_tensor(device, {count, heads, dim}, random);
  }

  std::mt19937 random{11};
  Device device = test_device();
};

// The row as a reader of the cache sees it, in its basis; near: as sink tokens and tail keep it.
std::vector<double> stored(const KvCalibrated::Side& s, KvFormat format, bool is_v, uint64_t head,
                           std::span<const float> row, bool near) {
  const uint64_t n = row.size();
  reference::CalibratedRowInputs in{s.matrix.data() + head * n * n, s.inverse.data() + head * n * n,
                                    s.mean.empty() ? nullptr : s.mean.data() + head * n,
                                    s.factor.data() + head * n * n, s.diagonal.data() + head * n};
  in.gains = {0.9f, 1.0f, 1.1f};
  const auto calibrated = reference::calibrated_row(name(format), is_v, row, in);
  if (near) {
    std::vector<double> values;
    for (const uint16_t bits : calibrated.near) {
      Half half;
      half.bits = bits;
      values.push_back(static_cast<float>(half));
    }
    return values;
  }
  return reference::kv_restored(
      reference::kv_rotated(reference::kv_coder(name(format), is_v), calibrated.coded));
}

std::vector<double> product(const float* matrix, std::span<const double> x) {
  std::vector<double> out(x.size());
  for (size_t j = 0; j < x.size(); ++j)
    for (size_t i = 0; i < x.size(); ++i) out[i] += matrix[j * x.size() + i] * x[j];
  return out;
}

// Everything appended in two steps and then token by token; the newest query's outputs compared.
struct Attended {
  const KvLayer& layer;
  const KvCalibrated::Side &k, &v;
  const Values &keys, &values, &q;
};

std::vector<double> expected(const Attended& a) {
  std::vector<double> out;
  for (uint64_t h = 0; h < kHeads; ++h) {
    const uint64_t g = h / kGroup;
    const Values q32(a.q.begin() + static_cast<ptrdiff_t>(h * kDim),
                     a.q.begin() + static_cast<ptrdiff_t>((h + 1) * kDim));
    const std::vector<double> q(q32.begin(), q32.end());
    const std::vector<double> inside = product(a.k.inverse.data() + g * kDim * kDim, q);
    std::vector<double> logits, sum(kValueDim);
    std::vector<std::vector<double>> rows;
    for (uint64_t t = 0; t < kTokens; ++t) {
      const bool near = t < a.layer.sink_tokens || t + a.layer.tail >= kTokens;
      const auto row = [&](const Values& of, uint64_t n) {
        return std::span(of).subspan((t * kKvHeads + g) * n, n);
      };
      const auto key = stored(a.k, a.layer.k, false, g, row(a.keys, kDim), near);
      logits.push_back(std::inner_product(key.begin(), key.end(), inside.begin(), 0.0) /
                       std::sqrt(static_cast<double>(kDim)));
      rows.push_back(stored(a.v, a.layer.v, true, g, row(a.values, kValueDim), near));
    }
    const double largest = *std::max_element(logits.begin(), logits.end());
    double weights = 0;
    for (uint64_t t = 0; t < kTokens; ++t) {
      const double weight = std::exp(logits[t] - largest);
      weights += weight;
      for (uint64_t e = 0; e < kValueDim; ++e) sum[e] += weight * rows[t][e];
    }
    for (double& value : sum) value /= weights;
    std::vector<double> left = product(a.v.inverse.data() + g * kValueDim * kValueDim, sum);
    for (uint64_t e = 0; e < kValueDim && !a.v.mean.empty(); ++e)
      left[e] += a.v.mean[g * kValueDim + e];
    out.insert(out.end(), left.begin(), left.end());
  }
  return out;
}

TEST_F(KvCalibrated, AttendsOverCalibratedRowsAsInDoublePrecision) {
  const KvLayer layers[] = {
      {.k = KvFormat::tq4, .v = KvFormat::tq4},
      {.k = KvFormat::tq3, .v = KvFormat::tq8, .tail = 12},
      {.k = KvFormat::tq8, .v = KvFormat::tq2, .tail = 9, .sink_tokens = 3},
  };
  for (const KvLayer& layer : layers) {
    for (const bool mean : {false, true}) {
      SCOPED_TRACE(std::string(name(layer.k)) + (mean ? " mean" : ""));
      const Side k = side(kDim, mean), v = side(kValueDim, mean);
      KvCache cache(device, options(layer, k, v));
      Encoder encoder(device);
      const Values keys = normal(kTokens * kKvHeads * kDim), q = normal(kHeads * kDim);
      const Values values = normal(kTokens * kKvHeads * kValueDim);
      const Tensor all_k = tensor(keys, {kTokens, kKvHeads, kDim});
      const Tensor all_v = tensor(values, {kTokens, kKvHeads, kValueDim});
      for (uint64_t done = 0; done < kTokens;) {
        const uint64_t count = done < 60 ? 30 : 1;
        cache.begin_step(encoder, count);
        cache.append(encoder, 0, all_k.slice(0, done, count), all_v.slice(0, done, count));
        done += count;
      }
      const Tensor out = device.tensor(DType::f32, {1, kHeads, kValueDim});
      cache.attend(encoder, 0, {.q = tensor(q, {1, kHeads, kDim}), .out = out});
      encoder.submit().wait();
      EXPECT_LT(nmse(floats_of(out), expected({layer, k, v, keys, values, q})), 1e-5);
      EXPECT_NE(cache.describe()[0].calibration, 0u);
    }
  }
}

TEST_F(KvCalibrated, PoolAndCacheAgree) {
  const KvLayer layer{.k = KvFormat::tq4, .v = KvFormat::tq3, .tail = 12, .sink_tokens = 3};
  const Side k = side(kDim, true), v = side(kValueDim, true);
  const KvCacheOptions wanted = options(layer, k, v);
  KvCache cache(device, wanted);
  KvPool pool = pool_of(wanted, 32);
  EXPECT_NE(pool.describe().calibration, 0u);
  KvBatch batch(pool, {.max_sequences = 2, .max_tokens = 64});
  KvSequence sequence = pool.sequence();
  Encoder encoder(device);
  for (const uint64_t count : {30u, 1u, 7u, 1u}) {
    const Tensor new_k = rows(count, kKvHeads, kDim);
    const Tensor new_v = rows(count, kKvHeads, kValueDim);
    const Tensor q = rows(count, kHeads, kDim);
    const Tensor a = device.tensor(DType::f32, {count, kHeads, kValueDim});
    const Tensor b = device.tensor(DType::f32, {count, kHeads, kValueDim});
    cache.begin_step(encoder, count);
    cache.append(encoder, 0, new_k, new_v);
    cache.attend(encoder, 0, {.q = q, .out = a});
    batch.begin_step(encoder, {{sequence, count}});
    batch.append(encoder, 0, new_k, new_v);
    batch.attend(encoder, 0, {.q = q, .out = b});
    encoder.submit().wait();
    // A tail's states are merged in another order, and pages may have another kernel.
    EXPECT_LT(nmse(floats_of(b), floats_of(a)), 3e-5);
  }
}

TEST_F(KvCalibrated, RopeAppendIsRopeThenAppend) {
  const KvLayer layer{.k = KvFormat::tq4, .v = KvFormat::tq4, .tail = 4};
  const Side k = side(kDim, false), v = side(kValueDim, false);
  KvCache fused(device, options(layer, k, v)), apart(device, options(layer, k, v));
  Encoder encoder(device);
  const uint64_t count = 20;
  const Tensor new_k = rows(count, kKvHeads, kDim);
  const Tensor new_v = rows(count, kKvHeads, kValueDim);
  const Tensor q = rows(count, kHeads, kDim);
  const Tensor rotated_q = device.tensor(DType::f32, q.shape());
  const Tensor rotated_k = device.tensor(DType::f32, new_k.shape());
  const RopeOptions rope_options{};
  fused.begin_step(encoder, count);
  fused.rope_append(encoder, 0, {.q = q, .q_out = rotated_q, .k = new_k, .v = new_v},
                    {.rope = rope_options});
  apart.begin_step(encoder, count);
  rope(encoder, {.x = new_k, .positions = apart.positions(count), .out = rotated_k}, rope_options);
  apart.append(encoder, 0, rotated_k, new_v);
  const Tensor a = device.tensor(DType::f32, {count, kHeads, kValueDim});
  const Tensor b = device.tensor(DType::f32, {count, kHeads, kValueDim});
  fused.attend(encoder, 0, {.q = rotated_q, .out = a});
  apart.attend(encoder, 0, {.q = rotated_q, .out = b});
  encoder.submit().wait();
  EXPECT_EQ(floats_of(a), floats_of(b));
}

TEST_F(KvCalibrated, FilesNameTheirCalibration) {
  const KvLayer layer{.k = KvFormat::tq4, .v = KvFormat::tq4};
  const Side k = side(kDim, true), v = side(kValueDim, true), other = side(kDim, true);
  KvCache cache(device, options(layer, k, v));
  Encoder encoder(device);
  cache.begin_step(encoder, 5);
  cache.append(encoder, 0, rows(5, kKvHeads, kDim), rows(5, kKvHeads, kValueDim));
  encoder.submit().wait();
  const Folder folder;
  cache.save(folder / "a");
  EXPECT_NE(inspect_snapshot(folder / "a").calibration, 0u);
  KvCache same(device, options(layer, k, v));
  same.load(folder / "a");
  EXPECT_EQ(same.length(), 5u);
  KvCache another(device, options(layer, other, v));
  EXPECT_TRUE(test::refused({"kv_cache.load", "calibration"}, [&] { another.load(folder / "a"); }));
  KvCache none(device, small(layer, 100));
  EXPECT_TRUE(
      test::refused({"kv_cache.load", "calibration", "0: none"}, [&] { none.load(folder / "a"); }));
  const KvCache copy = cache.fork(encoder);
  EXPECT_EQ(copy.describe()[0].calibration, cache.describe()[0].calibration);
}

TEST_F(KvCalibrated, PagesNameTheirCalibration) {
  const KvLayer layer{.k = KvFormat::tq4, .v = KvFormat::tq4};
  const Side k = side(kDim, false), v = side(kValueDim, false), other = side(kDim, false);
  KvPool pool = pool_of(options(layer, k, v), 8), same = pool_of(options(layer, k, v), 8),
         another = pool_of(options(layer, other, v), 8);
  KvBatch batch(pool, {.max_sequences = 1, .max_tokens = 8});
  KvSequence sequence = pool.sequence();
  Encoder encoder(device);
  batch.begin_step(encoder, {{sequence, 8}});
  batch.append(encoder, 0, rows(8, kKvHeads, kDim), rows(8, kKvHeads, kValueDim));
  encoder.submit().wait();
  const std::vector<std::byte> page = pool.export_page(sequence, 0);
  KvSequence there = same.sequence(), elsewhere = another.sequence();
  same.import_page(there, page);
  EXPECT_EQ(there.length(), 8u);
  EXPECT_THROW(another.import_page(elsewhere, page), Error);
}

TEST_F(KvCalibrated, RefusesWhatDoesNotFit) {
  const Side k = side(kDim, true), v = side(kValueDim, true);
  const auto refused = [&](const std::vector<std::string>& message, const KvLayer& layer,
                           const auto& change) {
    KvCacheOptions wanted = options(layer, k, v);
    change(wanted);
    EXPECT_TRUE(test::refused(message, [&] { KvCache(device, wanted); }));
  };
  const KvLayer tq4{.k = KvFormat::tq4, .v = KvFormat::tq4};
  refused({"kv_cache", "every layer or for none", "got 2 for 1"}, tq4,
          [](KvCacheOptions& o) { o.calibration.push_back({}); });
  refused({"layer 0", "f16 and tq4", "native formats of both"},
          {.k = KvFormat::f16, .v = KvFormat::tq4}, [](KvCacheOptions&) {});
  refused({"layer 0", "transform of k alone"}, tq4,
          [](KvCacheOptions& o) { o.calibration[0].v.transform = {}; });
  refused({"transform matrix of k"}, tq4, [](KvCacheOptions& o) {
    o.calibration[0].k.transform.matrix = o.calibration[0].v.transform.matrix;
  });
}

// What would be read is not what was written.
TEST_F(KvCalibrated, RefusesAnInverseThatIsNone) {
  const KvLayer tq4{.k = KvFormat::tq4, .v = KvFormat::tq4};
  const auto refused = [&](const std::vector<std::string>& message, const Side& k, const Side& v) {
    const KvCacheOptions wanted = options(tq4, k, v);
    EXPECT_TRUE(test::refused(message, [&] { KvCache(device, wanted); }));
    EXPECT_TRUE(test::refused({"kv_pool", message.back()}, [&] { pool_of(wanted, 8); }));
  };
  const auto changed = [&](const Side& of, uint64_t n, uint64_t at, float by) {
    Side made = of;
    made.inverse[at] += by;
    made.calibration.transform.inverse = tensor(made.inverse, {kKvHeads, n, n});
    return made;
  };
  const Side k = side(kDim, true), v = side(kValueDim, true);
  refused({"kv_cache", "layer 0", "inverse times matrix of k, head 0"}, changed(k, kDim, 1, 0.1f),
          v);
  refused({"kv_cache", "layer 0", "inverse times matrix of v, head 1"}, k,
          changed(v, kValueDim, kValueDim * kValueDim + 5, -0.1f));
  refused({"inverse times matrix of k, head 1"},
          changed(k, kDim, 2 * kDim * kDim - 1, std::numeric_limits<float>::quiet_NaN()), v);
  // A rotation: right for values, whose rows come back, wrong for scores if it is no reflection.
  Side turned = k;
  for (uint64_t g = 0; g < kKvHeads; ++g) {
    for (uint64_t i = 0; i < kDim * kDim; ++i) {
      const uint64_t row = i / kDim, column = i % kDim;
      turned.matrix[g * kDim * kDim + i] = column == (row + 1) % kDim ? 1.0f : 0.0f;
      turned.inverse[g * kDim * kDim + i] = row == (column + 1) % kDim ? 1.0f : 0.0f;
    }
  }
  turned.calibration.transform = {tensor(turned.matrix, {kKvHeads, kDim, kDim}),
                                  tensor(turned.inverse, {kKvHeads, kDim, kDim}),
                                  {}};
  refused({"inverse times matrix of k, head 0"}, turned, v);
}

TEST_F(KvCalibrated, RefusesWhatAMeanWouldMakeWrong) {
  const Side k = side(kDim, true), v = side(kValueDim, true);
  const KvCache cache(device, options({.k = KvFormat::tq4, .v = KvFormat::tq4}, k, v));
  Encoder encoder(device);
  const AttendInputs good{.q = device.tensor(DType::f32, {1, kHeads, kDim}),
                          .out = device.tensor(DType::f32, {1, kHeads, kValueDim})};
  const auto refused = [&](const char* what, AttendInputs in, const AttendOptions& with) {
    EXPECT_TRUE(test::refused({"kv_cache.attend", "mean", what},
                              [&] { cache.attend(encoder, 0, in, with); }));
  };
  AttendInputs with_lse = good;
  with_lse.lse = device.tensor(DType::f32, {1, kHeads});
  const Tensor sink_logits = device.tensor(DType::f32, {kHeads}),
               tree_mask = device.tensor(DType::u8, {1, 1});
  refused("lse", with_lse, {});
  refused("sink_logits", good, {.mask = {.sink_logits = sink_logits}});
  refused("soft_cap", good, {.mask = {.soft_cap = 30.0f}});
  refused("tree_mask", good, {.mask = {.tree_mask = tree_mask}});
}

}  // namespace
}  // namespace gyre::test
