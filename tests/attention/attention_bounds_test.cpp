// Row bounds against a model that asks of every key whether a token sees it.
#include "abi/attention_bounds.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

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
  const Int most = row_window<Int>(std::numeric_limits<uint64_t>::max());
  for (const Int length : {most, Int(most - 1)}) {
    const RowMask<Int> mask = {length, 16, most, true};
    const RowBounds<Int> last = row_bounds<Int>(mask, 15, 0, length);
    EXPECT_EQ(last.begin, 0);
    EXPECT_EQ(last.end, length);
    const RowMask<Int> near = {length, 16, 7, true};
    const RowBounds<Int> seven = row_bounds<Int>(near, 15, 0, length);
    EXPECT_EQ(seven.begin, length - 7);
    EXPECT_EQ(seven.end, length);
  }
  const RowMask<Int> ahead = {0, 16, most, true};  // more tokens than keys
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
