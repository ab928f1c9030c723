// attention_decode over pages: its text on the host, against double precision and against itself
// with another batch, other pages and another grid.
#include "abi/attention_cut.h"
#include "paged_batch.h"
// After the library's headers
#include "cuda/kernels/attention/decode_layout.cuh"

namespace gyre::test {
namespace {

using abi::AttentionPhase;
constexpr AttentionPhase kDecode = AttentionPhase::decode;

// Over levels, and over 16-bit keys and values.
double bound_of(KvFormat v) { return describe(v).compressed ? 2e-6 : 1e-6; }

void expect_batch(const PagedNumbers& numbers, const std::vector<PagedSequence>& sequences) {
  PagedBatch batch(numbers, sequences);
  const PagedAnswer answer = batch.run();
  for (size_t s = 0; s < sequences.size(); ++s)
    batch.expect_sequence(answer, s, bound_of(numbers.v));
}

const std::vector<PagedSequence> kRagged = {{1, 700, 1}, {1, 5, 2},  {1, 1300, 3},
                                            {1, 0, 4},   {1, 64, 5}, {1, 513, 6}};

TEST(CudaHostPages, RaggedBatchesOfEveryFormatAndHeadDim) {
  constexpr std::pair<KvFormat, uint64_t> kForms[] = {
      {KvFormat::f16, 64}, {KvFormat::f16, 256}, {KvFormat::bf16, 128}, {KvFormat::tq2, 128},
      {KvFormat::tq4, 64}, {KvFormat::tq4, 128}, {KvFormat::tq4, 256},  {KvFormat::tq8, 64},
      {KvFormat::f16, 80}, {KvFormat::tq4, 96},  {KvFormat::tq3, 80}};
  for (const auto& [format, dim] : kForms)
    expect_batch({.k = format, .v = format, .dim = dim, .phase = kDecode}, kRagged);
  expect_batch({.k = KvFormat::tq8, .v = KvFormat::tq4, .phase = kDecode}, kRagged);
  expect_batch({.k = KvFormat::f16, .v = KvFormat::tq4, .phase = kDecode}, kRagged);
}

TEST(CudaHostPages, KeysSharedByWarps) {
  expect_batch({.dim = 512, .phase = kDecode}, {{1, 700}, {1, 3}, {1, 300}});
  expect_batch({.k = KvFormat::tq8, .v = KvFormat::f16, .dim = 512, .phase = kDecode},
               {{1, 300}, {1, 90}});
}

TEST(CudaHostPages, PagesOfEverySize) {
  for (const KvFormat format : {KvFormat::tq4, KvFormat::f16}) {
    for (const uint64_t page : {8, 16, 24, 64, 128})
      expect_batch({.k = format, .v = format, .page_tokens = page, .phase = kDecode}, kRagged);
  }
}

// A unit in one block, in two, and in as many as there are.
TEST(CudaHostPages, AnyNumberOfBlocks) {
  for (const uint32_t blocks : {1u, 3u, 7u, 40u})
    expect_batch({.heads = 8, .kv_heads = 2, .phase = kDecode, .blocks = blocks}, kRagged);
}

TEST(CudaHostPages, MasksSinksSlopesAndCaps) {
  PagedNumbers n = {
      .window = 600, .soft_cap = 20, .sink_logits = true, .alibi_slopes = true, .phase = kDecode};
  expect_batch(n, kRagged);
  n.soft_cap = 0, n.alibi_slopes = false, n.window = 33, n.page_tokens = 8;
  expect_batch(n, kRagged);
  n.k = n.v = KvFormat::f16;
  expect_batch(n, kRagged);
}

// Different numbers of tokens; a prompt among them is another command's.
TEST(CudaHostPages, SeveralTokens) {
  const std::vector<PagedSequence> sequences = {{3, 700, 1}, {1, 5, 2}, {4, 600, 3},
                                                {2, 2, 4},   {2, 1, 5}, {4, 300, 6, true}};
  for (const KvFormat format : {KvFormat::tq4, KvFormat::f16}) {
    for (const uint64_t window : {0, 90}) {
      PagedNumbers n = {.k = format, .v = format, .window = window, .phase = kDecode};
      PagedBatch batch(n, sequences);
      const PagedAnswer answer = batch.run();
      for (size_t s = 0; s + 1 < sequences.size(); ++s)
        batch.expect_sequence(answer, s, bound_of(format));
      for (const float x : batch.rows_of(answer, sequences.size() - 1))
        ASSERT_EQ(x, PagedBatch::kUntouched);
    }
  }
}

// More rows than a block takes.
TEST(CudaHostPages, GroupsOfRows) {
  expect_batch({.heads = 12, .dim = 256, .phase = kDecode, .max_query_length = 1},
               {{1, 300, 1}, {1, 40, 2}});
  expect_batch({.heads = 5, .dim = 128, .phase = kDecode, .max_query_length = 3},
               {{3, 300, 1}, {1, 40, 2}});
}

// Long sequences have larger pieces, and more of them than are folded at a time.
TEST(CudaHostPages, ManyPieces) {
  for (const uint32_t blocks : {2u, 9u})
    expect_batch({.heads = 2,
                  .dim = 64,
                  .page_tokens = 64,
                  .phase = kDecode,
                  .max_query_length = 1,
                  .blocks = blocks},
                 {{1, 34000, 1}, {1, 100, 2}});
}

// Items of one stage: loads run ahead over several of them.
TEST(CudaHostPages, ManyShortSequences) {
  std::vector<PagedSequence> sequences;
  for (uint32_t s = 0; s < 40; ++s) sequences.push_back({1, 1 + s * 7 % 60, s + 1});
  constexpr std::pair<KvFormat, uint64_t> kForms[] = {{KvFormat::tq2, 64}, {KvFormat::tq4, 128}};
  for (const auto& [format, dim] : kForms) {
    for (const uint64_t page : {8, 64}) {
      expect_batch({.k = format,
                    .v = format,
                    .heads = 2,
                    .dim = dim,
                    .page_tokens = page,
                    .phase = kDecode,
                    .blocks = 2},
                   sequences);
    }
  }
}

// A sequence's bits follow from itself alone.
TEST(CudaHostPages, BitsDoNotDependOnBatchPagesOrGrid) {
  constexpr std::pair<KvFormat, uint64_t> kForms[] = {
      {KvFormat::tq4, 128}, {KvFormat::f16, 128}, {KvFormat::tq4, 256}};
  for (const auto& [format, dim] : kForms) {
    const PagedNumbers n = {.k = format,
                            .v = format,
                            .heads = 4,
                            .kv_heads = 2,
                            .dim = dim,
                            .phase = kDecode,
                            .max_query_length = 2};
    const PagedSequence one = {1, 1100, 11}, two = {2, 600, 12};
    PagedBatch alone(n, {one}), other(n, {two});
    const std::vector<float> first = alone.rows_of(alone.run(), 0);
    const std::vector<float> second = other.rows_of(other.run(), 0);
    constexpr std::pair<uint32_t, uint64_t> kGrids[] = {{1, 64}, {5, 16}, {13, 8}};
    for (const auto& [blocks, page] : kGrids) {
      PagedNumbers m = n;
      m.blocks = blocks, m.page_tokens = page, m.seed = blocks;
      PagedBatch batch(m, {{1, 300, 1}, two, {1, 700, 2}, one, {2, 40, 3}});
      const PagedAnswer answer = batch.run(2);
      EXPECT_EQ(batch.rows_of(answer, 3), first) << blocks << " blocks";
      EXPECT_EQ(batch.rows_of(answer, 1), second) << blocks << " blocks";
    }
  }
}

// Lists and keys that no running command writes are loaded before it has ended.
TEST(CudaHostPages, EarlyReadsGiveTheSameBits) {
  for (const KvFormat format : {KvFormat::tq4, KvFormat::f16}) {
    PagedNumbers n = {.k = format, .v = format, .heads = 8, .kv_heads = 2, .phase = kDecode};
    n.settled_keys = true;
    PagedBatch batch(n, kRagged);
    const PagedAnswer waited = batch.run();
    allow_early_reads(true);
    const PagedAnswer early = batch.run();
    allow_early_reads(false);
    EXPECT_EQ(early, waited);
  }
}

TEST(CudaHostPages, ReplaysGiveTheSameBits) {
  PagedBatch batch({.heads = 8, .kv_heads = 2, .phase = kDecode, .blocks = 5}, kRagged);
  const PagedAnswer once = batch.run();
  EXPECT_EQ(batch.run(3), once);
}

// One scratch serves layers of different shapes, and grids of different sizes: each finds its
// counters as zeros, whatever states the others left.
TEST(CudaHostPages, CallsOfOtherShapesShareTheScratch) {
  std::vector<PagedBatch> batches;
  const auto add = [&](KvFormat format, uint64_t dim, const std::vector<PagedSequence>& sequences) {
    const PagedNumbers n = {.k = format, .v = format, .dim = dim, .phase = kDecode, .blocks = 5};
    batches.emplace_back(n, sequences);
  };
  // Two blocks to a multiprocessor, units of three pieces that begin in every one of them; and one
  // block, whose first state lies where states begin.
  const std::vector<PagedSequence> many(7, {1, 2100, 1});
  add(KvFormat::tq4, 128, many);
  add(KvFormat::tq4, 256, {{1, 700, 2}});
  add(KvFormat::f16, 64, many);
  std::vector<PagedAnswer> alone;
  uint64_t floats = 0;
  for (PagedBatch& batch : batches) {
    alone.push_back(batch.run());
    floats = std::max(floats, batch.plan().scratch_floats);
  }
  std::vector<float> shared(floats);
  for (const size_t call : {0, 1, 0, 2, 1, 2, 0})
    EXPECT_EQ(batches[call].run_with(shared), alone[call]) << "call " << call;
}

// Device memory cannot be trusted: rows become NaN, those of others are as they were, and nothing
// else is read or written.
TEST(CudaHostPages, SequencesThatMakeNoSense) {
  const std::vector<PagedSequence> sequences = {{1, 700, 1}, {1, 900, 2}, {1, 600, 3}, {1, 50, 4}};
  const PagedNumbers n = {.phase = kDecode};
  PagedBatch good(n, sequences);
  const PagedAnswer right = good.run();
  const auto expect = [&](const char* what, const auto& spoil, const std::vector<size_t>& bad) {
    PagedBatch batch(n, sequences);
    spoil(batch);
    const PagedAnswer answer = batch.run();
    for (size_t s = 0; s < sequences.size(); ++s) {
      const bool is_bad = std::find(bad.begin(), bad.end(), s) != bad.end();
      for (size_t i = 0; i < n.heads * n.dim; ++i) {
        const size_t at = s * n.heads * n.dim + i;
        if (is_bad) {
          ASSERT_TRUE(std::isnan(answer.out[at])) << what << " sequence " << s;
        } else {
          ASSERT_EQ(answer.out[at], right.out[at]) << what << " sequence " << s;
        }
      }
      for (size_t h = 0; h < n.heads; ++h)
        ASSERT_EQ(std::isnan(answer.lse[s * n.heads + h]), is_bad) << what << " sequence " << s;
    }
  };
  expect("nothing", [](PagedBatch&) {}, {});
  for (const int32_t entry : {-1, 1 << 30, std::numeric_limits<int32_t>::min()}) {
    expect("entry", [&](PagedBatch& b) { b.table()[b.width() + 37] = entry; }, {1});
    expect("first entry", [&](PagedBatch& b) { b.table()[2 * b.width()] = entry; }, {2});
  }
  for (const int32_t length : {-1, 1 << 29, std::numeric_limits<int32_t>::min()})
    expect("length", [&](PagedBatch& b) { b.kv_lengths()[0] = length; }, {0});
  expect("range", [](PagedBatch& b) { b.begins()[4] = 1 << 30; }, {3});
}

// A schedule of another step is noticed: rows of sequences that changed become NaN.
TEST(CudaHostPages, AScheduleOfAnotherStep) {
  const std::vector<PagedSequence> sequences = {{1, 700, 1}, {1, 900, 2}, {1, 600, 3}};
  const PagedNumbers n = {.phase = kDecode};
  PagedBatch good(n, sequences), batch(n, sequences);
  const PagedAnswer right = good.run();
  batch.after_schedule = [&] { --batch.kv_lengths()[1]; };
  const PagedAnswer answer = batch.run();
  for (const size_t s : {0, 2}) EXPECT_EQ(batch.rows_of(answer, s), good.rows_of(right, s));
  for (const float x : batch.rows_of(answer, 1)) ASSERT_TRUE(std::isnan(x));
}

// The schedule cuts as abi/attention_cut.h says: scratch has room for that many groups.
TEST(CudaHostPages, GroupsAreThoseOfTheCut) {
  const abi::AttentionCut cut = {1024, 16};
  std::vector<uint32_t> lengths = {0, 1, 2, 1023, 1024, 1025};
  for (uint32_t power = 1 << 11; power <= 1u << 28; power *= 2)
    lengths.insert(lengths.end(), {power - 1, power, power + 1, power / 2 * 3});
  for (const uint32_t length : lengths) {
    const uint32_t shift = host_schedule_shift(cut.fewest_keys, cut.most_pieces, length);
    EXPECT_EQ(uint64_t{1} << shift, abi::attention_piece_keys(cut, length)) << length;
    EXPECT_LE((uint64_t{length} + (uint64_t{1} << shift) - 1) >> shift, cut.most_pieces) << length;
  }
}

TEST(CudaHostPages, QueryRangesThatMakeNoSense) {
  PagedBatch batch({.phase = kDecode}, {{1, 700, 1}, {1, 900, 2}, {1, 600, 3}});
  batch.begins() = {-5, -3, 1 << 30, 7};
  const PagedAnswer answer = batch.run();
  for (const float x : answer.out) ASSERT_EQ(x, PagedBatch::kUntouched);
}

// Values that some row does not see may be anything.
TEST(CudaHostPages, WhatIsNotSeenDoesNotShow) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq4}) {
    PagedBatch batch({.k = format, .v = format, .page_tokens = 64, .phase = kDecode},
                     {{4, 130, 1}, {2, 65, 2}});
    const PagedAnswer answer = batch.run();
    for (const float x : answer.out) ASSERT_TRUE(std::isfinite(x));
  }
}

// The three parts of a layer's keys, merged, are all of its keys.
TEST(CudaHostPages, SegmentsAddUp) {
  const std::vector<PagedSequence> sequences = {{2, 700, 1}, {1, 5, 2}, {3, 90, 3}};
  PagedNumbers n = {.phase = kDecode, .max_query_length = 4};
  PagedBatch whole(n, sequences);
  const PagedAnswer all = whole.run();
  n.states = true, n.first_keys = 4, n.tail = 40;
  n.tail_begin = {610, 0, 60};
  std::vector<PagedAnswer> parts;
  for (const abi::KvSegment segment : {abi::kSegmentBody, abi::kSegmentSinks, abi::kSegmentTail}) {
    n.segment = segment;
    PagedBatch batch(n, sequences);
    parts.push_back(batch.run());
  }
  expect_merged(n, parts, all);
}

// Pages are used again when they have fallen off the front.
TEST(CudaHostPages, RingOfEntries) {
  for (const KvFormat format : {KvFormat::tq4, KvFormat::f16})
    expect_batch({.k = format, .v = format, .window = 100, .ring_entries = 8, .phase = kDecode},
                 {{1, 700, 1}, {2, 90, 2}, {1, 3000, 3}});
}

}  // namespace
}  // namespace gyre::test
