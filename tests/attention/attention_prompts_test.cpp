// Prompts over levels: keys of any scale, and bits that do not follow from the chunks of a prompt.
// A GPU unpacks keys once for a long chunk, and for each row tile of a short one.
#include <cstring>

#include "attention/attention_fixture.h"
#include "attention/attention_small.h"
#include "gyre_test.h"
#include "pages/paged_fixture.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHeads = 4, kDim = 128;

// Keys and values of one KV head in a cache from `ring_start` on, and queries of every token.
struct Prompt {
  KvFormat format = KvFormat::tq4;
  uint64_t length = 300, tokens = 300;
  uint64_t capacity = 0;  // 0: length
  uint64_t ring_start = 0;
  uint64_t window = 0;
  std::function<float(uint64_t)> k_gain = [](uint64_t) { return 1.0f; };
  std::function<float(uint64_t)> v_gain = [](uint64_t) { return 1.0f; };
};

class PromptWorld {
 public:
  PromptWorld(Device device, const Prompt& p) : device_(std::move(device)), p_(p) {
    if (p_.capacity == 0) p_.capacity = p_.length;
    q_ = gaussian_rows(p_.tokens * kHeads, kDim, 3);
    k_ = KvBuffer::allocate(device_, {p_.format, KvRole::k, 1, p_.capacity, kDim});
    v_ = KvBuffer::allocate(device_, {p_.format, KvRole::v, 1, p_.capacity, kDim});
    kv_quantize(RunNow(device_),
                {.k = made(p_.k_gain, 1), .k_cache = k_, .v = made(p_.v_gain, 2), .v_cache = v_},
                {.position = p_.ring_start, .cache = CacheKind::ring});
  }

  // The rows of tokens [begin, end), of which `end` is the newest.
  std::vector<float> rows(uint64_t begin, uint64_t end, Tensor* scratch = nullptr) const {
    AttentionInputs in;
    in.scratch = scratch;
    const auto* const from = q_.data();
    in.q = tensor_of(device_,
                     std::vector<float>(from + begin * kHeads * kDim, from + end * kHeads * kDim),
                     {end - begin, kHeads, kDim});
    in.k_cache = k_, in.v_cache = v_;
    in.out = device_.tensor(DType::f32, in.q.shape());
    attention(RunNow(device_), in,
              {.length = p_.length - p_.tokens + end,
               .ring_start = p_.ring_start,
               .mask = {.window = p_.window}});
    return floats_of(in.out);
  }
  std::vector<float> rows() const { return rows(0, p_.tokens); }

 private:
  Tensor made(const std::function<float(uint64_t)>& gain, uint32_t seed) const {
    std::vector<float> rows = gaussian_rows(p_.length, kDim, seed);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] *= gain(i / kDim);
    return tensor_of(device_, rows, {p_.length, 1, kDim});
  }

  Device device_;
  Prompt p_;
  std::vector<float> q_;
  KvBuffer k_, v_;
};

void expect_close(const Prompt& p, double bound = 1e-6) {
  const std::vector<float> got = PromptWorld(test_device(), p).rows();
  const std::vector<float> wanted = PromptWorld(cpu_device(1), p).rows();
  std::vector<double> finite, wanted_finite;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::isfinite(got[i]), std::isfinite(wanted[i])) << "element " << i;
    if (std::isfinite(wanted[i])) finite.push_back(got[i]), wanted_finite.push_back(wanted[i]);
  }
  EXPECT_FALSE(finite.empty());
  EXPECT_LE(nmse(finite, wanted_finite), bound) << name(p.format);
}

constexpr KvFormat kFormats[] = {KvFormat::tq3, KvFormat::tq4, KvFormat::tq5, KvFormat::tq8};

// Scales of all keys alike: inside the range of operands, at its ends and beyond them.
TEST(AttentionPrompts, KeysAndValuesOfAnyScale) {
  for (const KvFormat format : kFormats) expect_close({.format = format, .tokens = 40});
  for (const float gain : {1e-20f, 1e-7f, 3e-5f, 1e-4f, 30.0f, 4e3f, 1e6f, 1e12f}) {
    SCOPED_TRACE(gain);
    for (const KvFormat format : {KvFormat::tq4, KvFormat::tq8}) {
      const auto alike = [gain](uint64_t) { return gain; };
      expect_close({.format = format, .tokens = 40, .v_gain = alike});
      if (gain < 1) expect_close({.format = format, .tokens = 40, .k_gain = alike});
    }
  }
}

// One key of a stage is loud, one quiet, one has no scale, one is not a number.
float mixed(uint64_t key, uint64_t nan) {
  if (key == nan) return std::numeric_limits<float>::quiet_NaN();
  switch (key % 128) {
    case 5:
      return 1e6f;
    case 40:
      return 1e-6f;
    case 41:
      return 0.0f;
    case 77:
      return 1e-30f;
    default:
      return 1.0f;
  }
}
constexpr uint64_t kNoNaN = ~uint64_t{0};

TEST(AttentionPrompts, KeysOfMixedScales) {
  for (const KvFormat format : kFormats) {
    for (const uint64_t nan : {kNoNaN, uint64_t{290}}) {
      const auto gain = [nan](uint64_t key) { return mixed(key, nan); };
      expect_close({.format = format, .tokens = 40, .v_gain = gain});
      // A loud key's logits are too large for any other key to count.
      const auto quiet = [nan](uint64_t key) { return mixed(key == 5 ? 6 : key, nan); };
      expect_close({.format = format, .tokens = 40, .k_gain = quiet});
    }
  }
}

// Chunks of a prompt that are too short to be unpacked by a command ahead, and longer ones.
TEST(AttentionPrompts, BitsDoNotDependOnChunksOrWhoUnpacks) {
  struct Shape {
    uint64_t capacity, ring_start, window;
  };
  constexpr Shape kShapes[] = {{0, 0, 0}, {0, 0, 90}, {330, 0, 0}, {301, 37, 0}, {400, 250, 130}};
  for (const KvFormat format : kFormats) {
    for (const auto& [capacity, ring_start, window] : kShapes) {
      // Loud keys, behind which most keys weigh 0; a NaN of K and V beside them, or of V alone.
      enum class Keys { plain, loud, loud_k };
      for (const Keys keys : {Keys::plain, Keys::loud, Keys::loud_k}) {
        const bool loud = keys != Keys::plain;
        if (loud && (capacity != 0 || window != 0)) continue;
        // Places of keys do not depend on the format.
        if (format != KvFormat::tq4 && (capacity != 0 || window != 0)) continue;
        if (loud && format != KvFormat::tq4 && format != KvFormat::tq8) continue;
        Prompt p{.format = format, .capacity = capacity, .ring_start = ring_start};
        p.window = window;
        if (loud) p.k_gain = p.v_gain = [](uint64_t key) { return mixed(key, 260); };
        if (keys == Keys::loud_k) {
          p.k_gain = [](uint64_t key) { return mixed(key, kNoNaN); };
          p.v_gain = [](uint64_t key) { return mixed(key, 100); };  // some chunks end in its stage
        }
        const PromptWorld world(test_device(), p);
        const std::vector<float> whole = world.rows();
        Tensor scratch;
        uint64_t begin = 0;
        for (const uint64_t tokens : {40u, 60u, 17u, 120u, 20u, 43u}) {
          const std::vector<float> chunk = world.rows(begin, begin + tokens, &scratch);
          EXPECT_EQ(std::memcmp(chunk.data(), whole.data() + begin * kHeads * kDim,
                                chunk.size() * sizeof(float)),
                    0)
              << name(format) << " tokens from " << begin << ", capacity " << capacity
              << " from slot " << ring_start << ", window " << window << (loud ? ", loud" : "");
          begin += tokens;
        }
        EXPECT_EQ(begin, p.tokens);
      }
    }
  }
}

// Alone, each sequence with many keys is unpacked ahead; in these batches not all have room.
TEST(AttentionPrompts, BitsDoNotDependOnTheRoomOfABatch) {
  for (const auto& [format, page_tokens, window] :
       {std::tuple{KvFormat::tq4, uint64_t{16}, uint64_t{0}}, {KvFormat::tq8, 24, 500}}) {
    const auto gain = [](uint64_t position) { return position % 97 == 60 ? 1e6f : 1.0f; };
    PagedWorld world(test_device(), {format, format, 1, kDim, 0, page_tokens}, kHeads,
                     {1200, 1100, 300, 90, 1000}, 1, gain);
    world.options.mask.window = window;
    std::vector<Part> parts = {
        {0, 1200, 20}, {1, 1100, 18}, {2, 300, 1}, {3, 90, 2, true}, {4, 1000, 17}};
    RowBits alone;
    for (const Part& part : parts) alone.merge(world.attend({part}));
    for (int turn = 0; turn < 2; ++turn) {
      EXPECT_EQ(compare(alone, world.attend(parts)), alone.size()) << name(format);
      std::reverse(parts.begin(), parts.end());
    }
    // In chunks, of which a later one begins inside a stage.
    RowBits chunks = world.attend({{0, 1190, 10, true}, {4, 993, 10, true}});
    chunks.merge(world.attend({{4, 1000, 7, true}, {0, 1200, 10, true}}));
    EXPECT_EQ(compare(alone, chunks), 37u);
  }
}

// Prompts, then single tokens, of caches with other numbers of KV heads in turn. There are enough
// keys for splits, which the lists of single tokens reduce behind a write, or alone.
std::vector<float> caches_in_turn(const Device& device, Tensor* scratch) {
  constexpr uint64_t kTokens = 1100;
  std::vector<KvCache> caches;
  const uint64_t most = device.info().name == "cpu" ? 17 : 4;  // the CPU counts by 16 heads
  for (const uint64_t kv_heads : {most, uint64_t{1}, uint64_t{2}}) {
    caches.emplace_back(device, KvCacheOptions{.kv_heads = kv_heads,
                                               .head_dim = kDim,
                                               .capacity = 1300,
                                               .layers = {{.k = KvFormat::tq8, .v = KvFormat::tq8}},
                                               .step_tokens = kTokens});
  }
  std::vector<float> all;
  uint32_t seed = 0;
  for (const uint64_t tokens : {kTokens, uint64_t{1}, uint64_t{70}, uint64_t{1}}) {
    for (KvCache& cache : caches) {
      const uint64_t kv_heads = cache.layers()[0].kv_heads;
      const auto rows = [&](uint64_t heads) {
        return tensor_of(device, gaussian_rows(tokens * heads, kDim, ++seed),
                         {tokens, heads, kDim});
      };
      const Tensor keys = rows(kv_heads), values = rows(kv_heads);
      const Tensor q = rows(std::max(kHeads, kv_heads)).slice(0, 0, std::min<uint64_t>(tokens, 90)),
                   out = device.tensor(DType::f32, q.shape());
      Encoder encoder(device);
      cache.begin_step(encoder, tokens);
      cache.append(encoder, 0, keys, values);
      if (kv_heads == most) encoder.submit().wait();
      cache.attend(encoder, 0, {.q = q, .out = out, .scratch = scratch});
      encoder.submit().wait();
      const std::vector<float> made = floats_of(out);
      all.insert(all.end(), made.begin(), made.end());
    }
  }
  return all;
}

TEST(AttentionPrompts, CachesOfOtherShapesShareScratch) {
  Tensor scratch;
  const std::vector<float> shared = caches_in_turn(test_device(), &scratch);
  const std::vector<float> own = caches_in_turn(test_device(), nullptr);
  ASSERT_EQ(shared.size(), own.size());
  EXPECT_EQ(std::memcmp(shared.data(), own.data(), own.size() * sizeof(float)), 0);
  EXPECT_EQ(scratch.defined(), !test_device().info().name.starts_with("metal"));
}

// Layers of one cache, whose scratch memory is one as well, against the CPU.
std::vector<float> layers_in_turn(const Device& device) {
  constexpr uint64_t kTokens = 600;
  KvCache cache(device,
                {.head_dim = kDim,
                 .capacity = kTokens,
                 .layers = {{.k = KvFormat::tq8, .v = KvFormat::tq8, .kv_heads = 1},
                            {.k = KvFormat::tq8, .v = KvFormat::tq8, .window = 321, .kv_heads = 4}},
                 .step_tokens = 100});
  std::vector<float> all;
  uint32_t seed = 0;
  for (const uint64_t tokens : {100, 100, 100, 37, 100, 1, 60, 1, 100, 1}) {
    Encoder encoder(device);
    cache.begin_step(encoder, tokens);
    for (const uint64_t layer : {1, 0}) {
      const uint64_t kv_heads = cache.layers()[layer].kv_heads;
      const auto rows = [&](uint64_t heads) {
        return tensor_of(device, gaussian_rows(tokens * heads, kDim, ++seed),
                         {tokens, heads, kDim});
      };
      const Tensor q = rows(kHeads * kv_heads), out = device.tensor(DType::f32, q.shape());
      cache.append(encoder, layer, rows(kv_heads), rows(kv_heads));
      cache.attend(encoder, layer, {.q = q, .out = out});
      encoder.submit().wait();
      const std::vector<float> values = floats_of(out);
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

TEST(AttentionPrompts, LayersOfOtherShapesAndRingsThatWrap) {
  const std::vector<float> got = layers_in_turn(test_device()),
                           wanted = layers_in_turn(cpu_device(1));
  EXPECT_LE(nmse(std::vector<double>(got.begin(), got.end()),
                 std::vector<double>(wanted.begin(), wanted.end())),
            1e-6);
}

}  // namespace
}  // namespace gyre::test
