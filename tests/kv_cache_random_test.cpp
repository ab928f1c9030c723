// Random lives of a cache against a plain vector of tokens in double precision.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>

#include "kv_cache_model.h"

namespace gyre::test {
namespace {

struct Life {
  KvLayer layer;
  const char* what;
};

// A model that is asked, cut, copied and continued at random; copies live on beside it.
class Lives {
 public:
  Lives(const Life& life, uint32_t seed) : life_(life), random_(seed) {
    models_.push_back(std::make_unique<CacheModel>(small(life.layer), seed));
  }

  void step() {
    CacheModel& model = *models_[random_() % models_.size()];
    const uint64_t length = model.cache.length(), room = 300 - length;
    switch (random_() % 11) {
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
        model.truncate(random_() % (std::min<uint64_t>(length, 8) + 1));
        break;
      case 5:
        if (life_.layer.window == 0) model.truncate(random_() % (length + 1));
        if (random_() % 8 == 0) model.clear();
        break;
      case 6:
        fork(model);
        break;
      case 7:
        save_and_load(model);
        break;
      default:
        ask(model);
    }
  }

 private:
  void fork(CacheModel& model) {
    auto made = std::make_unique<CacheModel>(small(life_.layer), random_());
    made->cache = model.cache.fork(model.encoder);
    model.encoder.submit().wait();
    made->device = model.device;
    made->encoder = Encoder(model.device);
    made->k = model.k;
    made->v = model.v;
    if (models_.size() == 3) models_.erase(models_.begin());
    models_.push_back(std::move(made));
  }

  // Into another of the models, or into itself.
  void save_and_load(CacheModel& model) {
    const std::string path = testing::TempDir() + "gyre_life_" + std::to_string(getpid());
    model.cache.save(path);
    CacheModel& other = *models_[random_() % models_.size()];
    other.cache.load(path);
    std::remove(path.c_str());
    if (&other == &model) return;
    other.k = model.k;
    other.v = model.v;
  }

  void ask(CacheModel& model) {
    const uint64_t length = model.cache.length();
    Question ask;
    ask.tokens = 1 + random_() % 4;
    // A ring that was cut back answers for its next tokens only.
    if (life_.layer.window != 0 || ask.tokens > length) {
      if (length == 300) return;
      ask.tokens = std::min(ask.tokens, 300 - length);
      model.append(ask.tokens);
    }
    if (random_() % 3 == 0)
      ask.window = 1 + random_() % (life_.layer.window != 0 ? life_.layer.window : 80);
    if (random_() % 4 == 0) ask.soft_cap = 15;
    ask.sinks = random_() % 4 == 0;
    ask.slopes = random_() % 4 == 0;
    ask.tree = random_() % 4 == 0;
    const double most = std::max(bound(life_.layer.k), bound(life_.layer.v));
    EXPECT_LE(model.error(0, ask), 4 * most)
        << life_.what << " length " << model.cache.length() << " tokens " << ask.tokens
        << " window " << ask.window << " tree " << ask.tree;
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
    if (name(format).starts_with("compat")) continue;  // their head dims are not this model's
    all.push_back({{.k = format, .v = format}, "linear"});
    all.push_back({{.k = format, .v = format, .window = 50}, "ring"});
    if (!describe(format).compressed) continue;
    all.push_back({{.k = format, .v = format, .tail = 24, .sinks = 5}, "tail"});
    all.push_back({{.k = format, .v = format, .window = 37, .tail = 9}, "ring with a tail"});
  }
  all.push_back({{.k = KvFormat::compat4, .v = KvFormat::compat4, .tail = 7}, "compat4 with tail"});
  all.push_back({{.k = KvFormat::tq8, .v = KvFormat::f16, .tail = 70, .sinks = 1}, "mixed"});
  all.push_back({{.k = KvFormat::f32, .v = KvFormat::tq3, .window = 64}, "mixed ring"});
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, KvCacheRandom, testing::ValuesIn(lives()), [](const auto& test) {
  std::string text = std::string(name(test.param.layer.k)) + "_" +
                     std::string(name(test.param.layer.v)) + "_" + test.param.what;
  for (char& c : text) c = c == ' ' ? '_' : c;
  return text;
});

}  // namespace
}  // namespace gyre::test
