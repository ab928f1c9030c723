// What `gyre compare` says about a model must be what KvCache does with it.
#include "compare.h"

#include "expect_error.h"
#include "gyre/kv_cache.h"

namespace gyre::test {
namespace {

using bench::CompareEntry;
using bench::CompareOptions;
using bench::CompareReport;

CompareOptions small() {
  CompareOptions options;
  options.shape = {"small", 6, 4, 2, 64};
  options.threads = 1;
  options.contexts = {200, 1000};
  options.seconds = 0.001;
  return options;
}

// The bytes of a cache: the sum over its layers.
uint64_t layer_bytes(uint64_t capacity, const std::vector<KvLayer>& layers) {
  const KvCacheOptions options{
      .kv_heads = 2, .head_dim = 64, .capacity = capacity, .layers = layers};
  uint64_t bytes = 0;
  for (const KvLayerInfo& layer : KvCache(Device::open("cpu"), options).describe())
    bytes += layer.bytes;
  return bytes;
}

TEST(Compare, SaysWhatAModelTakes) {
  const CompareReport report = bench::compare(small(), {});
  ASSERT_EQ(report.entries.size(), 12u);
  const std::vector<std::string> labels = {"f16", "tq8", "tq6", "tq4", "tq3", "tq8/tq4"};
  for (size_t i = 0; i < report.entries.size(); ++i) {
    const CompareEntry& e = report.entries[i];
    EXPECT_EQ(e.formats.label(), labels[i % 6]);
    EXPECT_EQ(e.context, i < 6 ? 200u : 1000u);
    const uint64_t bytes =
        layer_bytes(e.context, std::vector<KvLayer>(6, {.k = e.formats.k, .v = e.formats.v}));
    EXPECT_EQ(e.cache_bytes, bytes) << labels[i % 6];
    EXPECT_DOUBLE_EQ(e.bytes_per_token * static_cast<double>(e.context),
                     static_cast<double>(bytes));  // 8 divides both contexts
    EXPECT_GT(e.step_us, 0);
    EXPECT_DOUBLE_EQ(e.model_us, 6 * e.step_us);
    EXPECT_EQ(e.window_us, 0);
    EXPECT_DOUBLE_EQ(e.tokens_per_second * e.model_us, 1e6);
    EXPECT_NEAR(e.read_gbps * e.step_us * 1e3, static_cast<double>(bytes) / 6, 1e-3);
    EXPECT_GT(e.fraction, 0);
    EXPECT_DOUBLE_EQ(e.speedup * e.step_us, report.entries[i / 6 * 6].step_us);
  }
  EXPECT_DOUBLE_EQ(report.entries[0].bits, 16);
  EXPECT_DOUBLE_EQ(report.entries[0].bytes_per_token, 6 * 2 * 2 * 64 * 2);
  EXPECT_GT(report.entries[1].bits, 8);
  EXPECT_LT(report.entries[1].bits, 9);
}

TEST(Compare, ErrorsAreThoseOfTheFormats) {
  const CompareReport report = bench::compare(small(), {});
  const double bound[] = {1e-6, 4e-4, 4e-3, 5e-2, 2e-1, 3e-2};
  for (size_t i = 0; i < report.entries.size(); ++i) {
    EXPECT_LE(report.entries[i].nmse, bound[i % 6]) << i;
    EXPECT_GT(report.entries[i].nmse, bound[i % 6] / 100) << i;
  }
}

TEST(Compare, WindowLayersKeepTheirRings) {
  CompareOptions options = small();
  options.shape.window = 50;
  options.shape.full_every = 3;
  options.formats = {{KvFormat::tq4, KvFormat::tq4}};
  const std::vector<KvLayer> layers = kv_layers(
      6, {.layer = {.k = KvFormat::tq4, .v = KvFormat::tq4}, .window = 50, .full_every = 3});
  for (const CompareEntry& e : bench::compare(options, {}).entries) {
    EXPECT_EQ(e.cache_bytes, layer_bytes(e.context, layers));
    EXPECT_DOUBLE_EQ(e.bytes_per_token, 2 * 2 * 2 * 64 * e.bits / 8);  // two full layers grow
    EXPECT_GT(e.window_us, 0);
    EXPECT_DOUBLE_EQ(e.model_us, 2 * e.step_us + 4 * e.window_us);
    EXPECT_DOUBLE_EQ(e.tokens_per_second * e.model_us, 1e6);
  }
}

// A tail takes memory and takes away error; formats of 16 bits have none.
TEST(Compare, TailStaysInSixteenBits) {
  CompareOptions options = small();
  options.contexts = {200};
  options.formats = {{KvFormat::f16, KvFormat::f16},
                     {KvFormat::tq4, KvFormat::tq4},
                     {KvFormat::f16, KvFormat::tq4}};
  const std::vector<CompareEntry> without = bench::compare(options, {}).entries;
  options.tail = 200;
  const CompareReport report = bench::compare(options, {});
  EXPECT_EQ(report.tail, 200u);
  ASSERT_EQ(report.entries.size(), 3u);
  EXPECT_EQ(report.entries[0].cache_bytes, without[0].cache_bytes);
  for (size_t i = 0; i < 3; ++i) {
    const CompareEntry& e = report.entries[i];
    const auto layers = kv_layers(6, {.layer = {.k = e.formats.k, .v = e.formats.v, .tail = 200}});
    EXPECT_EQ(e.cache_bytes, layer_bytes(200, layers)) << e.formats.label();
    EXPECT_EQ(e.bytes_per_token, without[i].bytes_per_token);
    EXPECT_LT(e.nmse, 1e-6) << e.formats.label();  // every key is in the tail
    EXPECT_NEAR(e.read_gbps * e.step_us * 1e3, 200 * 2 * 2 * 2 * 64, 1e-3);
  }
  EXPECT_GT(without[1].nmse, 1e-3);
  options.tail = 20;
  const double some = bench::compare(options, {}).entries[1].nmse;
  EXPECT_LT(some, without[1].nmse);
  EXPECT_GT(some, without[1].nmse / 4);
}

TEST(Compare, ProgressEndsAtOne) {
  CompareOptions options = small();
  options.contexts = {1};
  options.shape.window = 50;  // one thing more to do
  options.shape.full_every = 3;
  double last = 0;
  const CompareReport report = bench::compare(options, [&](const std::string& what, double done) {
    EXPECT_FALSE(what.empty());
    EXPECT_GE(done, last);
    last = done;
  });
  EXPECT_DOUBLE_EQ(last, 1);
  EXPECT_EQ(report.entries.size(), 6u);
}

TEST(Compare, PresetsAreModels) {
  EXPECT_GE(bench::model_shapes().size(), 10u);
  for (const bench::ModelShape& shape : bench::model_shapes()) {
    bench::check(shape);
    EXPECT_GE(bench::full_layers(shape), 1u);
    EXPECT_EQ(&bench::model_shape(shape.name), &shape);
  }
  EXPECT_EQ(bench::full_layers(bench::model_shape("gemma-3-4b")), 5u);
  EXPECT_EQ(bench::full_layers(bench::model_shape("gpt-oss-20b")), 12u);
}

TEST(Compare, RefusesBeforeMeasuring) {
  const auto with = [](const std::function<void(CompareOptions&)>& change) {
    return [change] {
      CompareOptions options = small();
      change(options);
      bench::compare(
          options, [](const std::string& what, double) { ADD_FAILURE() << "began with " << what; });
    };
  };
  EXPECT_REFUSED(("no preset \"gpt-9\"", "llama-3.1-8b", "qwen3-8b"), bench::model_shape("gpt-9"));
  EXPECT_TRUE(refused({"multiple", "5", "2"}, with([](auto& o) { o.shape.heads = 5; })));
  EXPECT_TRUE(refused({"kv_heads", "got 0"}, with([](auto& o) { o.shape.kv_heads = 0; })));
  EXPECT_TRUE(refused({"layers", "5000"}, with([](auto& o) { o.shape.layers = 5000; })));
  EXPECT_TRUE(refused({"head_dim", "got 7"}, with([](auto& o) { o.shape.head_dim = 7; })));
  EXPECT_TRUE(refused({"context", "got 0"}, with([](auto& o) { o.contexts = {5, 0}; })));
  EXPECT_TRUE(refused({"one context"}, with([](auto& o) { o.contexts = {}; })));
  EXPECT_TRUE(refused({"tail", "200", "got 201"}, with([](auto& o) { o.tail = 201; })));
  EXPECT_TRUE(refused({"tail of 5", "no format is compressed"}, with([](auto& o) {
                        o.tail = 5;
                        o.formats = {{KvFormat::f16, KvFormat::bf16}};
                      })));
  EXPECT_TRUE(refused({"f16 is given twice"}, with([](auto& o) { o.formats = {{}, {}}; })));
  EXPECT_TRUE(
      refused({"cuda:0 does not use --threads"}, with([](auto& o) { o.device = "cuda:0"; })));
  EXPECT_TRUE(refused({"seconds"}, with([](auto& o) { o.seconds = 0; })));
}

}  // namespace
}  // namespace gyre::test
