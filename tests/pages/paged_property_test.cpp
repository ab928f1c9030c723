// What must hold for any batch: a row's bits depend on its sequence alone; a prompt's not on how it
// is cut; a sequence in pages gives what a linear cache gives.
#include <gtest/gtest.h>

#include "kv_codec/kv_codec_fixture.h"
#include "pages/paged_fixture.h"

namespace gyre::test {
namespace {

TEST(PagedBatch, RowsDoNotDependOnTheBatch) {
  const std::vector<uint64_t> kv_lengths = {1, 70, 1024, 1025, 2600, 64, 300, 17};
  std::vector<Part> parts;
  for (uint64_t s = 0; s < kv_lengths.size(); ++s)
    parts.push_back({s, kv_lengths[s],
                     std::min<uint64_t>(kv_lengths[s], s % 3 == 2 ? 20 : 1 + s % 4), s % 5 == 1});
  for (const Formats& f : kFormats) {
    const KvPageShape shape = shape_of(f.k, f.v, 16);
    const RowBits wanted = PagedWorld(device_with(1), shape, 4, kv_lengths).attend(parts);
    std::mt19937 random(3);
    for (const uint32_t threads : {1u, 2u, 3u}) {
      const PagedWorld world(device_with(threads), shape, 4, kv_lengths, 10 + threads);
      for (int round = 0; round < 3; ++round) {
        std::shuffle(parts.begin(), parts.end(), random);
        EXPECT_EQ(compare(wanted, world.attend(parts)), wanted.size()) << text(f);
      }
      uint64_t rows = 0;
      for (const Part& part : parts) rows += compare(wanted, world.attend({part}));
      EXPECT_EQ(rows, wanted.size()) << text(f);
    }
  }
}

TEST(PagedBatch, MoreQueriesThanThereMayBe) {
  constexpr std::pair<uint64_t, uint64_t> kQueries[] = {{4, 5}, {4, 16}, {1, 4}, {1, 5}, {5, 17}};
  for (const Formats& f : kFormats) {
    for (const auto& [most, tokens] : kQueries)
      expect_too_many_are_nan(device_with(2), shape_of(f.k, f.v, 16), 4, most, tokens);
  }
}

TEST(PagedBatch, PromptsDoNotDependOnTheirChunks) {
  constexpr uint64_t kLength = 333;
  for (const Formats& f : kFormats) {
    for (const uint64_t window : {uint64_t{0}, uint64_t{50}}) {
      for (const uint64_t page : {8u, 64u}) {
        PagedWorld world(device_with(2), shape_of(f.k, f.v, page), 4, {kLength, 40});
        world.options.mask.window = window;
        const RowBits wanted = world.attend({{0, kLength, kLength, true}});
        for (const uint64_t chunk : {1u, 5u, 16u, 64u, 100u}) {
          uint64_t rows = 0;
          for (uint64_t done = 0; done < kLength;) {
            const uint64_t tokens = std::min<uint64_t>(kLength - done, chunk);
            done += tokens;
            // In company, at times.
            std::vector<Part> parts = {{0, done, tokens, true}};
            if (done % 2 == 0) parts.insert(parts.begin(), {1, 40, 2});
            rows += compare(wanted, world.attend(parts));
            if (chunk == 1 && done == 60) done = kLength - 20;
          }
          EXPECT_GE(rows, 80u) << text(f) << " chunks of " << chunk;
        }
      }
    }
  }
}

// Caches that hold what the first sequence holds.
class Linear {
 public:
  Linear(const PagedWorld& world, const KvPageShape& shape, uint64_t length)
      : world_(world), length_(length) {
    k_ = make(shape.k, KvRole::k, shape, world.rows('k', 0, 0, length));
    v_ = make(shape.v, KvRole::v, shape, world.rows('v', 0, 0, length));
  }

  RowBits attend(uint64_t length, uint64_t tokens, uint64_t window) const {
    const Tensor q = world_.rows('q', 0, length - tokens, tokens);
    const Tensor out = world_.device().tensor(DType::f32, {tokens, q.shape(1), v_.shape.head_dim});
    const Tensor lse = world_.device().tensor(DType::f32, {tokens, q.shape(1)});
    attention(RunNow(world_.device()),
              {.q = q, .k_cache = k_, .v_cache = v_, .out = out, .lse = lse},
              {.length = length,
               .scale = 1 / std::sqrt(static_cast<float>(k_.shape.head_dim)),
               .mask = {.window = window}});
    return world_.bits_of({{0, length, tokens}}, out, lse);
  }

 private:
  KvBuffer make(KvFormat format, KvRole role, const KvPageShape& shape, const Tensor& rows) const {
    const Device& device = world_.device();
    const KvBuffer buffer =
        KvBuffer::allocate(device, {format, role, shape.kv_heads, length_, rows.shape(2)});
    store(device, rows, buffer);
    return buffer;
  }

  const PagedWorld& world_;
  uint64_t length_;
  KvBuffer k_, v_;
};

TEST(PagedBatch, ASequenceGivesWhatALinearCacheGives) {
  constexpr uint64_t kLength = 3000;
  for (const Formats& f : kFormats) {
    for (const uint64_t page : {64u, 128u}) {
      const KvPageShape shape = shape_of(f.k, f.v, page);
      PagedWorld world(device_with(2), shape, 4, {kLength});
      const Linear linear(world, shape, kLength);
      for (const uint64_t window : {uint64_t{0}, uint64_t{1500}, uint64_t{70}}) {
        world.options.mask.window = window;
        for (const uint64_t length : {1u, 63u, 64u, 65u, 1024u, 1025u, 3000u}) {
          for (const uint64_t tokens : {1u, 4u, 60u}) {
            if (tokens > length) continue;
            EXPECT_EQ(
                compare(linear.attend(length, tokens, window), world.attend({{0, length, tokens}})),
                tokens)
                << text(f) << " length " << length << " tokens " << tokens << " window " << window;
          }
        }
      }
    }
  }
}

// Also where the length is in device memory, and the cache is longer than what it holds.
TEST(PagedBatch, ASequenceGivesWhatKvCacheGives) {
  constexpr uint64_t kLength = 2300;
  for (const Formats& f : kFormats) {
    const KvPageShape shape = shape_of(f.k, f.v, 64);
    const PagedWorld world(device_with(2), shape, 4, {kLength});
    KvCache cache(world.device(), {.kv_heads = 2,
                                   .head_dim = 64,
                                   .capacity = 9000,
                                   .layers = {{.k = f.k, .v = f.v}},
                                   .step_tokens = 1000});
    uint64_t length = 0;
    for (const uint64_t tokens : {900u, 30u, 1u, 3u, 1000u, 365u, 1u}) {
      const RowBits bits = world.step(cache, length, tokens);
      length += tokens;
      EXPECT_EQ(compare(bits, world.attend({{0, length, tokens}})), tokens) << text(f);
    }
  }
}

// Tokens that are taken back leave nothing: pages hold what they would hold without them.
TEST(PagedBatch, RejectedDraftsAreOverwritten) {
  for (const Formats& f : kFormats) {
    const KvPageShape shape = shape_of(f.k, f.v, 16);
    const PagedWorld clean(device_with(1), shape, 4, {45}), drafts(device_with(2), shape, 4, {45});
    drafts.write(0, 37, 6, 100);
    EXPECT_NE(read_bytes(clean.pages().bytes), read_bytes(drafts.pages().bytes));
    drafts.write(0, 37, 3);
    drafts.write(0, 40, 1);
    drafts.write(0, 41, 2);
    EXPECT_EQ(read_bytes(clean.pages().bytes), read_bytes(drafts.pages().bytes)) << text(f);
  }
}

// One recorded call serves every batch within its bounds.
TEST(PagedBatch, AGraphFollowsTheTables) {
  const KvPageShape shape = shape_of(KvFormat::tq8, KvFormat::tq4, 16);
  const PagedWorld world(device_with(2), shape, 4, {1500, 90});
  const Device& device = world.device();
  const Tensor q = device.tensor(DType::f32, {4, 4, 64}),
               out = device.tensor(DType::f32, {4, 4, 64});
  const Tensor lse = device.tensor(DType::f32, {4, 4});
  const Tensor table = device.tensor(DType::i32, {1, world.table(0).size()});
  const Tensor length = device.tensor(DType::i32, {1}), begin = device.tensor(DType::i32, {2});
  Encoder encoder(device);
  attention(encoder,
            {.q = q,
             .pages = world.pages(),
             .page_table = table,
             .kv_lengths = length,
             .cu_seqlens_q = begin,
             .out = out,
             .lse = lse},
            {.max_query_length = 4, .scale = 1 / 8.0f});
  const Graph graph = encoder.instantiate();
  for (const Part& part :
       {Part{0, 1500, 3}, Part{1, 40, 1}, Part{0, 1200, 4}, Part{1, 90, 2}, Part{0, 1500, 1}}) {
    std::ranges::copy(world.table(part.sequence), table.data<int32_t>().begin());
    const Tensor rows = world.rows('q', part.sequence, part.length - part.tokens, part.tokens);
    std::ranges::copy(rows.data<float>(), q.data<float>().begin());
    length.data<int32_t>()[0] = static_cast<int32_t>(part.length);
    begin.data<int32_t>()[1] = static_cast<int32_t>(part.tokens);
    graph.replay().wait();
    EXPECT_EQ(compare(world.bits_of({part}, out, lse), world.attend({part})), part.tokens);
  }
}

}  // namespace
}  // namespace gyre::test
