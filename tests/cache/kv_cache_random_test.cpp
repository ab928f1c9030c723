// Random lives of a cache against a plain vector of tokens in double precision.
#include <unistd.h>

#include <cstdio>

#include "cache/kv_cache_model.h"
#include "format_classes.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

constexpr uint64_t kCapacity = 300;

struct Life {
  std::vector<KvLayer> layers;
  const char* what;
  uint64_t head_dim = kDim, v_head_dim = kValueDim;

  KvCacheOptions options() const {
    KvCacheOptions made = small({}, kCapacity);
    made.layers = layers;
    made.head_dim = head_dim;
    made.v_head_dim = v_head_dim;
    return made;
  }
  bool rings() const {
    return std::ranges::any_of(layers, [](const KvLayer& layer) { return layer.window != 0; });
  }
};

// A model that is asked, cut, copied and continued at random; copies live on beside it.
class Lives {
 public:
  Lives(const Life& life, uint32_t seed) : life_(life), random_(seed) {
    models_.push_back(std::make_unique<CacheModel>(life.options(), seed));
  }

  void step() {
    CacheModel& model = *models_[random_() % models_.size()];
    const uint64_t length = model.cache.length(), room = kCapacity - length;
    switch (random_() % 13) {
      case 0:
      case 1:
      case 2:
        if (room != 0) model.append(1 + random_() % std::min<uint64_t>(room, 3));
        break;
      case 3:
        if (room != 0) model.append(1 + random_() % std::min<uint64_t>(room, 100));
        break;
      case 4:
        // As far back as speculation goes; a ring must still hold what the next query sees.
        model.rollback(random_() % (std::min<uint64_t>(length, 8) + 1));
        break;
      case 5:
        if (!life_.rings()) model.rollback(random_() % (length + 1));
        if (random_() % 8 == 0) model.clear();
        break;
      case 6:
        fork(model);
        break;
      case 7:
        save_and_load(model);
        break;
      case 8:
      case 9:
        begin_and_take_back(model);
        break;
      default:
        ask(model);
    }
  }

 private:
  // Rings end where the longest step did: in theirs there is less to take back.
  void begin_and_take_back(CacheModel& model) {
    const uint64_t length = model.cache.length(), room = kCapacity - length;
    if (room == 0) return;
    const uint64_t limit = std::min<uint64_t>(room, life_.rings() ? 16 : 64);
    const uint64_t more = random_() % 2 == 0 ? random_() % (std::min<uint64_t>(length, 4) + 1) : 0;
    model.begin_and_take_back(1 + random_() % limit, random_() % 2 == 0, more);
  }

  void fork(CacheModel& model) {
    auto made = std::make_unique<CacheModel>(life_.options(), random_());
    made->cache = model.cache.fork(model.encoder);
    model.encoder.submit().wait();
    made->device = model.device;
    made->encoder = Encoder(model.device);
    made->k = model.k;
    made->v = model.v;
    made->step = model.step;
    if (models_.size() == 3) models_.erase(models_.begin());
    models_.push_back(std::move(made));
  }

  // Into another of the models, or into itself.
  void save_and_load(CacheModel& model) {
    const Folder folder;
    model.cache.save(folder / "a");
    CacheModel& other = *models_[random_() % models_.size()];
    other.cache.load(folder / "a");
    other.step = 0;
    if (&other == &model) return;
    other.k = model.k;
    other.v = model.v;
  }

  void ask(CacheModel& model) {
    const uint64_t length = model.cache.length();
    Question ask;
    ask.tokens = 1 + random_() % 4;
    // A ring that was cut back answers for its next tokens only.
    if (life_.rings() || ask.tokens > length) {
      if (length == kCapacity) return;
      ask.tokens = std::min(ask.tokens, kCapacity - length);
      model.append(ask.tokens);
    }
    const uint64_t index = random_() % life_.layers.size();
    const KvLayer& layer = life_.layers[index];
    if (random_() % 3 == 0) ask.window = 1 + random_() % (layer.window != 0 ? layer.window : 80);
    if (random_() % 4 == 0) ask.soft_cap = 15;
    ask.sink_logits = random_() % 4 == 0;
    ask.alibi_slopes = random_() % 4 == 0;
    ask.tree_mask = random_() % 4 == 0;
    ask.causal = random_() % 4 != 0;
    EXPECT_TRUE(model.holds(index, ask))
        << life_.what << " layer " << index << " length " << model.cache.length() << " tokens "
        << ask.tokens << " window " << ask.window << " tree_mask " << ask.tree_mask << " causal "
        << ask.causal;
  }

  Life life_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<CacheModel>> models_;
};

void PrintTo(const Life& life, std::ostream* out) { *out << life.what; }

class KvCacheRandom : public testing::TestWithParam<Life> {};

TEST_P(KvCacheRandom, LivesLikeAVector) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    Lives lives(GetParam(), seed);
    for (int i = 0; i < 200 && !HasFailure(); ++i) lives.step();
  }
}

std::vector<Life> lives() {
  std::vector<Life> all;
  for (const KvFormat format : kv_formats()) {
    const bool small_rows = stores(format, kValueDim);
    const uint64_t dim = small_rows ? kDim : 256, v_dim = small_rows ? kValueDim : 256;
    const auto add = [&](KvLayer layer, const char* what, uint64_t v) {
      layer.k = layer.v = format;
      all.push_back({{layer}, what, dim, v});
    };
    add({}, "linear", dim);  // one size for K and V: decode kernels take it
    add({.window = 50}, "ring", v_dim);
    if (!describe(format).compressed) continue;
    add({.tail = 24, .sink_tokens = 5}, "tail", dim);
    add({.window = 37, .tail = 9}, "ring with a tail", v_dim);
  }
  using F = KvFormat;
  for (const F format : {F::tq4, F::tq8})
    all.push_back({{{.k = format, .v = format, .window = 37, .tail = 9}}, "rows of 128", 128, 128});
  all.push_back(
      {{{.k = F::tq6, .v = F::tq3, .tail = 24, .sink_tokens = 5}}, "rows of 128", 128, 128});
  all.push_back({{{.k = F::tq8, .v = F::f16, .tail = 70, .sink_tokens = 1}}, "mixed"});
  all.push_back({{{.k = F::f32, .v = F::tq3, .window = 64}}, "mixed ring"});
  all.push_back({{{.k = F::tq8, .v = F::tq8, .tail = 24, .sink_tokens = 5},
                  {.k = F::f32, .v = F::f32},
                  {.k = F::tq6, .v = F::tq4, .tail = 24}},
                 "layers"});
  all.push_back({{{.k = F::tq8, .v = F::tq5, .window = 37, .tail = 9},
                  {.k = F::f16, .v = F::f16, .window = 50},
                  {.k = F::tq8, .v = F::tq8, .tail = 9, .sink_tokens = 3},
                  {.k = F::bf16, .v = F::bf16}},
                 "layers and rings"});
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, KvCacheRandom, testing::ValuesIn(lives()), [](const auto& test) {
  std::string text = std::string(name(test.param.layers[0].k)) + "_" +
                     std::string(name(test.param.layers[0].v)) + "_" + test.param.what;
  for (char& c : text) c = c == ' ' ? '_' : c;
  return text;
});

}  // namespace
}  // namespace gyre::test
