// attention of draft tokens over pages: the kernel's text on the host, against double precision and
// against itself with other batches, pages, grids and chunks.
#include <cmath>
#include <utility>
#include <vector>

#include "paged_batch.h"

namespace gyre::test {
namespace {

constexpr abi::AttentionPhase kDrafts = abi::AttentionPhase::drafts;

// With four query heads to a KV head: 12 to 32 rows, and one token, which is another command's.
const std::vector<PagedSequence> kRagged = {{4, 300, 1}, {3, 64, 2}, {7, 1200, 3}, {8, 2100, 4},
                                            {0, 9, 5},   {3, 3, 6},  {5, 1024, 7}, {1, 70, 8}};
// Up to 64 rows, and a prompt.
const std::vector<PagedSequence> kMore = {{16, 40, 1}, {4, 300, 2}, {11, 1300, 3}, {40, 90, 4}};
bool is_taken(const PagedSequence& s) {
  return abi::attention_takes(kDrafts, s.tokens, 4, s.prompt);
}

// Sequences of the phase are right, the others' rows are not touched.
void expect_batch(const PagedNumbers& numbers, const std::vector<PagedSequence>& sequences) {
  PagedBatch batch(numbers, sequences);
  ASSERT_EQ(batch.plan().drafts, 1u);
  const PagedAnswer answer = batch.run();
  for (size_t s = 0; s < sequences.size(); ++s) {
    if (is_taken(sequences[s])) {
      batch.expect_sequence(answer, s, numbers.v == KvFormat::bf16 ? 2e-5 : 1e-6);
    } else {
      for (const float x : batch.rows_of(answer, s)) ASSERT_EQ(x, PagedBatch::kUntouched);
    }
  }
}

TEST(CudaHostDrafts, RaggedBatchesOfEveryFormat) {
  struct Shape {
    KvFormat k, v;
    uint64_t dim;
  };
  for (const Shape& s : {Shape{KvFormat::tq4, KvFormat::tq4, 128},
                         {KvFormat::tq8, KvFormat::tq8, 128},
                         {KvFormat::tq8, KvFormat::tq4, 256},
                         {KvFormat::tq2, KvFormat::tq2, 64},
                         {KvFormat::tq3, KvFormat::tq3, 128},
                         {KvFormat::tq5, KvFormat::tq5, 128},
                         {KvFormat::tq6, KvFormat::tq6, 64}})
    expect_batch({.k = s.k, .v = s.v, .dim = s.dim, .phase = kDrafts, .max_query_length = 8},
                 kRagged);
  // Blocks of 64 rows.
  expect_batch({.phase = kDrafts}, kMore);
}

// What has no int8 operands goes to attention_many_rows, by the same schedule.
TEST(CudaHostDrafts, SixteenBitValues) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::bf16}) {
    PagedNumbers n = {.k = KvFormat::tq8, .v = format, .phase = kDrafts, .max_query_length = 8};
    expect_batch(n, kRagged);
    n.window = 50, n.soft_cap = 20, n.sink_logits = n.alibi_slopes = true;
    expect_batch(n, kRagged);
  }
  expect_batch({.k = KvFormat::tq8, .v = KvFormat::f16, .phase = kDrafts}, kMore);
}

TEST(CudaHostDrafts, PagesOfEverySizeAndRings) {
  for (const uint64_t page : {8, 24, 64, 128})
    expect_batch({.page_tokens = page, .phase = kDrafts, .max_query_length = 8},
                 {{4, 300, 1}, {3, 64, 2}, {7, 1200, 3}});
  expect_batch({.window = 100, .ring_entries = 9, .phase = kDrafts, .max_query_length = 8},
               {{3, 700, 1}, {4, 90, 2}, {5, 3000, 3}});
}

TEST(CudaHostDrafts, MasksSinksSlopesAndCaps) {
  PagedNumbers n = {.window = 600,
                    .soft_cap = 20,
                    .sink_logits = true,
                    .alibi_slopes = true,
                    .phase = kDrafts,
                    .max_query_length = 8};
  expect_batch(n, kRagged);
  n.window = 50;
  expect_batch(n, kRagged);
  expect_batch({.causal = false, .phase = kDrafts, .max_query_length = 8}, kRagged);
}

// A row's bits follow from its sequence alone: not from the batch, the grid, the size of a block's
// row group, or a second run over the same scratch.
TEST(CudaHostDrafts, BitsDoNotDependOnTheBatch) {
  for (const KvFormat format : {KvFormat::tq8, KvFormat::f16}) {
    const PagedNumbers n = {.k = KvFormat::tq8,
                            .v = format,
                            .heads = 8,
                            .kv_heads = 2,
                            .phase = kDrafts,
                            .max_query_length = 8};
    PagedBatch all(n, kRagged);
    const PagedAnswer answer = all.run();
    EXPECT_EQ(all.run(2), answer);
    for (const size_t s : {size_t{2}, size_t{3}}) {
      for (const uint32_t blocks : {1u, 3u}) {
        PagedNumbers m = n;
        m.blocks = blocks, m.seed = 5 + blocks;
        m.max_query_length = blocks == 3 ? 16 : 8;
        PagedBatch alone(m, {kRagged[s]});
        const PagedAnswer of = alone.run();
        EXPECT_EQ(alone.rows_of(of, 0), all.rows_of(answer, s))
            << "sequence " << s << " " << blocks;
      }
    }
  }
}

// The newest tokens alone give the rows that they have among others: a neighbour's logits do not
// change how a row is rounded. Up to 16 rows are summed in halves of a stage's keys, more are not.
TEST(CudaHostDrafts, BitsDoNotDependOnTheOtherTokens) {
  for (const KvFormat format : {KvFormat::tq8, KvFormat::f16}) {
    const PagedNumbers n = {
        .k = KvFormat::tq8, .v = format, .phase = kDrafts, .max_query_length = 8};
    for (const auto& [most, fewer] : {std::pair<uint64_t, uint64_t>{4, 3}, {8, 5}}) {
      PagedBatch many(n, {{most, 1500, 3}}), few(n, {{fewer, 1500, 3}});
      const std::vector<float> all = many.rows_of(many.run(), 0), rows = few.rows_of(few.run(), 0);
      EXPECT_EQ(rows, std::vector<float>(all.end() - static_cast<int64_t>(rows.size()), all.end()));
    }
  }
}

TEST(CudaHostDrafts, NonsenseShows) {
  for (const KvFormat format : {KvFormat::tq8, KvFormat::f16}) {
    const PagedNumbers n = {
        .k = KvFormat::tq8, .v = format, .phase = kDrafts, .max_query_length = 8};
    const std::vector<PagedSequence> sequences = {{4, 300, 1}, {3, 64, 2}, {7, 1200, 3}};
    PagedBatch good(n, sequences);
    const PagedAnswer right = good.run();
    const auto expect = [&](const auto& spoil, bool later, size_t bad) {
      PagedBatch batch(n, sequences);
      if (later) {
        batch.after_schedule = [&] { spoil(batch); };
      } else {
        spoil(batch);
      }
      const PagedAnswer answer = batch.run();
      for (size_t s = 0; s < sequences.size(); ++s) {
        if (s != bad) {
          EXPECT_EQ(batch.rows_of(answer, s), good.rows_of(right, s));
          continue;
        }
        for (const float x : batch.rows_of(answer, s)) ASSERT_TRUE(std::isnan(x));
      }
    };
    expect([](PagedBatch& b) { b.table()[2 * b.width() + 70] = -1; }, false, 2);
    expect([](PagedBatch& b) { b.table()[3] = 1 << 30; }, false, 0);
    expect([](PagedBatch& b) { b.kv_lengths()[1] = -1; }, false, 1);
    // A schedule of another step.
    expect([](PagedBatch& b) { --b.kv_lengths()[2]; }, true, 2);
  }
}

TEST(CudaHostDrafts, SegmentsAddUp) {
  const std::vector<PagedSequence> sequences = {{4, 700, 1}, {3, 5, 2}, {5, 90, 3}};
  for (const KvFormat format : {KvFormat::tq8, KvFormat::f16}) {
    PagedNumbers n = {.k = KvFormat::tq8, .v = format, .phase = kDrafts, .max_query_length = 8};
    PagedBatch whole(n, sequences);
    const PagedAnswer all = whole.run();
    n.states = true, n.first_keys = 4, n.tail = 40;
    n.tail_begin = {610, 0, 60};
    std::vector<PagedAnswer> parts;
    for (const abi::KvSegment segment :
         {abi::kSegmentBody, abi::kSegmentSinks, abi::kSegmentTail}) {
      n.segment = segment;
      PagedBatch batch(n, sequences);
      parts.push_back(batch.run());
    }
    expect_merged(n, parts, all);
  }
}

}  // namespace
}  // namespace gyre::test
