// attention over pages by the kernel for prompts: its text on the host, against double precision
// and against itself with other batches, pages, grids and chunks.
#include <algorithm>
#include <initializer_list>
#include <vector>

#include "paged_batch.h"

namespace gyre::test {
namespace {

using abi::AttentionPhase;

const std::vector<PagedSequence> kRagged = {{20, 200, 1}, {1, 5, 2},   {17, 17, 3}, {3, 130, 4},
                                            {0, 9, 5},    {33, 90, 6}, {2, 1, 7}};

void expect_batch(const PagedNumbers& numbers, const std::vector<PagedSequence>& sequences) {
  PagedBatch batch(numbers, sequences);
  ASSERT_EQ(batch.plan().kernel, abi::AttentionKernel::attention);
  const PagedAnswer answer = batch.run();
  for (size_t s = 0; s < sequences.size(); ++s) batch.expect_sequence(answer, s, 2e-6);
}

TEST(CudaHostPrompts, RaggedBatchesOfEveryFormat) {
  constexpr KvFormat kFormats[] = {KvFormat::f32, KvFormat::f16, KvFormat::bf16,
                                   KvFormat::tq3, KvFormat::tq4, KvFormat::mlx_native4};
  for (const KvFormat format : kFormats)
    expect_batch({.k = format, .v = format, .dim = 64}, kRagged);
  expect_batch({.k = KvFormat::tq8, .v = KvFormat::tq4, .heads = 6, .kv_heads = 2}, kRagged);
  expect_batch({.dim = 80}, kRagged);
}

TEST(CudaHostPrompts, PagesOfEverySize) {
  for (const KvFormat format : {KvFormat::tq4, KvFormat::f16}) {
    for (const uint64_t page : {8, 24, 64, 128})
      expect_batch({.k = format, .v = format, .dim = 64, .page_tokens = page}, kRagged);
  }
}

TEST(CudaHostPrompts, MasksSinksSlopesAndCaps) {
  PagedNumbers n = {
      .dim = 64, .window = 50, .soft_cap = 20, .sink_logits = true, .alibi_slopes = true};
  for (const KvFormat format : {KvFormat::tq4, KvFormat::f16, KvFormat::f32}) {
    n.k = n.v = format;
    expect_batch(n, kRagged);
  }
  expect_batch({.dim = 64, .causal = false}, kRagged);
}

// Prompts, and what is marked as one; sequences that decode are another command's.
TEST(CudaHostPrompts, TakesPromptsAlone) {
  PagedBatch batch({.dim = 64, .phase = AttentionPhase::prompt},
                   {{20, 90, 1}, {2, 90, 2}, {2, 90, 3, true}});
  const PagedAnswer answer = batch.run();
  batch.expect_sequence(answer, 0, 2e-6);
  batch.expect_sequence(answer, 2, 2e-6);
  for (const float x : batch.rows_of(answer, 1)) ASSERT_EQ(x, PagedBatch::kUntouched);
}

// Chunks of a prompt of which `all` has every row, beside others and in other pages.
void expect_chunks(PagedNumbers n, const std::vector<float>& all,
                   std::initializer_list<uint64_t> chunks) {
  uint64_t begin = 0;
  for (const uint64_t tokens : chunks) {
    n.blocks = static_cast<uint32_t>(tokens % 5 + 1), n.seed = n.blocks;
    n.page_tokens = tokens % 2 == 0 ? 64 : 8;
    begin += tokens;
    PagedBatch batch(n, {{7, 60, 9}, {tokens, begin, 1}, {18, 40, 8}});
    const std::vector<float> chunk = batch.rows_of(batch.run(), 1);
    const auto from = all.begin() + static_cast<int64_t>((begin - tokens) * n.heads * n.dim);
    EXPECT_TRUE(std::equal(chunk.begin(), chunk.end(), from)) << tokens << " tokens to " << begin;
  }
}

// A prompt's bits are the same in one piece, in chunks, and beside others.
TEST(CudaHostPrompts, BitsDoNotDependOnChunksBatchPagesOrGrid) {
  for (const KvFormat format : {KvFormat::tq4, KvFormat::f16}) {
    for (const uint64_t window : {0, 70}) {
      const PagedNumbers n = {.k = format, .v = format, .dim = 64, .window = window};
      constexpr uint64_t kLength = 110;
      PagedBatch whole(n, {{kLength, kLength, 1}});
      expect_chunks(n, whole.rows_of(whole.run(), 0), {1, 29, 64, 16});
    }
  }
}

// So are those of the kernel of many rows, which takes prompts alone.
TEST(CudaHostPrompts, BitsOfManyRowsDoNotDependOnChunksBatchPagesOrGrid) {
  for (const uint64_t window : {0, 70}) {
    const PagedNumbers n = {.dim = 64, .window = window, .phase = AttentionPhase::prompt};
    constexpr uint64_t kLength = 180;
    PagedBatch whole(n, {{kLength, kLength, 1}});
    const PagedAnswer answer = whole.run();
    whole.expect_sequence(answer, 0, 2e-6);
    expect_chunks(n, whole.rows_of(answer, 0), {5, 29, 64, 70, 12});
  }
}

void expect_nonsense_shows(const PagedNumbers& n) {
  const std::vector<PagedSequence> sequences = {{20, 90, 1}, {18, 70, 2}, {17, 60, 3}};
  PagedBatch good(n, sequences);
  const PagedAnswer right = good.run();
  const auto expect = [&](const auto& spoil, size_t bad) {
    PagedBatch batch(n, sequences);
    spoil(batch);
    const PagedAnswer answer = batch.run();
    for (size_t s = 0; s < sequences.size(); ++s) {
      const std::vector<float> got = good.rows_of(answer, s), wanted = good.rows_of(right, s);
      if (s == bad) {
        for (const float x : got) ASSERT_TRUE(std::isnan(x)) << s;
      } else {
        ASSERT_EQ(got, wanted) << s;
      }
    }
  };
  for (const int32_t entry : {-1, 1 << 30})
    expect([&](PagedBatch& b) { b.table()[b.width()] = entry; }, 1);
  for (const int32_t length : {-1, 1 << 29})
    expect([&](PagedBatch& b) { b.kv_lengths()[0] = length; }, 0);
  expect([](PagedBatch& b) { b.begins()[3] = 1 << 30; }, 2);
}
TEST(CudaHostPrompts, SequencesThatMakeNoSense) {
  expect_nonsense_shows({.dim = 64});
  expect_nonsense_shows({.dim = 64, .phase = AttentionPhase::prompt});
}

TEST(CudaHostPrompts, SegmentsAddUp) {
  const std::vector<PagedSequence> sequences = {{20, 90, 1}, {3, 5, 2}};
  PagedNumbers n = {.dim = 64};
  PagedBatch whole(n, sequences);
  const PagedAnswer all = whole.run();
  n.states = true, n.first_keys = 4, n.tail = 30;
  std::vector<PagedAnswer> parts;
  for (const abi::KvSegment segment : {abi::kSegmentBody, abi::kSegmentSinks, abi::kSegmentTail}) {
    n.segment = segment;
    PagedBatch batch(n, sequences);
    parts.push_back(batch.run());
  }
  expect_merged(n, parts, all);
}

}  // namespace
}  // namespace gyre::test
