// Files in tests/files/data were written by the library at 418423b. They must load, and the library
// must still write the same bytes.
#include "cache/snapshot_fixture.h"
#include "serving/serving_fixture.h"

namespace gyre::test {
namespace {

std::string old_file(const char* name) { return std::string(GYRE_OLD_FILES) + "/" + name; }

class OldFiles : public testing::Test {
 protected:
  void expect_same_bytes(const char* name) const {
    const Bytes old = bytes_of_file(old_file(name));
    EXPECT_FALSE(old.empty()) << name;
    EXPECT_EQ(bytes_of_file(folder / name), old) << name;
  }

  Device device = Device::open("cpu", {.threads = 1});
  Folder folder;
};

// All kinds of sections: sink tokens, a tail, a window's ring that has wrapped, both packings.
class OldSnapshot : public OldFiles {
 protected:
  static KvCacheOptions options() {
    return {.kv_heads = 1,
            .head_dim = 16,
            .capacity = 24,
            .layers = {{.k = KvFormat::tq4, .v = KvFormat::tq2, .tail = 4, .sink_tokens = 2},
                       {.k = KvFormat::mlx_native4, .v = KvFormat::f16, .window = 5},
                       {.k = KvFormat::tq8, .v = KvFormat::bf16}},
            .step_tokens = 4};
  }
  Tensor rows(uint64_t tokens, uint64_t heads, uint64_t& seed) const {
    Tensor made = device.tensor(DType::f32, {tokens, heads, 16});
    for (float& value : made.data<float>()) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      value = static_cast<float>(static_cast<int32_t>(seed >> 32)) * 0x1p-30f;
    }
    return made;
  }
  void fill(KvCache& cache) {
    uint64_t seed = 7;
    for (const uint64_t tokens : {4u, 4u, 3u, 4u, 1u}) {
      cache.begin_step(encoder, tokens);
      for (uint64_t layer = 0; layer < cache.options().layers.size(); ++layer) {
        const Tensor k = rows(tokens, 1, seed);
        cache.append(encoder, layer, k, rows(tokens, 1, seed));
      }
      encoder.submit().wait();
    }
    cache.rollback(encoder, 2);
    encoder.submit().wait();
  }
  // What the newest token's query sees in every layer.
  Bits answers(const KvCache& cache) {
    uint64_t seed = 9;
    Bits bits;
    for (uint64_t layer = 0; layer < cache.options().layers.size(); ++layer) {
      const Tensor q = rows(1, 2, seed), out = device.tensor(DType::f32, {1, 2, 16});
      cache.attend(encoder, layer, {.q = q, .out = out}, {.scale = 0.25f});
      encoder.submit().wait();
      add_row(out, 0, bits);
    }
    return bits;
  }

  Encoder encoder{device};
};

TEST_F(OldSnapshot, LoadsAndIsWrittenTheSame) {
  KvCache filled(device, options()), loaded(device, options());
  fill(filled);
  verify_snapshot(old_file("snapshot"));
  EXPECT_EQ(inspect_snapshot(old_file("snapshot")).length, 14u);
  loaded.load(old_file("snapshot"));
  EXPECT_EQ(loaded.length(), 14u);
  EXPECT_EQ(answers(loaded), answers(filled));
  for (const KvCache* cache : {&filled, &loaded}) {
    cache->save(folder / "snapshot");
    expect_same_bytes("snapshot");
  }
}

// A sequence, two prefixes that part after a page, and a page that has fewer tokens than fit.
TEST_F(OldFiles, OfAPoolLoadAndAreWrittenTheSame) {
  Server filled(device, mixed_pool(16)), loaded(device, mixed_pool(16));
  const std::vector<int32_t> tokens = some_tokens(30, 3), other = some_tokens(8, 4);
  Talk talk = filled.talk(), second = filled.talk();
  filled.prompt(talk, std::span(tokens).first(29), 16);
  filled.pool.publish(talk.sequence, std::span(talk.tokens).first(16));
  filled.prompt(second, std::span(tokens).first(8), 8);
  filled.prompt(second, other, 8);
  filled.pool.publish(second.sequence, second.tokens);

  Talk sequence{loaded.pool.load(old_file("sequence")), talk.tokens};
  EXPECT_EQ(sequence.length(), 29u);
  EXPECT_EQ(loaded.pool.load_prefixes(old_file("prefixes")), 3u);
  Talk matched = loaded.match(second.tokens);
  EXPECT_EQ(matched.length(), 16u);
  for (const auto& [server, from] : {std::pair{&filled, &talk}, std::pair{&loaded, &sequence}}) {
    server->pool.save(from->sequence, folder / "sequence");
    expect_same_bytes("sequence");
    server->pool.save_prefixes(folder / "prefixes");
    expect_same_bytes("prefixes");
    put_file(folder / "page", server->pool.export_page(from->sequence, 3));
    expect_same_bytes("page");
  }
  KvSequence again = loaded.pool.load(old_file("sequence"));
  again.rollback(5);  // the last page
  loaded.pool.import_page(again, bytes_of_file(old_file("page")));
  EXPECT_EQ(again.length(), 29u);
  const auto next = std::span(tokens).subspan(29, 1);
  EXPECT_EQ(loaded.run(sequence, next), filled.run(talk, next));
  EXPECT_EQ(loaded.run(matched, next), filled.run(second, next));
}

}  // namespace
}  // namespace gyre::test
