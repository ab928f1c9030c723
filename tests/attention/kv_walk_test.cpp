// The walk over a ring's tiles against a model that takes one key after the other.
#include "abi/kv_walk.h"

#include "gyre_test.h"

namespace {

using gyre::abi::kKvTile;
using gyre::abi::kv_slot;
using gyre::abi::kv_walk;
using gyre::abi::KvRun;
using gyre::abi::KvWalk;

template <class UInt>
class KvWalkOf : public testing::Test {};
using Widths = testing::Types<uint32_t, uint64_t>;
TYPED_TEST_SUITE(KvWalkOf, Widths);

// What a position holds: a slot of the cache, and the key there, if one of the walk's is.
struct Place {
  uint64_t slot;
  bool has_key;
  uint64_t key;
};

// Tile by tile as keys come: a tile is begun anew when the ring's end was passed.
std::vector<Place> model(uint64_t capacity, uint64_t slot, uint64_t count) {
  std::vector<Place> places;
  uint64_t next = 0;
  for (uint64_t at = slot; next < count;) {
    const uint64_t first = at / kKvTile * kKvTile;
    uint64_t taken = first;
    for (uint64_t i = first; i < first + kKvTile; ++i) {
      const bool has_key = i >= at && i < capacity && next < count;
      places.push_back({i, has_key, next});
      if (has_key) ++next, taken = i + 1;
    }
    at = taken == capacity ? 0 : taken;
  }
  return places;
}

template <class UInt>
void check_positions(const KvWalk<UInt>& walk, const std::vector<Place>& places, UInt chunk) {
  for (UInt at = 0; at < walk.tiles * kKvTile + 3 * chunk; ++at) {
    const bool has_key = at < places.size() && places[at].has_key;
    ASSERT_EQ(walk.valid(at), has_key) << "position " << at;
    ASSERT_EQ(walk.key_of(at), has_key ? places[at].key : KvWalk<UInt>::kNoKey);
    if (has_key) {
      ASSERT_EQ(walk.key_at(at), places[at].key);
    }
    if (at < places.size()) {
      ASSERT_EQ(walk.slot(at), places[at].slot);
    }
    bool whole = true;
    for (UInt i = 0; i < chunk && whole; ++i) {
      whole = at + i < places.size() && places[at + i].has_key &&
              places[at + i].slot == places[at].slot + i;
    }
    ASSERT_EQ(walk.whole(at), whole) << "chunk at " << at;
  }
}

// Runs cover all keys, in order, and never pass the ring's end.
template <class UInt>
void check_runs(const KvWalk<UInt>& walk, const std::vector<Place>& places, UInt limit) {
  uint64_t key = 0;
  for (UInt index = 0; index < walk.tiles;) {
    const KvRun<UInt> run = walk.run(index, limit);
    ASSERT_GE(run.tiles, 1u);
    ASSERT_LE(run.tiles, limit);
    const UInt begin = index * kKvTile;
    ASSERT_GE(run.begin, begin);
    ASSERT_LE(run.end, begin + run.tiles * kKvTile);
    ASSERT_LT(run.begin, run.end);
    for (UInt at = begin; at < begin + run.tiles * kKvTile; ++at) {
      ASSERT_EQ(places[at].has_key, at >= run.begin && at < run.end);
      ASSERT_EQ(places[at].slot, run.tile * kKvTile + (at - begin));
      if (places[at].has_key) {
        ASSERT_EQ(places[at].key, key++);
      }
    }
    index += run.tiles;
    // A run that is shorter than it may be ends where the ring or the walk does.
    const bool short_run = run.tiles < limit;
    ASSERT_TRUE(!short_run || index == walk.tiles_a || index == walk.tiles);
  }
  uint64_t keys = 0;
  for (const Place& place : places) keys += place.has_key ? 1 : 0;
  ASSERT_EQ(key, keys);
}

TYPED_TEST(KvWalkOf, EverySlotAndCountOfSmallRings) {
  using UInt = TypeParam;
  for (const UInt capacity : {1u, 7u, 8u, 9u, 16u, 21u, 40u, 67u}) {
    for (UInt slot = 0; slot < capacity; ++slot) {
      for (UInt count = 1; count <= capacity; ++count) {
        const std::vector<Place> places = model(capacity, slot, count);
        for (const UInt chunk : {8u, 16u, 64u}) {
          const KvWalk<UInt> walk = kv_walk<UInt>(capacity, slot, count, chunk);
          SCOPED_TRACE(testing::Message() << "capacity " << capacity << ", slot " << slot
                                          << ", count " << count << ", chunk " << chunk);
          ASSERT_EQ(walk.tiles * kKvTile, places.size());
          check_positions<UInt>(walk, places, chunk);
          check_runs<UInt>(walk, places, chunk / kKvTile);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TYPED_TEST(KvWalkOf, NoKeys) {
  using UInt = TypeParam;
  for (UInt slot = 0; slot < 20; ++slot) {
    const KvWalk<UInt> walk = kv_walk<UInt>(20, slot, 0, 8);
    for (UInt at = 0; at < 64; ++at) {
      EXPECT_FALSE(walk.valid(at));
      EXPECT_FALSE(walk.whole(at));
      EXPECT_EQ(walk.key_of(at), KvWalk<UInt>::kNoKey);
    }
  }
}

TYPED_TEST(KvWalkOf, PinsEveryFieldOnce) {
  using UInt = TypeParam;
  std::vector<UInt> pinned;
  const auto pin = [&](UInt x) {
    pinned.push_back(x);
    return x;
  };
  const KvWalk<UInt> w = kv_walk<UInt>(100, 90, 30, 8, pin);
  const std::vector<UInt> fields = {w.first_tile, w.skip,  w.end_a,    w.tiles_a,
                                    w.end_b,      w.tiles, w.starts_a, w.starts_b};
  EXPECT_EQ(pinned, fields);
  EXPECT_EQ(fields, (std::vector<UInt>{11, 2, 12, 2, 36, 5, 3, 13}));
}

TYPED_TEST(KvWalkOf, LargestRing) {
  using UInt = TypeParam;
  // A 32-bit caller has less than 2^31 slots.
  const UInt capacity = sizeof(UInt) == 4 ? 0x7FFFFFF1u : static_cast<UInt>(0x7FFFFFFFFFFFFFF1ull);
  const UInt slot = capacity - 5, count = capacity;
  const KvWalk<UInt> walk = kv_walk<UInt>(capacity, slot, count, 64);
  EXPECT_EQ(walk.first_tile, slot / kKvTile);
  EXPECT_EQ(walk.key_of(walk.skip), 0u);
  EXPECT_EQ(walk.key_of(walk.end_b - 1), count - 1);
  EXPECT_EQ(walk.slot(walk.end_b - 1), slot - 1);
  EXPECT_TRUE(walk.whole(walk.tiles_a * kKvTile));
}

TYPED_TEST(KvWalkOf, SlotIsPositionModuloCapacity) {
  using UInt = TypeParam;
  for (const UInt capacity : {1u, 7u, 8u, 1000u}) {
    for (UInt place = 0; place < 3000; ++place)
      ASSERT_EQ(kv_slot(place, capacity), place % capacity);
  }
  const UInt large = ~UInt{0} - 6;
  EXPECT_EQ(kv_slot<UInt>(large, 1000), large % 1000);
  EXPECT_EQ(kv_slot<UInt>(large, large - 3), UInt{3});
}

// Runs of pages cover all keys in order, stay in a page and in a block of 64 keys counted from key
// 0, and begin where the last one ended, wherever the walk began.
TYPED_TEST(KvWalkOf, RunsOfPages) {
  using gyre::abi::kv_page_run;
  for (const TypeParam page : {8, 16, 24, 64, 128, 136}) {
    for (const TypeParam first : {0, 1, 7, 8, 60, 64, 100, 127}) {
      for (const TypeParam last : {1, 8, 65, 130, 300}) {
        TypeParam key = first;
        while (key < last) {
          const auto run = kv_page_run<TypeParam>(key, last, page, 64);
          ASSERT_EQ(run.begin, key);
          ASSERT_LT(run.begin, run.end);
          ASSERT_EQ(run.begin / page, (run.end - 1) / page);
          ASSERT_EQ(run.begin / 64, (run.end - 1) / 64);
          ASSERT_TRUE(run.end == last || run.end % page == 0 || run.end % 64 == 0);
          ASSERT_EQ(run.tile, key % page / kKvTile);
          key = run.end;
        }
        ASSERT_TRUE(key == last || first >= last);
      }
    }
  }
}

TYPED_TEST(KvWalkOf, EntriesOfPages) {
  using gyre::abi::kv_page_entry;
  EXPECT_EQ(kv_page_entry<TypeParam>(0, 16, 0, 0), 0u);
  EXPECT_EQ(kv_page_entry<TypeParam>(15, 16, 3, 0), 3u);
  EXPECT_EQ(kv_page_entry<TypeParam>(16, 16, 3, 0), 4u);
  EXPECT_EQ(kv_page_entry<TypeParam>(160, 16, 3, 4), 3u + 10 % 4);
}

}  // namespace
