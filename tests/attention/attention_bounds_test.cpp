// Row bounds against a model that asks of every key whether a token sees it.
#include "abi/attention_bounds.h"

#include "abi/attention.h"
#include "gyre_test.h"

namespace {

using gyre::abi::row_bounds;
using gyre::abi::row_position;
using gyre::abi::row_window;
using gyre::abi::RowBounds;
using gyre::abi::RowMask;

// As a paper would say it, in numbers that cannot overflow.
bool sees(int64_t length, int64_t tokens, uint64_t window, bool causal, int64_t token,
          int64_t key) {
  const int64_t position = length - tokens + token;
  if (causal && key > position) return false;
  return window == 0 || key > position || static_cast<uint64_t>(position - key) < window;
}

template <class Int>
class AttentionBounds : public testing::Test {};
using Widths = testing::Types<int32_t, int64_t>;
TYPED_TEST_SUITE(AttentionBounds, Widths);

template <class Int>
void check_row(const RowMask<Int>& mask, uint64_t window, Int token, Int first, Int last) {
  const RowBounds<Int> bounds = row_bounds(mask, token, first, last);
  ASSERT_LE(first, bounds.begin);
  ASSERT_LE(bounds.end, last);
  for (Int key = first; key < last; ++key) {
    const bool seen = key >= bounds.begin && key < bounds.end;
    ASSERT_EQ(seen, sees(mask.length, mask.tokens, window, mask.causal, token, key))
        << "length " << mask.length << ", tokens " << mask.tokens << ", window " << window
        << ", causal " << mask.causal << ", token " << token << ", keys [" << first << ", " << last
        << "), key " << key;
  }
}

TYPED_TEST(AttentionBounds, EveryKeyOfSmallProblems) {
  using Int = TypeParam;
  const uint64_t windows[] = {0, 1, 2, 5, 8, 100, std::numeric_limits<uint64_t>::max()};
  for (Int length = 0; length <= 9; ++length) {
    for (Int tokens = 1; tokens <= 12; ++tokens) {
      for (const uint64_t window : windows) {
        for (const bool causal : {false, true}) {
          const RowMask<Int> mask = {length, tokens, row_window<Int>(window), causal};
          for (Int token = 0; token < tokens; ++token) {
            for (Int first = 0; first <= length; ++first) {
              for (Int last = first; last <= length; ++last)
                check_row(mask, window, token, first, last);
            }
          }
        }
      }
    }
  }
}

// A layer's keys in three places: each key that a token sees is in one of them.
gyre::abi::KvSegment segment_of(const gyre::abi::KvPlaces& places, uint64_t tail_begin,
                                int64_t position, int64_t key) {
  const auto j = static_cast<uint64_t>(key);
  if (j < places.sink_tokens) return gyre::abi::kSegmentSinks;
  const bool near = key > position - static_cast<int64_t>(places.tail) && j >= tail_begin;
  return places.tail != 0 && near ? gyre::abi::kSegmentTail : gyre::abi::kSegmentBody;
}

struct Layer {
  gyre::abi::KvPlaces places;
  gyre::abi::KvState state;
  uint64_t window;
  bool causal;
};

template <class Int>
void check_segment(const Layer& layer, gyre::abi::KvSegment segment, uint64_t tokens) {
  gyre::abi::AttentionParams p{};
  p.tokens = tokens;
  p.window = layer.window;
  p.places = layer.places;
  p.segment = segment;
  p.splits = 1;
  gyre::abi::attention_follow(layer.state, p);
  ASSERT_LE(p.first_key, p.end_key);
  ASSERT_LE(p.end_key, layer.state.length);
  RowMask<Int> mask = {static_cast<Int>(p.length), static_cast<Int>(tokens),
                       row_window<Int>(layer.window), layer.causal};
  gyre::abi::fill_segment(mask, segment, p.places, p.tail_begin);
  RowBounds<Int> before = {0, 0};
  for (Int token = 0; token < mask.tokens; ++token) {
    const RowBounds<Int> bounds =
        row_bounds(mask, token, static_cast<Int>(p.first_key), static_cast<Int>(p.end_key));
    ASSERT_LE(bounds.begin, bounds.end);
    ASSERT_GE(bounds.begin, before.begin);
    ASSERT_GE(bounds.end, before.end);
    before = bounds;
    const int64_t position = row_position(mask, token);
    for (Int key = 0; key < mask.length; ++key) {
      const bool wanted =
          sees(mask.length, mask.tokens, layer.window, layer.causal, token, key) &&
          segment_of(layer.places, layer.state.tail_begin, position, key) == segment;
      ASSERT_EQ(key >= bounds.begin && key < bounds.end, wanted)
          << "segment " << segment << ", length " << mask.length << ", tokens " << tokens
          << ", window " << layer.window << ", causal " << layer.causal << ", sink_tokens "
          << mask.sink_tokens << ", tail " << mask.tail << " from " << mask.tail_begin << ", token "
          << token << ", key " << key;
    }
  }
}

TYPED_TEST(AttentionBounds, EveryKeyOfEverySegment) {
  using Int = TypeParam;
  for (uint64_t length = 0; length <= 9; ++length) {
    for (uint64_t tokens = 1; tokens <= 10; ++tokens) {
      for (const uint64_t window : {0, 1, 2, 4, 50}) {
        for (const bool causal : {false, true}) {
          for (const uint64_t sink_tokens : {0, 1, 4, 20}) {
            for (const uint64_t tail : {0, 1, 2, 5, 30}) {
              for (uint64_t begin = 0; begin <= length; begin += tail == 0 ? 100 : 1) {
                const Layer layer{{sink_tokens, tail, tail == 0 ? 0 : tail + 10, 100},
                                  {0, length, begin},
                                  window,
                                  causal};
                check_segment<Int>(layer, gyre::abi::kSegmentBody, tokens);
                if (sink_tokens != 0) check_segment<Int>(layer, gyre::abi::kSegmentSinks, tokens);
                if (tail != 0) check_segment<Int>(layer, gyre::abi::kSegmentTail, tokens);
              }
            }
          }
        }
      }
    }
  }
}

TYPED_TEST(AttentionBounds, GrowWithTheToken) {
  using Int = TypeParam;
  for (const bool causal : {false, true}) {
    const RowMask<Int> mask = {1000, 16, row_window<Int>(300), causal};
    RowBounds<Int> before = row_bounds<Int>(mask, 0, 10, 995);
    for (Int token = 1; token < 16; ++token) {
      const RowBounds<Int> now = row_bounds<Int>(mask, token, 10, 995);
      EXPECT_GE(now.begin, before.begin);
      EXPECT_GE(now.end, before.end);
      before = now;
    }
  }
}

// The largest numbers a caller may have: nothing wraps, and a window over all keys hides none.
TYPED_TEST(AttentionBounds, LargestLengthsAndWindows) {
  using Int = TypeParam;
  const Int widest = row_window<Int>(std::numeric_limits<uint64_t>::max());
  for (const Int length : {widest, Int(widest - 1)}) {
    const RowMask<Int> mask = {length, 16, widest, true};
    const RowBounds<Int> last = row_bounds<Int>(mask, 15, 0, length);
    EXPECT_EQ(last.begin, 0);
    EXPECT_EQ(last.end, length);
    const RowMask<Int> near = {length, 16, 7, true};
    const RowBounds<Int> seven = row_bounds<Int>(near, 15, 0, length);
    EXPECT_EQ(seven.begin, length - 7);
    EXPECT_EQ(seven.end, length);
  }
  // More tokens than keys, and keys that do not reach the window.
  for (const Int tokens : {Int{16}, Int{64}, Int{1024}}) {
    const RowMask<Int> many = {5, tokens, widest, true};
    for (const Int token : {Int{0}, Int{1}, Int(tokens - 1)}) {
      const RowBounds<Int> all = row_bounds<Int>(many, token, 0, 5);
      EXPECT_EQ(all.begin, 0);
      EXPECT_EQ(all.end, token == tokens - 1 ? 5 : 0) << token << " of " << tokens;
    }
  }
  const RowMask<Int> ahead = {0, 16, widest, true};  // more tokens than keys
  EXPECT_EQ(row_position(ahead, Int{0}), -16);
  EXPECT_EQ(row_bounds<Int>(ahead, 0, 0, 0).end, 0);
  EXPECT_EQ(row_window<Int>(0), 0);
  EXPECT_EQ(row_window<Int>(123), 123);
}

TYPED_TEST(AttentionBounds, TreeHidesOwnKeysOnly) {
  using Int = TypeParam;
  const RowMask<Int> mask = {10, 3, 0, false};
  const uint8_t row[3] = {1, 0, 2};
  for (Int key = 0; key < 10; ++key) {
    const bool hidden = gyre::abi::tree_hides(row, mask, key);
    EXPECT_EQ(hidden, key == 8) << "key " << key;
  }
}

}  // namespace
