// A snapshot with anything wrong in it is refused, and the cache stays as it was.
#include <tuple>

#include "cache/snapshot_fixture.h"
#include "cache/snapshot_seed.h"

namespace gyre::test {
namespace {

class KvSnapshotDamage : public testing::Test {
 public:
  KvSnapshotDamage() : session(device, options()) {
    session.append(4);
    session.append(3);
    session.cache.save(folder / "good");
    good = bytes_of_file(folder / "good");
    session.append(1);  // not what the file holds
    before = session.answers();
    saved = save();
  }

  static KvCacheOptions options() {
    return {.kv_heads = 1,
            .head_dim = 16,
            .v_head_dim = 16,
            .capacity = 12,
            .layers = {{.k = KvFormat::tq4, .v = KvFormat::tq2, .tail = 2, .sink_tokens = 1}},
            .step_tokens = 4};
  }

  Bytes save() const {
    session.cache.save(folder / "now");
    return bytes_of_file(folder / "now");
  }

  testing::AssertionResult load_fails(const Bytes& bytes, const std::vector<std::string>& parts) {
    put_file(folder / "bad", bytes);
    auto result = throws_error(ErrorCode::io, parts, [&] { session.cache.load(folder / "bad"); });
    if (result && session.answers() != before)
      return testing::AssertionFailure() << "the cache has changed";
    return result;
  }

  // A header that is checked for what it says, not for its checksum.
  Bytes lie(size_t offset, size_t width, uint64_t value) const {
    Bytes bytes = good;
    put_number(bytes, offset, width, value);
    sign_header(bytes);
    return bytes;
  }

  // What docs/snapshots.md promises of every file that is read.
  static void expect_consistent(const KvSnapshotInfo& info) {
    const KvCacheOptions wanted = options();
    const KvLayer &layer = info.options.layers.at(0), &must = wanted.layers[0];
    EXPECT_LE(info.length, info.peak);
    EXPECT_LE(info.peak, info.options.capacity);
    EXPECT_LE(info.tail_begin, info.length);
    EXPECT_LE(info.length - info.tail_begin, info.slots.at(0).tail);
    EXPECT_LE(info.options.capacity, wanted.capacity);
    EXPECT_EQ(info.slots.at(0).body, info.options.capacity - layer.sink_tokens);
    EXPECT_EQ(info.slots[0].tail, must.tail + wanted.step_tokens);
    EXPECT_EQ(std::tie(info.options.kv_heads, info.options.head_dim, info.options.v_head_dim),
              std::tie(wanted.kv_heads, wanted.head_dim, wanted.v_head_dim));
    EXPECT_EQ(std::tie(layer.k, layer.v, layer.window, layer.tail, layer.sink_tokens),
              std::tie(must.k, must.v, must.window, must.tail, must.sink_tokens));
  }

  // Saved again it has the file's keys, in their places; its answers are numbers, also after more
  // tokens.
  void expect_usable(Session& other, const std::string& file) const {
    other.cache.save(folder / "again");
    const KvSnapshotInfo wanted = inspect_snapshot(file), got = inspect_snapshot(folder / "again");
    expect_consistent(wanted);
    EXPECT_EQ(std::tie(got.length, got.tail_begin, got.peak),
              std::tie(wanted.length, wanted.tail_begin, wanted.peak));
    ASSERT_EQ(got.sections.size(), wanted.sections.size());
    for (size_t i = 0; i < got.sections.size(); ++i)
      EXPECT_EQ(got.sections[i].checksum, wanted.sections[i].checksum) << i;
    for (int i = 0; i < 2; ++i) {
      const std::vector<uint32_t> answers = other.answers();
      EXPECT_FALSE(answers.empty());
      for (const uint32_t bits : answers) EXPECT_TRUE(std::isfinite(std::bit_cast<float>(bits)));
      const uint64_t length = other.cache.length();
      if (i == 0) other.append(3);
      EXPECT_EQ(other.cache.length(), length + (i == 0 ? 3 : 0));
    }
  }

  Device device = Device::open("cpu", {.threads = 1});
  Folder folder;
  Session session;
  Bytes good, saved;
  std::vector<uint32_t> before;
};

TEST_F(KvSnapshotDamage, TheUndamagedFileLoads) {
  session.cache.load(folder / "good");
  EXPECT_EQ(session.cache.length(), 7u);
  EXPECT_EQ(save(), good);
  EXPECT_LE(good.size(), 1500u);  // small enough for the tests below
}

TEST_F(KvSnapshotDamage, EveryByteFlipped) {
  for (size_t i = 0; i < good.size(); ++i) {
    for (const int flip : {0x01, 0x10, 0x80, 0xFF}) {
      Bytes bytes = good;
      bytes[i] ^= static_cast<std::byte>(flip);
      ASSERT_TRUE(load_fails(bytes, {"kv_cache.load", "bad"})) << "byte " << i << " ^ " << flip;
    }
  }
  EXPECT_EQ(save(), saved);
}

TEST_F(KvSnapshotDamage, CutAtEveryLengthAndLonger) {
  for (size_t size = 0; size < good.size(); ++size) {
    const Bytes bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
    ASSERT_TRUE(load_fails(bytes, {"kv_cache.load", std::to_string(size) + " bytes"})) << size;
  }
  for (const size_t more : {1, 8, 64, 5000}) {
    Bytes bytes = good;
    bytes.resize(good.size() + more);
    ASSERT_TRUE(load_fails(bytes, {std::to_string(bytes.size()) + " bytes"})) << more;
  }
  EXPECT_EQ(save(), saved);
}

TEST_F(KvSnapshotDamage, MessagesSayWhere) {
  const KvSnapshotInfo info = inspect_snapshot(folder / "good");
  for (size_t i = 0; i < info.sections.size(); ++i) {
    Bytes bytes = good;
    bytes[info.sections[i].offset + 1] ^= std::byte{4};
    EXPECT_TRUE(load_fails(
        bytes, {"section " + std::to_string(i) + " (" + section_text(info.sections[i]) + ")",
                "checksum is", "expected", "it is damaged"}));
  }
  Bytes bytes = good;
  bytes[info.header_bytes] = std::byte{1};
  EXPECT_TRUE(load_fails(bytes, {"between sections", "must be 0"}));
  bytes = good;
  bytes[200] ^= std::byte{1};
  EXPECT_TRUE(load_fails(bytes, {"header's checksum is", "expected"}));
  bytes = good;
  bytes[3] = std::byte{'X'};
  EXPECT_TRUE(load_fails(bytes, {"not a snapshot"}));
}

// Version 1 is the same but for the magnitudes of tq4: its codes would be read as other numbers.
TEST_F(KvSnapshotDamage, OtherVersionsAreRefused) {
  constexpr size_t kVersion = 8;  // of docs/snapshots.md
  put_number(good, kVersion, 4, 3);
  EXPECT_EQ(bytes_of_file(folder / "good"), good);
  EXPECT_TRUE(load_fails(lie(kVersion, 4, kKvSnapshotVersion), {"a header of 1 layers"}));
  for (const uint32_t version : {0u, 1u, 2u, kKvSnapshotVersion + 1, 0xFFFFFFFFu}) {
    EXPECT_TRUE(load_fails(lie(kVersion, 4, version),
                           {"bad", "is a snapshot of version " + std::to_string(version),
                            "this library reads version 3 to 4"}));
    EXPECT_ERROR(io, ("of version " + std::to_string(version)), inspect_snapshot(folder / "bad"));
  }
  EXPECT_EQ(save(), saved);
}

// Version 4: heads, dims and owners of layers.
TEST_F(KvSnapshotDamage, LayersThatLie) {
  KvCacheOptions mixed = options();
  mixed.layers.push_back({.k = KvFormat::f16, .v = KvFormat::f16, .head_dim = 24});
  mixed.layers.push_back({.kv_shared_layer_index = 0});
  Session from(device, mixed);
  from.append(3);
  from.cache.save(folder / "good");
  good = bytes_of_file(folder / "good");
  verify_snapshot(folder / "good");
  const auto is_refused = [&](const Bytes& bytes, const std::vector<std::string>& parts) {
    put_file(folder / "bad", bytes);
    return throws_error(ErrorCode::io, parts, [&] { verify_snapshot(folder / "bad"); });
  };
  enum : size_t { kSlots = 120, kKvHeads = 136, kHeadDim = 144, kValueDim = 152, kOwner = 160 };
  const auto fails = [&](size_t layer, size_t field, uint64_t value,
                         const std::vector<std::string>& parts) {
    EXPECT_TRUE(is_refused(lie(104 + layer * 168 + field, 8, value), parts)) << field;
  };
  const char* const other = "are not those of the layers";
  fails(0, kKvHeads, 2, {"layer 2 shares the cache of layer 0, whose kv_heads is 2, got 1"});
  fails(1, kKvHeads, 2, {other});
  fails(1, kKvHeads, 0, {other});
  fails(1, kHeadDim, 16, {other});
  fails(1, kHeadDim, 20, {"layer 1: head_dim", "got 20"});
  fails(1, kHeadDim, 32, {"the sections need more than"});
  fails(1, kValueDim, 32, {"the sections need more than"});
  fails(2, kOwner, 1, {"layer 2 shares the cache of layer 1"});
  fails(2, kOwner, 2, {"layer 2 has 0 slots"});
  fails(2, kOwner, ~uint64_t{0}, {"earlier layer"});
  fails(1, kOwner, 0, {"layer 1 shares the cache of layer 0"});
  fails(2, kSlots, 5, {"layer 2 shares a cache, it has 5"});
  for (size_t i = 0; i < good.size(); ++i) {
    Bytes bytes = good;
    bytes[i] ^= std::byte{0x11};
    ASSERT_TRUE(is_refused(bytes, {"bad"})) << "byte " << i;
  }
}

// Places of docs/snapshots.md.
constexpr size_t kLayer = 104, kTable = kLayer + 136;

TEST_F(KvSnapshotDamage, NumbersThatLie) {
  const uint64_t huge = ~uint64_t{0};
  const auto fails = [&](size_t offset, size_t width, uint64_t value,
                         const std::vector<std::string>& parts) {
    EXPECT_TRUE(load_fails(lie(offset, width, value), parts)) << offset << " = " << value;
  };
  fails(12, 4, 9, {"8 sections, the header says 9"});
  fails(12, 4, 7, {"7 sections has"});
  fails(12, 4, 0xFFFFFFFF, {"at most 8 sections"});
  fails(16, 8, huge, {"a header of 1 layers and 8 sections has 568 bytes"});
  fails(16, 8, 0, {"568"});
  fails(24, 8, huge, {"its header says 18446744073709551615"});
  fails(32, 8, 0, {"kv_heads must be given"});
  fails(32, 8, 2, {"need more than"});
  fails(32, 8, huge, {"kv_heads", "2^14"});
  fails(40, 8, 24, {"need more than"});
  fails(40, 8, huge, {"head_dim"});
  fails(48, 8, 17, {"v_head_dim must be a multiple of 8"});
  fails(56, 8, huge, {"capacity"});
  fails(56, 8, 13, {"11 slots, it must have 12"});
  fails(64, 8, 0, {"step_tokens"});
  fails(64, 8, 1, {"tail of 2 tokens in 6 slots"});
  fails(72, 8, huge, {"length", "must not decrease"});
  fails(72, 8, 8, {"must not decrease"});
  fails(80, 8, huge, {"ring of 6 slots holds keys from 18446744073709551615 to 7"});
  fails(80, 8, 0, {"ring of 6 slots holds keys from 0 to 7"});
  fails(88, 8, 13, {"peak 13", "must not decrease"});
  fails(96, 4, 0, {"layers, the header says 0"});
  fails(96, 4, 2, {"2 layers and 8 sections"});
  fails(96, 4, 1025, {"1024 layers", "1025"});
  put_file(folder / "bad", lie(100, 4, 1));  // as good as any, but of another calibration
  EXPECT_REFUSED(("bad", "calibration 1", "the cache has 0"), session.cache.load(folder / "bad"));
}

TEST_F(KvSnapshotDamage, LayersAndSectionsThatLie) {
  const auto fails = [&](size_t offset, size_t width, uint64_t value,
                         const std::vector<std::string>& parts) {
    EXPECT_TRUE(load_fails(lie(offset, width, value), parts)) << offset << " = " << value;
  };
  fails(kLayer, 1, 'x', {"K of layer 0", "does not know", "\"xq4\", number 18"});
  fails(kLayer + 15, 1, 'x', {"does not know"});
  const char* const fields[] = {"number",     "bits",        "compressed",  "packing",
                                "scale kind", "scale block", "tile tokens", "signs version"};
  for (size_t i = 0; i < std::size(fields); ++i) {
    fails(kLayer + 48 + 16 + 4 * i, 4, 77,
          {"V of layer 0", std::string("the ") + fields[i] + " of tq2", "says 77"});
  }
  fails(kLayer + 96, 8, 3, {"window"});
  fails(kLayer + 104, 8, 13, {"layer 0 has a tail of 13 tokens in 6 slots"});
  fails(kLayer + 104, 8, ~uint64_t{0}, {"the tail of layer 0"});
  fails(kLayer + 112, 8, 12, {"sink_tokens of layer 0"});
  fails(kLayer + 120, 8, ~uint64_t{0}, {"slots, it must have 11"});
  fails(kLayer + 128, 8, ~uint64_t{0}, {"tail of 2 tokens in"});
  fails(kLayer + 128, 8, 1, {"tail of 2 tokens in 1 slots"});
  for (size_t row = 0; row < 8; ++row) {
    const size_t at = kTable + 40 * row;
    const std::string section = "section " + std::to_string(row) + " (";
    fails(at, 4, 1, {section, "its layer must be 0"});
    fails(at + 4, 1, 3, {section, "its segment"});
    fails(at + 5, 1, 2, {section, "its role"});
    fails(at + 6, 1, 9, {section, "its part"});
    fails(at + 7, 1, 99, {section, "its format"});
    fails(at + 8, 8, ~uint64_t{0}, {section, "its slots"});
    fails(at + 16, 8, 64, {section, "its offset"});
    fails(at + 24, 8, ~uint64_t{0}, {section, "its size"});
    fails(at + 32, 8, 0, {section, "checksum is"});
  }
}

// Any number anywhere: refused with the cache as it was, or loaded, and then the cache is the one
// that the file describes and goes on.
TEST_F(KvSnapshotDamage, WhatPassesCanBeUsed) {
  size_t passed = 0, refused = 0;
  for (size_t at = 12; at + 8 <= kTable; at += 4) {
    const uint64_t is = number_at(good, at, 8);
    for (const uint64_t value : {uint64_t{0}, is + 1, is - 1, is << 1, uint64_t{1} << 31, ~is}) {
      const Bytes bad = lie(at, 8, value);
      put_file(folder / "bad", bad);
      Session other(device, options());
      try {
        other.cache.load(folder / "bad");
      } catch (const Error&) {
        ++refused;
        EXPECT_EQ(other.cache.length(), 0u) << at << " = " << value;
        continue;
      }
      passed += bad != good ? 1 : 0;
      ASSERT_NO_THROW(expect_usable(other, folder / "bad")) << at << " = " << value;
    }
  }
  EXPECT_GE(passed, 2u);  // another peak, at the least
  EXPECT_GE(refused, 200u);
}

}  // namespace
}  // namespace gyre::test
