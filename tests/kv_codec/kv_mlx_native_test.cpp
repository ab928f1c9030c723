// The mlx-native formats against the specification in double precision; op_test has the bits. Norms
// may differ in their last places, because the order of a sum is not specified; so may a code whose
// value lies that close to a midpoint.
#include "abi/kv_mlx_native.h"

#include "gyre_test.h"
#include "kv_codec/kv_codec_fixture.h"
#include "kv_codec/kv_mlx_native_reference.h"

namespace gyre::test {
namespace {

constexpr uint64_t kTokens = 5;
constexpr uint64_t kHeads = 2;
constexpr uint64_t kCapacity = 11;
constexpr uint64_t kPosition = 4;

struct MlxNative {
  KvFormat format;
  uint32_t bits;
  uint64_t head_dim;
  float scale_factor = 1;

  uint64_t row_bytes() const { return bits == 4 ? head_dim / 2 : head_dim; }
  uint64_t norms() const { return head_dim == 512 ? 2 : 1; }
  KvShape shape() const {
    return {.format = format,
            .role = KvRole::k,
            .kv_heads = kHeads,
            .capacity = kCapacity,
            .head_dim = head_dim,
            .scale_factor = scale_factor};
  }
  bool flips(uint32_t coordinate) const {
    return (head_dim == 256 || head_dim == 512) && reference::mlx_native_flips(coordinate);
  }
};

std::ostream& operator<<(std::ostream& out, const MlxNative& c) {
  return out << name(c.format) << "_" << c.head_dim;
}

const std::vector<double>& codebook(uint32_t bits) {
  static const std::vector<double> books[] = {
      reference::mlx_native_codebook(4), reference::mlx_native_codebook(5),
      reference::mlx_native_codebook(6), reference::mlx_native_codebook(8)};
  return books[bits == 8 ? 3 : bits - 4];
}

class KvMlxNative : public testing::TestWithParam<MlxNative> {
 protected:
  const MlxNative& c() const { return GetParam(); }

  KvBuffer written(const std::vector<float>& rows) const {
    const KvBuffer cache = KvBuffer::allocate(cpu(), c().shape());
    const Tensor x = tensor_of(cpu(), rows, {kTokens, kHeads, c().head_dim});
    kv_quantize(RunNow(cpu()), {.k = x, .k_cache = cache}, {.position = kPosition});
    return cache;
  }

  uint32_t code(const std::vector<uint8_t>& codes, uint64_t head, uint64_t slot, uint64_t j) const {
    const uint64_t row = (head * kCapacity + slot) * c().row_bytes();
    if (c().bits != 4) return codes[row + j];
    return j % 2 == 0 ? codes[row + j / 2] & 15 : codes[row + j / 2] >> 4;
  }
};

TEST_P(KvMlxNative, BytesAreTheSpecifications) {
  const auto rows = gaussian_rows(kTokens * kHeads, c().head_dim, 12);
  const KvBuffer cache = written(rows);
  EXPECT_EQ(cache.codes.shape(), (Dims{kHeads, kCapacity, c().row_bytes()}));
  EXPECT_EQ(cache.scales.shape(), (Dims{kHeads, kCapacity, c().norms()}));
  const auto codes = bytes_of(cache.codes);
  const auto norms = floats_of(cache.scales);
  uint64_t near = 0;
  for (uint64_t row = 0; row < kTokens * kHeads; ++row) {
    const uint64_t token = row / kHeads, head = row % kHeads, slot = kPosition + token;
    const auto x = std::span(rows).subspan(row * c().head_dim, c().head_dim);
    const reference::MlxNativeRow expected = reference::mlx_native_normalize(x, c().scale_factor);
    for (uint64_t b = 0; b < c().norms(); ++b) {
      const float norm = norms[(head * kCapacity + slot) * c().norms() + b];
      EXPECT_NEAR(norm / expected.norms[b], 1, 1e-6);
    }
    for (uint64_t j = 0; j < c().head_dim; ++j) {
      const auto index = reference::mlx_native_index(codebook(c().bits), expected.normalized[j]);
      near += index.near ? 1 : 0;
      if (!index.near) {
        ASSERT_EQ(code(codes, head, slot, j), index.index) << row << " " << j;
      }
    }
  }
  EXPECT_LE(near, 8u);
}

// With the norms as they are stored there is one right code for every coordinate.
TEST_P(KvMlxNative, CodesFollowTheOrderOfArithmetic) {
  const auto rows = gaussian_rows(kTokens * kHeads, c().head_dim, 21);
  const KvBuffer cache = written(rows);
  const auto codes = bytes_of(cache.codes);
  const auto norms = floats_of(cache.scales);
  for (uint64_t row = 0; row < kTokens * kHeads; ++row) {
    const uint64_t head = row % kHeads, slot = kPosition + row / kHeads;
    const auto x = std::span(rows).subspan(row * c().head_dim, c().head_dim);
    const auto own = std::span(norms).subspan((head * kCapacity + slot) * c().norms(), c().norms());
    const std::vector<float> wanted = reference::mlx_native_norms(x);
    for (size_t b = 0; b < own.size(); ++b) ASSERT_EQ(own[b], wanted[b]) << "norm, to the bit";
    const auto expected = reference::mlx_native_codes(x, own, codebook(c().bits), c().scale_factor);
    for (uint64_t j = 0; j < c().head_dim; ++j) {
      ASSERT_EQ(code(codes, head, slot, j), expected[j]) << row << " " << j;
    }
  }
}

// Nothing finite comes back from a row that was not: nobody can mistake it for one that was stored.
TEST_P(KvMlxNative, NonFiniteRowsDecodeToNothingFinite) {
  const auto clean = gaussian_rows(kTokens * kHeads, c().head_dim, 22);
  const auto expected = decoded(cpu(), written(clean));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
    for (const uint64_t at : {uint64_t{0}, c().head_dim / 2, c().head_dim - 1}) {
      auto rows = clean;
      rows[3 * c().head_dim + at] = bad;
      const auto got = decoded(cpu(), written(rows));
      const uint64_t spoiled = kPosition * kHeads + 3;
      for (uint64_t i = kPosition * kHeads * c().head_dim;
           i < (kPosition + kTokens) * kHeads * c().head_dim; ++i) {
        const bool finite = std::isfinite(got[i]);
        ASSERT_TRUE(i / c().head_dim == spoiled ? !finite : got[i] == expected[i])
            << bad << " at " << at << ": " << i;
      }
    }
  }
}

// The reference adds squares in f32: what leaves it is lost, visibly above and as zeros below.
TEST_P(KvMlxNative, SizesWhoseSquaresLeaveF32AreLost) {
  const auto unit = gaussian_rows(kTokens * kHeads, c().head_dim, 23);
  const auto scaled = [&](float size) {
    auto rows = unit;
    for (float& v : rows) v *= size;
    auto all = decoded(cpu(), written(rows));
    all.erase(all.begin(), all.begin() + static_cast<int64_t>(kPosition * kHeads * c().head_dim));
    all.resize(rows.size());
    return all;
  };
  for (const float v : scaled(1e30f)) ASSERT_FALSE(std::isfinite(v));
  for (const float v : scaled(1e-30f)) ASSERT_EQ(v, 0.0f);
}

// Stray upper bits of 5 and 6-bit bytes are ignored, as the reference's decoders do.
TEST_P(KvMlxNative, DecodersMaskTheirBits) {
  if (c().bits == 4 || c().bits == 8) GTEST_SKIP() << "no bits to spare";
  const KvBuffer cache = written(gaussian_rows(kTokens * kHeads, c().head_dim, 16));
  const auto expected = decoded(cpu(), cache);
  auto codes = bytes_of(cache.codes);
  for (uint8_t& byte : codes) byte = static_cast<uint8_t>(byte | (0xFF << c().bits));
  cache.codes.write_from(std::span<const uint8_t>(codes));
  EXPECT_EQ(decoded(cpu(), cache), expected);
}

// A value on a midpoint goes to the lower index: 0 lies between the two middle centroids.
TEST_P(KvMlxNative, TiesGoDown) {
  const auto lower = static_cast<uint32_t>((1u << c().bits) / 2 - 1);
  std::vector<float> rows(kTokens * kHeads * c().head_dim, 0.0f);
  // Every other row turns into a single spike: the rest of its coordinates are exactly 0.
  for (uint64_t i = 0; i < rows.size(); ++i) {
    const auto j = static_cast<uint32_t>(i % c().head_dim);
    if (i / c().head_dim % 2 == 1) rows[i] = c().flips(j) ? -1.0f : 1.0f;
  }
  const KvBuffer cache = written(rows);
  const auto codes = bytes_of(cache.codes);
  // The spike is the root of head_dim: at 4 less than the last midpoint of 4 bits, 2.40.
  const uint32_t spike = (1u << c().bits) - (c().head_dim == 4 ? 2 : 1);
  for (uint64_t token = 0; token < kTokens; ++token) {
    for (uint64_t j = 0; j < c().head_dim; ++j) {
      ASSERT_EQ(code(codes, 0, kPosition + token, j), lower);
      ASSERT_EQ(code(codes, 1, kPosition + token, j), j == 0 ? spike : lower);
    }
    EXPECT_EQ(floats_of(cache.scales)[(kPosition + token) * c().norms()], 0.0f);
  }
  const auto back = decoded(cpu(), cache);
  for (uint64_t j = 0; j < c().head_dim; ++j)
    ASSERT_EQ(back[kPosition * kHeads * c().head_dim + j], 0.0f);
}

TEST_P(KvMlxNative, ErrorIsThatOfTheTable) {
  constexpr double kErrors[] = {9.501008e-3, 2.504668e-3, 6.486489e-4, 0, 6.274277e-5};
  if (c().head_dim < 128) GTEST_SKIP() << "a coordinate of a short row is not Gaussian";
  if (c().scale_factor != 1)
    GTEST_SKIP() << "what is calibrated has another variance than the table";
  const auto rows = gaussian_rows(2000, c().head_dim, 18);
  const Distortion got = round_trip(cpu(), c().format, c().head_dim, rows);
  EXPECT_NEAR(got.error / kErrors[c().bits - 4], 1, c().head_dim == 128 ? 0.05 : 0.03);
}

// Rotated rows of three whole numbers, searched for: y / n * sqrt(D) and y * (1 / n) * sqrt(D) lie
// on two sides of a midpoint. Sizes other than 256 and 512 divide.
TEST(KvMlxNativeMidpoint, SmallSizesDivideByTheNorm) {
  struct Row {
    uint64_t head_dim;
    float y[3];
    uint32_t code;
  };
  for (const Row& row : {Row{16, {81, 859, 911}, 8},
                         {16, {124, 653, 678}, 9},
                         {16, {542, 495, 526}, 15},
                         {64, {265, 1864, 1867}, 11},
                         {64, {794, 1764, 1805}, 14}}) {
    std::vector<float> x(row.head_dim, 0.0f);
    std::copy_n(row.y, 3, x.begin());
    reference::walsh_hadamard<float>(x);  // exact, and so is its inverse
    for (float& v : x) v /= std::sqrt(static_cast<float>(row.head_dim));
    const KvBuffer cache = encoded(cpu(), KvFormat::mlx_native4, row.head_dim, x);
    EXPECT_EQ(bytes_of(cache.codes)[0] & 15, row.code) << row.head_dim << " " << row.y[0];
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, KvMlxNative,
    testing::Values(
        MlxNative{KvFormat::mlx_native4, 4, 4}, MlxNative{KvFormat::mlx_native4, 4, 8},
        MlxNative{KvFormat::mlx_native4, 4, 16}, MlxNative{KvFormat::mlx_native4, 4, 32},
        MlxNative{KvFormat::mlx_native4, 4, 64}, MlxNative{KvFormat::mlx_native4, 4, 128},
        MlxNative{KvFormat::mlx_native4, 4, 256}, MlxNative{KvFormat::mlx_native4, 4, 512},
        MlxNative{KvFormat::mlx_native5, 5, 256}, MlxNative{KvFormat::mlx_native5, 5, 512},
        MlxNative{KvFormat::mlx_native6, 6, 256}, MlxNative{KvFormat::mlx_native6, 6, 512},
        MlxNative{KvFormat::mlx_native8, 8, 256}, MlxNative{KvFormat::mlx_native8, 8, 512},
        MlxNative{KvFormat::mlx_native4, 4, 1024}, MlxNative{KvFormat::mlx_native4, 4, 512, 0.6f},
        MlxNative{KvFormat::mlx_native5, 5, 512, 1.3f},
        MlxNative{KvFormat::mlx_native6, 6, 512, 16},
        MlxNative{KvFormat::mlx_native8, 8, 512, 22.627417f}),
    [](const auto& test) {
      return std::string(name(test.param.format)) + "_" + std::to_string(test.param.head_dim) +
             (test.param.scale_factor == 1 ? "" : "_scaled");
    });

// Codes change where the reference library says, to the last printed digit.
TEST(KvMlxNativeTables, MidpointsAreThoseOfTheLevelsBeforeRounding) {
  const auto expect = [](uint32_t bits, std::span<const float> table) {
    const std::vector<double> wanted = reference::mlx_native_midpoints(bits);
    ASSERT_EQ(wanted.size(), 2 * table.size() + 1);
    EXPECT_EQ(wanted[table.size()], 0);
    for (size_t i = 0; i < table.size(); ++i) {
      EXPECT_EQ(table[i], static_cast<float>(wanted[table.size() + 1 + i])) << bits << " " << i;
    }
  };
  expect(4, abi::kMlxNative4Midpoints);
  expect(5, abi::kMlxNative5Midpoints);
  expect(6, abi::kMlxNative6Midpoints);
  expect(8, abi::kMlxNative8Midpoints);
}

}  // namespace
}  // namespace gyre::test
