// Body, sink tokens and tail of a layer in pages: three commands that leave states, and one merge.
#include <gtest/gtest.h>

#include "ops/paged_attention.h"
#include "pages/paged_fixture.h"

namespace gyre::test {
namespace {

// A world whose keys lie in the body, and again in 16 bits in a few pages of sink tokens and a ring
// of tail pages, each in entries of its own of the table.
struct Segments {
  uint64_t sink_tokens = 5, tail = 20, page = 16;

  // Three calls that leave states, and one merge.
  static Tensor merged(const PagedWorld& world, const PagedCall& body,
                       const std::vector<PagedSegment>& segments, const Tensor& lse) {
    const Device& device = world.device();
    const uint64_t tokens = body.q.shape(0), heads = body.q.shape(1);
    const Tensor states = device.tensor(DType::f32, {segments.size(), tokens, heads, 64 + 2});
    const Tensor out = device.tensor(DType::f32, {tokens, heads, 64});
    Encoder encoder(device);
    AttendScratch scratch;
    for (uint64_t i = 0; i < segments.size(); ++i) {
      PagedCall call = body;
      call.keys = segments[i];
      Recording recording(encoder, "test");
      attend_pages(recording, device, call, {.partial = states.slice(0, i, 1)}, scratch);
      recording.commit();
    }
    attention_merge(encoder, {.partial = states, .out = out, .lse = lse});
    encoder.submit().wait();
    return out;
  }
};

TEST(PagedSegments, BodySinksAndTailAreOneAttention) {
  constexpr uint64_t kLength = 1200;
  const Segments at;
  const KvPageShape shape = shape_of(KvFormat::f32, KvFormat::f32, at.page);
  for (const uint64_t tokens : {1u, 3u, 30u}) {
    const PagedWorld world(device_with(2), shape, 4, {kLength});
    const Device& device = world.device();
    const uint64_t held = at.tail + 30, first_held = kLength - held;
    const uint64_t ring = (held + 2 * at.page - 1) / at.page, body_entries = kLength / at.page;
    const KvPages near = KvPages::allocate(device, shape, ring + 1);
    const Tensor table = device.tensor(DType::i32, {1, body_entries + 1 + ring});
    std::ranges::copy(world.table(0), table.data<int32_t>().begin());
    for (uint64_t i = 0; i <= ring; ++i)
      table.data<int32_t>()[body_entries + i] = static_cast<int32_t>(ring - i);
    const auto copy_f16 = [&](uint64_t first, uint64_t count, uint64_t entry, uint64_t entries) {
      const Tensor slots = device.tensor(DType::i32, {count});
      for (uint64_t i = 0; i < count; ++i) {
        const uint64_t key = first + i, nth = entry + key / at.page % entries;
        slots.data<int32_t>()[i] = table.data<int32_t>()[nth] * static_cast<int32_t>(at.page) +
                                   static_cast<int32_t>(key % at.page);
      }
      kv_write(RunNow(device), {.k = world.rows('k', 0, first, count),
                                .v = world.rows('v', 0, first, count),
                                .pages = near,
                                .slots = slots});
    };
    copy_f16(0, at.sink_tokens, body_entries, 1);
    copy_f16(first_held, held, body_entries + 1, ring);
    PagedCall call{.op = "test", .q = world.rows('q', 0, kLength - tokens, tokens)};
    call.page_table = table;
    call.kv_lengths = device.tensor(DType::i32, {1});
    call.kv_lengths.data<int32_t>()[0] = kLength;
    call.cu_seqlens_q = device.tensor(DType::i32, {2});
    call.cu_seqlens_q.data<int32_t>()[1] = static_cast<int32_t>(tokens);
    call.options = {.max_query_length = tokens, .max_kv_length = kLength, .scale = 1 / 8.0f};
    const Tensor tail_begin = device.tensor(DType::i32, {1});
    tail_begin.data<int32_t>()[0] = static_cast<int32_t>(first_held);
    PagedSegment body{.pages = world.pages()};
    body.sink_tokens = at.sink_tokens, body.tail = at.tail, body.tail_begin = tail_begin;
    PagedSegment sink_tokens = body, tail = body;
    sink_tokens.pages = tail.pages = near;
    sink_tokens.segment = abi::kSegmentSinks, tail.segment = abi::kSegmentTail;
    sink_tokens.first_entry = body_entries;
    tail.first_entry = body_entries + 1, tail.ring_entries = ring;
    const Tensor lse = device.tensor(DType::f32, {tokens, 4}),
                 one_lse = device.tensor(DType::f32, {tokens, 4});
    const Tensor three = Segments::merged(world, call, {body, sink_tokens, tail}, lse);
    const Tensor one =
        Segments::merged(world, call, {PagedSegment{.pages = world.pages()}}, one_lse);
    for (uint64_t i = 0; i < one.elements(); ++i)
      ASSERT_NEAR(three.data<float>()[i], one.data<float>()[i], 2e-6) << tokens << " at " << i;
    for (uint64_t i = 0; i < lse.elements(); ++i)
      ASSERT_NEAR(lse.data<float>()[i], one_lse.data<float>()[i], 4e-6);
    // Each key is seen once: what the body has of the sink tokens and of the tail does not matter.
    world.write(0, 0, at.sink_tokens, 50);
    world.write(0, kLength - at.tail, at.tail, 50);
    const Tensor again = Segments::merged(world, call, {body, sink_tokens, tail}, lse);
    const uint64_t newest = (tokens - 1) * 4 * 64;  // the last row's tail covers what was changed
    EXPECT_TRUE(std::equal(three.data<float>().begin() + static_cast<ptrdiff_t>(newest),
                           three.data<float>().end(),
                           again.data<float>().begin() + static_cast<ptrdiff_t>(newest)));
  }
}

// A table row with entries for the body, a page of sink tokens and a ring of tail pages.
class SegmentedPages {
 public:
  static constexpr uint64_t kPage = 64, kSinks = 64, kTail = 24, kStep = 1000;
  static constexpr uint64_t kRing = (kTail + kStep + 2 * kPage - 1) / kPage;

  explicit SegmentedPages(const PagedWorld& world)
      : world_(world), body_entries_(world.table(0).size()) {
    const Device& device = world.device();
    near_ = KvPages::allocate(device, shape_of(KvFormat::f16, KvFormat::f16, kPage), kRing + 1);
    call_.op = "test";
    call_.page_table = device.tensor(DType::i32, {1, body_entries_ + 1 + kRing});
    std::ranges::copy(world.table(0), entries().begin());
    for (uint64_t i = 0; i <= kRing; ++i)
      entries()[body_entries_ + i] = static_cast<int32_t>(kRing - i);
    call_.kv_lengths = device.tensor(DType::i32, {1});
    call_.cu_seqlens_q = device.tensor(DType::i32, {2});
  }

  // The 16-bit copies of tokens [first, first + count).
  void append(uint64_t first, uint64_t count) const {
    const Tensor slots = world_.device().tensor(DType::i64, {count});
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t key = first + i;
      const uint64_t entry = body_entries_ + (key < kSinks ? 0 : 1 + key / kPage % kRing);
      slots.data<int64_t>()[i] =
          entries()[entry] * int64_t{kPage} + static_cast<int64_t>(key % kPage);
    }
    kv_write(RunNow(world_.device()), {.k = world_.rows('k', 0, first, count),
                                       .v = world_.rows('v', 0, first, count),
                                       .pages = near_,
                                       .slots = slots});
  }

  Tensor attend(uint64_t length, uint64_t tokens, const Tensor& lse) {
    PagedCall call = call_;
    call.q = world_.rows('q', 0, length - tokens, tokens);
    call.kv_lengths.data<int32_t>()[0] = static_cast<int32_t>(length);
    call.cu_seqlens_q.data<int32_t>()[1] = static_cast<int32_t>(tokens);
    call.options = {
        .max_query_length = tokens, .max_kv_length = body_entries_ * kPage, .scale = 1 / 8.0f};
    PagedSegment body{.pages = world_.pages()};
    body.sink_tokens = kSinks, body.tail = kTail;
    PagedSegment sink_tokens = body, tail = body;
    sink_tokens.pages = tail.pages = near_;
    sink_tokens.segment = abi::kSegmentSinks, tail.segment = abi::kSegmentTail;
    sink_tokens.first_entry = body_entries_;
    tail.first_entry = body_entries_ + 1, tail.ring_entries = kRing;
    return Segments::merged(world_, call, {body, sink_tokens, tail}, lse);
  }

 private:
  std::span<int32_t> entries() const { return call_.page_table.data<int32_t>(); }

  const PagedWorld& world_;
  uint64_t body_entries_;
  KvPages near_;
  PagedCall call_{};
};

TEST(PagedSegments, GiveWhatKvCacheGives) {
  constexpr uint64_t kLength = 2300;
  for (const Formats& f : {kFormats[0], kFormats[2]}) {
    const PagedWorld world(device_with(2), shape_of(f.k, f.v, SegmentedPages::kPage), 4, {kLength});
    SegmentedPages pages(world);
    KvCache cache(world.device(), {.kv_heads = 2,
                                   .head_dim = 64,
                                   .capacity = 9000,
                                   .layers = {{.k = f.k,
                                               .v = f.v,
                                               .tail = SegmentedPages::kTail,
                                               .sink_tokens = SegmentedPages::kSinks}},
                                   .step_tokens = SegmentedPages::kStep});
    uint64_t length = 0;
    for (const uint64_t tokens : {900u, 30u, 1u, 3u, 1000u, 365u, 1u}) {
      const RowBits bits = world.step(cache, length, tokens);
      pages.append(length, tokens);
      length += tokens;
      const Tensor lse = world.device().tensor(DType::f32, {tokens, 4});
      const Tensor paged = pages.attend(length, tokens, lse);
      EXPECT_EQ(compare(bits, world.bits_of({{0, length, tokens}}, paged, lse)), tokens) << text(f);
    }
  }
}

}  // namespace
}  // namespace gyre::test
