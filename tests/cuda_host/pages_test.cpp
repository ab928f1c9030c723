// Attention and writes over pages on the emulated GPU: a row's bits follow from its sequence alone,
// not from the batch, the pages, the grid or the chunk; a stale schedule shows.
#include <limits>

#include "cuda_host/emulated_device.h"
#include "kv_codec/kv_codec_fixture.h"
#include "ops/cache_ops.h"
#include "ops/paged_attention.h"
#include "pages/paged_fixture.h"

namespace gyre::test {
namespace {

KvPageShape shape_for(KvFormat k, KvFormat v, uint64_t dim, uint64_t page_tokens) {
  return {k, v, 1, dim, 0, page_tokens};
}

struct Grid {
  uint32_t multiprocessors;
  uint64_t page_tokens;
};
constexpr Grid kGrids[] = {{1, 64}, {5, 16}, {13, 8}};

// Decodes, drafts of which some fill a block, prompts and what is marked as one.
TEST(EmulatedPages, BitsDoNotDependOnBatchPagesOrGrid) {
  constexpr std::pair<KvFormat, KvFormat> kPairs[] = {{KvFormat::tq8, KvFormat::tq8},
                                                      {KvFormat::f16, KvFormat::f16},
                                                      {KvFormat::tq8, KvFormat::f16}};
  const std::vector<uint64_t> lengths = {1100, 600, 300, 1200, 40, 90, 5};
  const std::vector<Part> parts = {{0, 1100, 1}, {1, 600, 2}, {2, 300, 4},      {3, 1200, 7},
                                   {4, 40, 16},  {6, 5, 3},   {5, 90, 40, true}};
  for (const auto& [k, v] : kPairs) {
    SCOPED_TRACE(std::string(name(k)) + "/" + std::string(name(v)));
    const PagedWorld first(emulated_device(4), shape_for(k, v, 128, 16), 4, lengths);
    const RowBits wanted = first.attend(parts);
    for (const Grid& grid : kGrids) {
      const PagedWorld world(emulated_device(grid.multiprocessors),
                             shape_for(k, v, 128, grid.page_tokens), 4, lengths,
                             grid.multiprocessors);
      std::vector<Part> some(parts.rbegin(), parts.rend());
      EXPECT_EQ(compare(wanted, world.attend(some)), wanted.size()) << name(k) << "/" << name(v);
      EXPECT_EQ(compare(wanted, world.attend({parts[grid.multiprocessors % 5]})),
                parts[grid.multiprocessors % 5].tokens);
    }
  }
}

// Few splits of a block are eight warps', more are twelve's, of which as many take splits as fill
// the last round.
TEST(EmulatedPages, BitsDoNotDependOnTheNumberOfWarps) {
  const std::vector<uint64_t> lengths = {1100, 600, 300, 3300, 40, 5};
  const std::vector<Part> parts = {{0, 1100, 1}, {1, 600, 1}, {2, 300, 1},
                                   {3, 3300, 1}, {4, 40, 1},  {5, 5, 1}};
  for (const uint64_t dim : {64u, 128u}) {
    const KvPageShape shape = shape_for(KvFormat::tq4, KvFormat::tq4, dim, 16);
    const RowBits wanted = PagedWorld(emulated_device(60), shape, 4, lengths).attend(parts);
    for (const uint32_t multiprocessors : {1u, 3u}) {
      const PagedWorld world(emulated_device(multiprocessors), shape, 4, lengths);
      EXPECT_EQ(compare(wanted, world.attend(parts)), wanted.size()) << dim;
    }
  }
}

// An engine decodes a sequence alone, then beside another one's draft.
TEST(EmulatedPages, SingleTokensHaveTheBitsOfAStepOfTheirOwn) {
  const PagedWorld world(emulated_device(4), shape_for(KvFormat::tq4, KvFormat::tq4, 128, 16), 4,
                         {1100, 700, 300});
  const RowBits alone = world.attend({{0, 1100, 1}});
  EXPECT_EQ(compare(alone, world.attend({{2, 300, 1}, {1, 700, 2}, {0, 1100, 1}})), 1u);
}

// Beside longer sequences a block has rows that a sequence lacks, and sums of another form. Where
// values are loud, weights and sums are rescaled: neither must show.
TEST(EmulatedPages, LongerSequencesDoNotShowWhereValuesAreLoud) {
  const auto gain = [](uint64_t position) { return position % 97 == 60 ? 40.0f : 1.0f; };
  struct Batch {
    uint64_t heads, tokens, beside;
  };
  constexpr Batch kBatches[] = {{4, 1, 2}, {2, 1, 4}, {2, 2, 4}, {2, 3, 4}, {1, 2, 5}, {3, 1, 2}};
  for (const KvFormat format : {KvFormat::tq8, KvFormat::tq4}) {
    for (const Batch& b : kBatches) {
      const PagedWorld world(emulated_device(4), shape_for(format, format, 128, 16), b.heads,
                             {700, 90}, 1, gain);
      for (uint64_t length = 280; length <= 700; length += 60) {
        SCOPED_TRACE(std::string(name(format)) + " " + std::to_string(b.heads) + " heads, " +
                     std::to_string(b.tokens) + " of " + std::to_string(length));
        const RowBits alone = world.attend({{0, length, b.tokens}});
        EXPECT_EQ(compare(alone, world.attend({{1, 90, b.beside}, {0, length, b.tokens}})),
                  b.tokens);
      }
    }
  }
}

// A step with a chunk of a prompt takes other kernels for the sequences that decode beside it.
TEST(EmulatedPages, SingleTokensDoNotDependOnAPromptBesideThem) {
  constexpr std::pair<KvFormat, uint64_t> kShapes[] = {
      {KvFormat::tq4, 64}, {KvFormat::f16, 64}, {KvFormat::tq8, 128}};
  for (const auto& [format, dim] : kShapes) {
    const PagedWorld world(emulated_device(4), shape_for(format, format, dim, 16), 4, {700, 90});
    for (const uint64_t length : {700u, 257u, 64u, 9u}) {
      const RowBits alone = world.attend({{0, length, 1}});
      for (const uint64_t chunk : {1u, 2u, 5u, 24u})
        EXPECT_EQ(compare(alone, world.attend({{0, length, 1}, {1, 90, chunk, true}})), 1u)
            << name(format) << " " << length << " keys beside " << chunk << " tokens";
    }
  }
}

// Up to 16 rows are summed in halves of a stage's keys, more are not.
TEST(EmulatedPages, BitsDoNotDependOnTheOtherTokens) {
  for (const KvFormat v : {KvFormat::tq8, KvFormat::f16}) {
    const PagedWorld world(emulated_device(4), shape_for(KvFormat::tq8, v, 128, 16), 4, {1500});
    for (const auto& [tokens, fewer] : {std::pair<uint64_t, uint64_t>{4, 3}, {8, 5}}) {
      const RowBits all = world.attend({{0, 1500, tokens}});
      EXPECT_EQ(compare(all, world.attend({{0, 1500, fewer}})), fewer);
    }
  }
}

// A weight of 0 meets what newer tokens alone see.
TEST(EmulatedPages, WhatIsNotFiniteDoesNotReachOlderTokens) {
  constexpr uint64_t kLength = 700;
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const auto gain = [&](uint64_t position) { return position == kLength - 2 ? bad : 1.0f; };
    for (const KvFormat v : {KvFormat::f16, KvFormat::tq8}) {
      for (const KvFormat k : {v, KvFormat::tq8}) {
        const KvPageShape shape = shape_for(k, v, 128, 64);
        const PagedWorld plain(emulated_device(4), shape, 4, {kLength}, 1);
        const PagedWorld world(emulated_device(4), shape, 4, {kLength}, 1, gain);
        for (const uint64_t tokens : {2u, 3u, 4u}) {
          const RowBits wanted = plain.attend({{0, kLength, tokens}});
          for (const auto& [row, bits] : world.attend({{0, kLength, tokens}}))
            EXPECT_EQ(bits == wanted.at(row), row.second < kLength - 2)
                << name(k) << "/" << name(v) << " " << bad << " at " << row.second;
        }
      }
    }
  }
}

// Its multiplier of V is no number: what blocks have beside a sequence's rows must not see it.
TEST(EmulatedPages, WhatIsNotFiniteDoesNotShowTheBatch) {
  constexpr uint64_t kLength = 700;
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const auto gain = [&](uint64_t position) { return position == kLength - 1 ? bad : 1.0f; };
    for (const uint64_t heads : {1u, 2u, 3u}) {
      const PagedWorld world(emulated_device(4), shape_for(KvFormat::tq8, KvFormat::tq8, 128, 16),
                             heads, {kLength, 90}, 1, gain);
      for (uint64_t tokens = 2; tokens * heads <= 12; ++tokens) {
        const RowBits alone = world.attend({{0, kLength, tokens}});
        EXPECT_EQ(compare(alone, world.attend({{1, 90, 16 / heads}, {0, kLength, tokens}})), tokens)
            << heads << " heads, " << tokens << " tokens, " << bad;
      }
    }
  }
}

TEST(EmulatedPages, MoreQueriesThanThereMayBe) {
  constexpr std::pair<uint64_t, uint64_t> kQueries[] = {{4, 5}, {4, 16}, {1, 4}, {1, 5}, {5, 17}};
  for (const uint32_t multiprocessors : {1u, 4u}) {
    for (const auto& [most, tokens] : kQueries)
      expect_too_many_are_nan(emulated_device(multiprocessors),
                              shape_for(KvFormat::tq8, KvFormat::tq8, 128, 16), 4, most, tokens);
  }
}

TEST(EmulatedPages, PromptsDoNotDependOnTheirChunks) {
  constexpr uint64_t kLength = 180;
  for (const KvFormat format : {KvFormat::tq4, KvFormat::f16}) {
    for (const uint64_t window : {0u, 70u}) {
      PagedWorld world(emulated_device(3), shape_for(format, format, 64, 16), 4, {kLength, 40});
      world.options.mask.window = window;
      const RowBits whole = world.attend({{0, kLength, kLength, true}});
      uint64_t done = 0, rows = 0;
      for (const uint64_t tokens : {5u, 29u, 64u, 70u, 11u}) {
        done += tokens;
        rows += compare(whole, world.attend({{1, 40, 2}, {0, done, tokens, true}}));
      }
      // An engine runs a last chunk of one token as a step of decoding.
      rows += compare(whole, world.attend({{1, 40, 1}, {0, kLength, 1, true}}));
      EXPECT_EQ(rows, kLength) << name(format) << " window " << window;
    }
  }
}

// A command ahead unpacks two or three of these four, from the first on, in blocks that go from one
// to the next; another command has the others.
TEST(EmulatedPages, BitsDoNotDependOnWhichPromptsAreUnpacked) {
  const PagedWorld world(emulated_device(1), {KvFormat::tq8, KvFormat::tq8, 2, 128, 0, 24}, 8,
                         {1050, 800, 700, 850, 60});
  std::vector<Part> parts = {{4, 60, 1}, {0, 1050, 20}, {1, 800, 20}, {2, 700, 20}, {3, 850, 20}};
  RowBits alone;
  for (const Part& part : parts) alone.merge(world.attend({part}));
  for (int turn = 0; turn < 2; ++turn) {
    EXPECT_EQ(compare(alone, world.attend(parts)), alone.size());
    std::reverse(parts.begin(), parts.end());
  }
}

// Tiles of keys that a batch leaves in scratch memory, of `room`. The others are zeros, as they
// were.
uint64_t unpacked_tiles(const PagedWorld& world, const std::vector<Part>& parts, uint64_t room) {
  constexpr uint64_t kCounters = abi::kScratchCounterBytes / 4, kTile = 8 * 128 / 2;
  Tensor scratch;
  PagedAttentionOptions bounds;
  PagedAttentionInputs in = world.inputs(parts, bounds);
  in.scratch = &scratch;
  attention(RunNow(world.device()), in, bounds);
  if (!scratch.defined()) return 0;
  const std::vector<float> words = floats_of(scratch);
  uint64_t tiles = 0;
  for (uint64_t i = 0; i < room; ++i) tiles += words[kCounters + i * kTile] != 0 ? 1 : 0;
  return tiles;
}

TEST(EmulatedPages, PromptsAreUnpackedWhereTheyHaveRoom) {
  const PagedWorld world(emulated_device(1), {KvFormat::tq8, KvFormat::tq8, 2, 128, 0, 24}, 8,
                         {1050, 800, 700, 850});
  const Part first = {0, 1050, 20}, second = {1, 800, 20}, third = {2, 700, 20},
             fourth = {3, 850, 20};
  EXPECT_EQ(unpacked_tiles(world, {first}, 160), 132u);
  EXPECT_EQ(unpacked_tiles(world, {first, second, third, fourth}, 320), 132u + 100);
  // What fits would not fill this GPU: none.
  const PagedWorld large(emulated_device(40), {KvFormat::tq8, KvFormat::tq8, 2, 128, 0, 24}, 8,
                         {1050, 800, 700, 850});
  EXPECT_EQ(unpacked_tiles(large, {first, second, third, fourth}, 320), 0u);
  EXPECT_EQ(unpacked_tiles(large, {first}, 160), 132u);
}

// A block of the kernel for any shape has several work tiles, also of one prompt.
TEST(EmulatedPages, PromptsOfAnyShapeDoNotDependOnTheGrid) {
  const KvPageShape shape = shape_for(KvFormat::tq4, KvFormat::tq4, 96, 16);
  const std::vector<Part> parts = {{0, 200, 60, true}, {1, 90, 1}, {2, 150, 50, true}};
  RowBits all;
  for (const uint32_t multiprocessors : {1u, 13u}) {
    const PagedWorld world(emulated_device(multiprocessors), shape, 4, {200, 90, 150});
    const RowBits made = world.attend(parts);
    if (!all.empty()) {
      EXPECT_EQ(compare(all, made), 111u);
    }
    all = made;
  }
}

// All keys of a prompt are in the tail: its states over the body are written, too.
TEST(EmulatedPages, APromptWithoutKeysInTheBodyHasStates) {
  const PagedWorld world(emulated_device(2), shape_for(KvFormat::tq8, KvFormat::tq8, 128, 16), 4,
                         {300});
  PagedCall call{.op = "test"};
  const PagedAttentionInputs in = world.inputs({{0, 300, 20}}, call.options);
  in.kv_lengths.write_from<int32_t>(std::vector<int32_t>{20});
  call.q = in.q;
  call.keys.pages = in.pages;
  call.keys.tail = 64;
  call.page_table = in.page_table;
  call.kv_lengths = in.kv_lengths;
  call.cu_seqlens_q = in.cu_seqlens_q;
  const Tensor states = world.device().tensor(DType::f32, {1, 20, 4, 130});
  states.write_from<float>(std::vector<float>(states.elements(), 7.0f));
  Encoder encoder(world.device());
  AttendScratch scratch;
  {
    Recording recording(encoder, call.op);
    attend_pages(recording, world.device(), call, {.partial = states}, scratch);
    recording.commit();
  }
  encoder.submit().wait();
  const std::vector<float> made = floats_of(states);
  for (size_t row = 0; row < 80; ++row) EXPECT_EQ(made[row * 130 + 129], 0.0f) << row;
}

// One scratch serves layers of different shapes: each call finds its counters as zeros, whatever
// states the others left.
TEST(EmulatedPages, CallsOfOtherShapesShareTheScratch) {
  const Device device = emulated_device(5);
  const std::vector<Part> parts = {{0, 2100, 1}, {1, 2100, 1}, {2, 700, 1}};
  std::vector<PagedWorld> worlds;
  for (const KvFormat format : {KvFormat::tq8, KvFormat::f16, KvFormat::tq4})
    worlds.emplace_back(device, shape_for(format, format, 128, 16), 4,
                        std::vector<uint64_t>{2100, 2100, 700});
  Tensor scratch;
  for (const size_t call : {0, 1, 0, 2, 1, 2, 0}) {
    PagedAttentionOptions bounds;
    PagedAttentionInputs in = worlds[call].inputs(parts, bounds);
    in.scratch = &scratch;
    attention(RunNow(device), in, bounds);
    EXPECT_EQ(compare(worlds[call].attend(parts), worlds[call].bits_of(parts, in.out, in.lse)), 3u)
        << "call " << call;
  }
}

// Rows of sequences that changed since become NaN, those of others stay.
TEST(EmulatedPages, AScheduleOfAnotherStepShows) {
  for (const uint64_t tokens : {1u, 4u}) {
    const PagedWorld world(emulated_device(4), shape_for(KvFormat::tq8, KvFormat::tq8, 128, 16), 4,
                           {700, 900, 600});
    const std::vector<Part> parts = {{0, 700, tokens}, {1, 900, tokens}, {2, 600, tokens}};
    const RowBits right = world.attend(parts);
    PagedAttentionOptions bounds;
    PagedAttentionInputs in = world.inputs(parts, bounds);
    bounds.max_kv_length = 912;
    in.schedule = attention_schedule(RunNow(world.device()),
                                     {.pages = in.pages,
                                      .tokens = in.q.shape(0),
                                      .heads = in.q.shape(1),
                                      .q_dtype = in.q.dtype(),
                                      .kv_lengths = in.kv_lengths,
                                      .cu_seqlens_q = in.cu_seqlens_q,
                                      .is_prefill = in.is_prefill},
                                     bounds);
    in.kv_lengths.write_from(std::span<const int32_t>(std::vector<int32_t>{700, 899, 600}));
    attention(RunNow(world.device()), in, bounds);
    for (const auto& [where, bits] : world.bits_of(parts, in.out, in.lse)) {
      EXPECT_TRUE(where.first == 1 || bits == right.at(where)) << where.first;
      float first = 0;
      std::memcpy(&first, bits.data(), sizeof(first));
      EXPECT_EQ(std::isnan(first), where.first == 1) << where.first;
    }
  }
}

}  // namespace
}  // namespace gyre::test
