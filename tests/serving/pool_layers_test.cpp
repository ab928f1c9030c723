// Pools whose layers have different heads and dims, and layers that share another's pages. What
// holds for every pool is tested with layered_pool() in the other files.
#include "cache/given_rows.h"
#include "runtime/internals.h"
#include "serving/pool_state.h"
#include "serving/serving_fixture.h"
#include "test_device.h"

namespace gyre::test {
namespace {

class PoolLayers : public testing::Test {
 public:
  // A prompt's tokens and one more of a second sequence, against double precision.
  struct Checked {
    KvSequence sequence;
    GivenRows given;
  };
  Checked checked(uint32_t seed) const { return {pool.sequence(), GivenRows(pool.layers(), seed)}; }

  // Rows of both, one after the other; a layer that shares attends behind its owner's append.
  void step(Checked& a, uint64_t a_tokens, Checked& b, uint64_t b_tokens) {
    batch.begin_step(encoder, {{a.sequence, a_tokens}, {b.sequence, b_tokens}});
    std::vector<Tensor> q, out;
    const auto joined = [&](const Tensor& first, const Tensor& second) {
      Tensor made =
          device.tensor(DType::f32, {a_tokens + b_tokens, first.shape(1), first.shape(2)});
      copy_floats(first, made.slice(0, 0, a_tokens));
      copy_floats(second, made.slice(0, a_tokens, b_tokens));
      return made;
    };
    for (uint64_t i = 0; i < pool.layers().size(); ++i) {
      const KvLayer& layer = pool.layers()[i];
      if (!layer.kv_shared_layer_index) {
        const Tensor k = joined(a.given.k(device, i, a_tokens), b.given.k(device, i, b_tokens));
        batch.append(encoder, i, k,
                     joined(a.given.v(device, i, a_tokens), b.given.v(device, i, b_tokens)));
      }
      const uint64_t heads = layer.kv_heads * (layer.kv_shared_layer_index ? 3 : 2);
      q.push_back(a.given.fresh(device, {a_tokens + b_tokens, heads, layer.head_dim}));
      out.push_back(device.tensor(DType::f32, {a_tokens + b_tokens, heads, layer.v_head_dim}));
      batch.attend(encoder, i, {.q = q[i], .out = out[i]});
    }
    encoder.submit().wait();
    batch.end_step();
    for (uint64_t i = 0; i < pool.layers().size(); ++i) {
      const double bound = bound_of(pool.layers()[i]);
      const auto rows = [&](const Tensor& of, bool second) {
        return second ? of.slice(0, a_tokens, b_tokens) : of.slice(0, 0, a_tokens);
      };
      EXPECT_LE(a.given.error(i, rows(q[i], false), rows(out[i], false)), bound) << "layer " << i;
      EXPECT_LE(b.given.error(i, rows(q[i], true), rows(out[i], true)), bound) << "layer " << i;
    }
  }

  Device device = test_device();
  Encoder encoder{device};
  KvPool pool{device,
              {.kv_heads = 2,
               .head_dim = 64,
               .v_head_dim = 40,
               .layers = layers_that_differ(),
               .pages = 40,
               .page_tokens = 8,
               .sequences = 4,
               .step_tokens = 32}};
  KvBatch batch{pool, {.max_sequences = 4, .max_tokens = 32}};
};

TEST_F(PoolLayers, StepsForkAndRollback) {
  Checked a = checked(1), b = checked(2);
  step(a, 21, b, 3);
  step(a, 1, b, 20);
  step(a, 13, b, 1);
  Checked fork{a.sequence.fork(), a.given};
  step(a, 5, fork, 2);  // from here on they differ, inside a shared page
  a.sequence.rollback(5);
  a.given.rollback(5);
  step(fork, 1, a, 9);
}

TEST_F(PoolLayers, DescribeCountsEachPageOnce) {
  const KvPoolInfo info = pool.describe();
  uint64_t bytes = 0;
  for (const KvGroupInfo& group : info.groups) {
    uint64_t page_bytes = 0;
    for (const uint64_t i : group.layers) {
      const KvLayer& l = pool.layers()[i];
      EXPECT_FALSE(l.kv_shared_layer_index) << i;
      const bool near = group.name.starts_with("tail") || group.name.starts_with("sink");
      page_bytes += kv_page_bytes({.k = near ? KvFormat::f16 : l.k,
                                   .v = near ? KvFormat::f16 : l.v,
                                   .kv_heads = l.kv_heads,
                                   .head_dim = l.head_dim,
                                   .v_head_dim = l.v_head_dim,
                                   .page_tokens = 8});
    }
    EXPECT_EQ(group.page_bytes, page_bytes) << group.name;
    bytes += page_bytes * group.pages;
  }
  // "all keys" has layers of three shapes, and nothing is padded to the largest.
  EXPECT_EQ(info.groups[0].layers, (std::vector<uint64_t>{0, 1, 5}));
  EXPECT_EQ(info.bytes, bytes);
  EXPECT_EQ(pool.options().layers, layers_that_differ());
}

TEST_F(PoolLayers, AnAppendToASharedLayerIsRefused) {
  KvSequence sequence = pool.sequence();
  const KvLayer& l = pool.layers()[6];
  const Tensor rows = device.tensor(DType::f32, {1, l.kv_heads, l.head_dim});
  batch.begin_step(encoder, {{sequence, 1}});
  const size_t recorded = encoder.size();
  EXPECT_REFUSED(("kv_batch.append", "layer 6 has no K and V of its own", "of layer 1"),
                 batch.append(encoder, 6, rows, rows));
  EXPECT_REFUSED(("kv_batch.rope_append", "layer 6 has no K and V"),
                 batch.rope_append(encoder, 6, {.q = rows, .q_out = rows, .k = rows, .v = rows}));
  EXPECT_REFUSED(
      ("kv_batch.attend", "layer 1 was not appended"),
      batch.attend(encoder, 6, {.q = rows, .out = device.tensor(DType::f32, rows.shape())}));
  EXPECT_REFUSED(
      ("kv_batch.attend", "10 layers, got layer 10"),
      batch.attend(encoder, 10, {.q = rows, .out = device.tensor(DType::f32, rows.shape())}));
  EXPECT_EQ(encoder.size(), recorded);
  EXPECT_REFUSED(("lacks append() of layers 0 to 2, 4 to 5"), batch.end_step());
  batch.rollback();
  encoder.clear();
}

TEST_F(PoolLayers, LayersThatNoPoolCanHave) {
  const auto fails = [&](const std::vector<std::string>& parts, const auto& change) {
    KvPoolOptions options = layered_pool();
    change(options);
    EXPECT_TRUE(refused(parts, [&] { const KvPool made(device, options); }));
  };
  using O = KvPoolOptions;
  fails({"kv_pool: layer 1: head_dim", "got 12"}, [](O& o) { o.layers[1].head_dim = 12; });
  fails({"kv_pool: layer 0: kv_heads must be given"}, [](O& o) { o.kv_heads = 0; });
  fails({"kv_pool: layer 2 shares the cache of layer 0, whose kv_heads is 2, got 1"},
        [](O& o) { o.layers[2].kv_heads = 1; });
  fails({"kv_pool: layer 3 can share", "got layer 4"},
        [](O& o) { o.layers[3].kv_shared_layer_index = 4; });
  fails({"kv_pool: layer 4: head_dim must be at most 1024"},
        [](O& o) { o.layers[4].head_dim = 2048; });
}

// Files of one pool do not load into another. old_files_test has pools whose layers are alike.
TEST_F(PoolLayers, TheGeometryThatFilesName) {
  std::vector<uint64_t> seen;
  const auto add = [&](const auto& change) {
    KvPoolOptions options = layered_pool();
    change(options);
    const uint64_t geometry = Internals::state(KvPool(device, options)).geometry;
    EXPECT_EQ(std::ranges::count(seen, geometry), 0);
    seen.push_back(geometry);
  };
  using O = KvPoolOptions;
  add([](O&) {});
  add([](O& o) { o.layers[1].kv_heads = 2; });
  add([](O& o) { o.layers[1].head_dim = 80; });
  add([](O& o) { o.layers[1].v_head_dim = 24; });
  add([](O& o) { o.layers[2] = o.layers[0]; });
  add([](O& o) { o.layers[3].kv_shared_layer_index = 0; });
}

}  // namespace
}  // namespace gyre::test
