// Input that breaks a careless codec: zeros, sizes whose squares leave f32, values that are not
// finite.
#include <cstdlib>

#include "format_classes.h"
#include "gyre_test.h"
#include "kv_codec/kv_codec_fixture.h"
#include "kv_codec/kv_codec_reference.h"

namespace gyre::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint64_t kHeadDims[] = {16, 24, 80, 128, 512, 576};

double gaussian_error(KvFormat format, uint64_t head_dim) {
  static std::map<std::pair<KvFormat, uint64_t>, double> known;
  const auto [place, fresh] = known.try_emplace({format, head_dim});
  if (fresh)
    place->second = round_trip(cpu(), format, head_dim, gaussian_rows(400, head_dim, 8)).error;
  return place->second;
}

// A scale ends at 2^97 and multiplies levels, so small levels reach less far.
float largest_size(KvFormat format) {
  const reference::KvCoder coder = reference::kv_coder(name(format));
  int top = 0;
  for (uint32_t code = 0; code < 1u << coder.bits; ++code)
    top = std::max(top, std::abs(reference::kv_level_of(coder, code)));
  return top < 31 ? 1e29f : 1e30f;
}

std::vector<float> scaled(std::vector<float> rows, float size) {
  for (float& v : rows) v *= size;
  return rows;
}

class KvDegenerate : public testing::TestWithParam<KvFormat> {};

TEST_P(KvDegenerate, ZerosDecodeToZeros) {
  for (const uint64_t head_dim : kHeadDims) {
    for (const float zero : {0.0f, -0.0f}) {
      const std::vector<float> rows(3 * head_dim, zero);
      for (const float v : decoded(cpu(), encoded(cpu(), GetParam(), head_dim, rows)))
        ASSERT_EQ(v, 0.0f);
    }
  }
}

TEST_P(KvDegenerate, EverySizeDecodesAsRandomInputDoes) {
  for (const uint64_t head_dim : kHeadDims) {
    for (const float size :
         {largest_size(GetParam()), 1e-30f, 1e-40f, 1e19f, 1e-19f, 65504.0f, 1e-12f}) {
      const auto rows = scaled(gaussian_rows(400, head_dim, 8), size);
      const double error = round_trip(cpu(), GetParam(), head_dim, rows).error;
      EXPECT_LE(error, 1.3 * gaussian_error(GetParam(), head_dim))
          << head_dim << " of size " << size;
    }
  }
}

// Constants and one-hot rows at every size do what they do at size 1.
TEST_P(KvDegenerate, StructureAtEverySizeDecodesAsAtOne) {
  for (const uint64_t head_dim : kHeadDims) {
    std::vector<float> rows(3 * head_dim, 1.0f);
    for (uint64_t j = 0; j < head_dim; ++j) {
      rows[head_dim + j] = j == 7 ? 1.0f : 0.0f;
      rows[2 * head_dim + j] = j % 2 == 0 ? 1.0f : -1.0f;
    }
    const double at_one = round_trip(cpu(), GetParam(), head_dim, rows).error;
    for (const float size : {largest_size(GetParam()), 1e-30f, 1e-40f}) {
      const double error = round_trip(cpu(), GetParam(), head_dim, scaled(rows, size)).error;
      // f32 keeps 17 bits at 1e-40.
      EXPECT_NEAR(error, at_one, 0.05 * at_one + 1e-5) << head_dim << " of size " << size;
    }
  }
}

// A scale ends at 2^97: rows that need more are not stored, and nobody can mistake them for rows
// that were.
TEST_P(KvDegenerate, BeyondTheRangeOfTheScaleNothingIsFinite) {
  for (const uint64_t head_dim : kHeadDims) {
    const auto rows = scaled(gaussian_rows(20, head_dim, 9), 1e36f);
    for (const float v : decoded(cpu(), encoded(cpu(), GetParam(), head_dim, rows))) {
      ASSERT_FALSE(std::isfinite(v)) << head_dim;
    }
  }
}

// One NaN or infinity: its transform block is NaN, everything else keeps its bits.
TEST_P(KvDegenerate, NonFiniteCoordinatesStayInTheirBlock) {
  struct Block {
    uint64_t head_dim, begin, end;
  };
  for (const Block block : {Block{80, 0, 64},
                            {80, 64, 80},
                            {24, 16, 24},
                            {128, 0, 128},
                            {576, 0, 512},
                            {576, 512, 576}}) {
    const auto clean = gaussian_rows(11, block.head_dim, 4);
    const auto expected = decoded(cpu(), encoded(cpu(), GetParam(), block.head_dim, clean));
    for (const float bad : {kNaN, kInfinity, -kInfinity}) {
      for (const uint64_t at : {block.begin, block.end - 1}) {
        auto rows = clean;
        rows[6 * block.head_dim + at] = bad;
        const auto got = decoded(cpu(), encoded(cpu(), GetParam(), block.head_dim, rows));
        for (uint64_t i = 0; i < got.size(); ++i) {
          const uint64_t j = i % block.head_dim;
          const bool spoiled = i / block.head_dim == 6 && j >= block.begin && j < block.end;
          ASSERT_TRUE(spoiled ? std::isnan(got[i]) : got[i] == expected[i])
              << block.head_dim << " coordinate " << at << ": row " << i / block.head_dim
              << " coordinate " << j;
        }
      }
    }
  }
}

// This holds between heads and tokens of V, too, where eight tokens share bytes.
TEST_P(KvDegenerate, NonFiniteTokensLeaveTheirTileAlone) {
  constexpr uint64_t kTokens = 13, kHeads = 3, kHeadDim = 80;
  const auto clean = gaussian_rows(kTokens * kHeads, kHeadDim, 6);
  const auto run = [&](const std::vector<float>& values) {
    const Tensor x = tensor_of(cpu(), values, {kTokens, kHeads, kHeadDim});
    const KvBuffer k =
        KvBuffer::allocate(cpu(), {GetParam(), KvRole::k, kHeads, kTokens, kHeadDim});
    const KvBuffer v =
        KvBuffer::allocate(cpu(), {GetParam(), KvRole::v, kHeads, kTokens, kHeadDim});
    kv_quantize(RunNow(cpu()), {.k = x, .k_cache = k, .v = x, .v_cache = v});
    // Above 4 bits the same numbers; below, V's scale is K's times a factor, and each is rounded to
    // 9 bits.
    const float factor = reference::kv_coder(name(GetParam()), true).stretch();
    const float bound = factor == 1.0f ? 0.0f : 0x1p-8f;
    EXPECT_TRUE(std::ranges::equal(decoded(cpu(), k), decoded(cpu(), v), [&](float a, float b) {
      return std::fabs(a * factor - b) <= bound * std::fabs(b) || (std::isnan(a) && std::isnan(b));
    }));
    return decoded(cpu(), v);
  };
  const auto expected = run(clean);
  auto rows = clean;
  rows[(5 * kHeads + 1) * kHeadDim + 3] = kNaN;
  const auto got = run(rows);
  for (uint64_t i = 0; i < got.size(); ++i) {
    const bool spoiled = i / kHeadDim == 5 * kHeads + 1 && i % kHeadDim < 64;
    ASSERT_TRUE(spoiled ? std::isnan(got[i]) : got[i] == expected[i]) << i;
  }
}

// A token written over a NaN is a token like any other.
TEST_P(KvDegenerate, NaNIsGoneWhenItsSlotIsWrittenAgain) {
  const auto clean = gaussian_rows(2, 64, 2);
  auto rows = clean;
  rows[10] = kNaN;
  const KvBuffer cache = encoded(cpu(), GetParam(), 64, rows);
  EXPECT_TRUE(std::isnan(decoded(cpu(), cache)[0]));
  kv_quantize(RunNow(cpu()), {.k = tensor_of(cpu(), clean, {2, 1, 64}), .k_cache = cache});
  EXPECT_EQ(decoded(cpu(), cache), decoded(cpu(), encoded(cpu(), GetParam(), 64, clean)));
}

INSTANTIATE_TEST_SUITE_P(Formats, KvDegenerate, testing::ValuesIn(native_formats()),
                         [](const auto& test) { return std::string(name(test.param)); });

// The stride over a dimension of one entry means nothing: one head, one tile, one token.
TEST(KvDegenerateShape, StridesOverOneEntryDoNotMatter) {
  constexpr uint64_t kHeadDim = 256;
  const Tensor row = tensor_of(cpu(), gaussian_rows(1, kHeadDim, 3), {1, 1, kHeadDim});
  const auto spread = [](const Tensor& tensor) {  // with room behind it
    Dims strides = tensor.strides();
    for (uint32_t d = 0; d < tensor.rank(); ++d)
      if (tensor.shape(d) == 1) strides[d] = 1000;
    return cpu().tensor(tensor.dtype(), {9000}).strided(tensor.shape(), strides);
  };
  const auto expect_nothing_behind = [](const Tensor& tensor) {
    const uint64_t end = tensor.address() + tensor.bytes();
    const Tensor behind = cpu().wrap(reinterpret_cast<void*>(end), DType::u8, {6000});
    EXPECT_TRUE(
        std::ranges::all_of(behind.data<const uint8_t>(), [](uint8_t b) { return b == 0; }));
  };
  for (const KvFormat format : kv_formats()) {
    if (!describe(format).compressed) continue;
    for (const KvRole role : {KvRole::k, KvRole::v}) {
      const KvBuffer plain = KvBuffer::allocate(cpu(), {format, role, 1, 1, kHeadDim});
      const KvBuffer odd = {plain.shape, spread(plain.codes), spread(plain.scales)};
      for (const KvBuffer& cache : {plain, odd}) store(cpu(), row, cache);
      EXPECT_EQ(decoded(cpu(), odd), decoded(cpu(), plain)) << name(format);
      expect_nothing_behind(odd.codes);
      expect_nothing_behind(odd.scales);
    }
  }
}

}  // namespace
}  // namespace gyre::test
