// The functions of the reference library's codec, each as the Gyre call that replaces it, against
// the formulas of the specification (sections 3.1 to 3.6). kv_mlx_native_test.cpp looks at the
// bytes more closely.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "expect_error.h"
#include "kv_codec/kv_codec_fixture.h"
#include "kv_codec/kv_mlx_native_reference.h"

namespace gyre::test {
namespace {

const Device& cpu() {
  static const Device device = Device::open("cpu");
  return device;
}

std::vector<double> transformed(std::span<const float> x, bool signs_before, bool signs_after) {
  std::vector<double> y(x.begin(), x.end());
  const auto flip = [&](bool wanted) {
    for (uint32_t j = 0; wanted && j < y.size(); ++j)
      y[j] = reference::mlx_native_flips(j) ? -y[j] : y[j];
  };
  flip(signs_before);
  for (size_t h = 1; h < y.size(); h *= 2) reference::butterfly_stage<double>(y, h);
  for (double& v : y) v /= std::sqrt(static_cast<double>(y.size()));
  flip(signs_after);
  return y;
}

// In place on [heads, D], each value within 1e-5 (the reference's own bound is 1e-4) and the energy
// kept.
void expect_transform(uint64_t points, const HadamardOptions& options) {
  const bool signs = options.signs == HadamardSigns::mlx_native;
  const bool forward = options.direction == HadamardDirection::forward;
  const auto x = gaussian_rows(3, points, static_cast<uint32_t>(points));
  const Tensor tensor = tensor_of(cpu(), x, {3, points});
  Encoder encoder(cpu());
  hadamard(encoder, {tensor, tensor}, options);
  encoder.submit().wait();
  const auto got = floats_of(tensor);
  for (uint64_t row = 0; row < 3; ++row) {
    const auto expected = transformed(std::span(x).subspan(row * points, points), signs && forward,
                                      signs && !forward);
    double before = 0, after = 0;
    for (uint64_t j = 0; j < points; ++j) {
      ASSERT_NEAR(got[row * points + j], expected[j], 1e-5) << points;
      before += double{x[row * points + j]} * x[row * points + j];
      after += double{got[row * points + j]} * got[row * points + j];
    }
    EXPECT_NEAR(after / before, 1, 1e-6);
  }
}

// Every code of slot `slot`, and its norms.
void expect_row(const KvBuffer& cache, uint32_t bits, uint64_t slot, std::span<const float> x) {
  const auto codes = bytes_of(cache.codes);
  const auto norms = floats_of(cache.scales);
  const auto row = reference::mlx_native_normalize(x, 1);
  static const std::vector<double> books[] = {
      reference::mlx_native_codebook(4), reference::mlx_native_codebook(5),
      reference::mlx_native_codebook(6), reference::mlx_native_codebook(8)};
  const auto& book = books[bits == 8 ? 3 : bits - 4];
  for (size_t b = 0; b < row.norms.size(); ++b) {
    EXPECT_NEAR(norms[slot * row.norms.size() + b] / row.norms[b], 1, 1e-6);
  }
  const uint64_t begin = slot * (bits == 4 ? x.size() / 2 : x.size());
  for (uint64_t j = 0; j < x.size(); ++j) {
    const auto index = reference::mlx_native_index(book, row.normalized[j]);
    const uint32_t code = bits == 4 ? codes[begin + j / 2] >> (j % 2 * 4) & 15 : codes[begin + j];
    if (!index.near) {
      ASSERT_EQ(code, index.index) << j;
    }
  }
}

// One token or several at the end of a ring of 6 slots; a linear cache refuses them.
void expect_quantize(KvFormat format, uint32_t bits, uint64_t head_dim, uint64_t tokens) {
  const auto rows = gaussian_rows(tokens, head_dim, 40);
  const Tensor x = tensor_of(cpu(), rows, {tokens, 1, head_dim});
  const KvBuffer cache = KvBuffer::allocate(cpu(), {format, KvRole::k, 1, 6, head_dim});
  Encoder encoder(cpu());
  EXPECT_TRUE(refused({"6 slots", "position 11"},
                      [&] { kv_quantize(encoder, {.k = x, .k_cache = cache}, {.position = 11}); }));
  kv_quantize(encoder, {.k = x, .k_cache = cache}, {.position = 11, .cache = CacheKind::ring});
  EXPECT_EQ(encoder.size(), 1u);
  encoder.submit().wait();
  for (uint64_t t = 0; t < tokens; ++t) {
    expect_row(cache, bits, (11 + t) % 6, std::span(rows).subspan(t * head_dim, head_dim));
  }
}

// One slot in the rotated domain is the transform of the token, as near as the bits allow.
void expect_dequantize(KvFormat format, uint64_t head_dim, double error) {
  const auto rows = gaussian_rows(6, head_dim, 41);
  const KvBuffer cache = encoded(cpu(), format, head_dim, rows);
  const Tensor out = cpu().tensor(DType::f32, {1, 1, head_dim});
  Encoder encoder(cpu());
  kv_dequantize(encoder, {cache, out}, {.first_slot = 4, .domain = KvDomain::rotated});
  encoder.submit().wait();
  const bool signs = head_dim >= 256;
  const auto y = transformed(std::span(rows).subspan(4 * head_dim, head_dim), signs, false);
  const std::vector<float> expected(y.begin(), y.end());
  EXPECT_LE(distortion(expected, floats_of(out), head_dim).error, error) << head_dim;
}

TEST(KvCodecParity, HadamardQuantizeKv) {
  for (const uint64_t head_dim : {64u, 128u, 256u, 512u})
    expect_quantize(KvFormat::mlx_native4, 4, head_dim, 1);
}

TEST(KvCodecParity, HadamardQuantizeKvSeq) {
  for (const uint64_t head_dim : {64u, 128u, 256u, 512u})
    expect_quantize(KvFormat::mlx_native4, 4, head_dim, 5);
}

TEST(KvCodecParity, HadamardQuantizeKvHb) {
  for (const uint64_t head_dim : {256u, 512u}) {
    expect_quantize(KvFormat::mlx_native5, 5, head_dim, 1);
    expect_quantize(KvFormat::mlx_native6, 6, head_dim, 1);
    expect_quantize(KvFormat::mlx_native8, 8, head_dim, 4);
  }
}

TEST(KvCodecParity, FwhtF32) {
  for (const uint64_t points : {256u, 512u}) expect_transform(points, {});
}

TEST(KvCodecParity, FwhtSignPremultF32) {
  for (const uint64_t points : {256u, 512u})
    expect_transform(points, {.signs = HadamardSigns::mlx_native});
}

TEST(KvCodecParity, FwhtSignUndoF32) {
  for (const uint64_t points : {256u, 512u}) {
    expect_transform(points,
                     {.direction = HadamardDirection::inverse, .signs = HadamardSigns::mlx_native});
  }
}

TEST(KvCodecParity, HadamardTransform) {
  for (uint64_t points = 2; points <= 8192; points *= 2) expect_transform(points, {});
  const Tensor x = cpu().tensor(DType::f32, {96});
  Encoder encoder(cpu());
  EXPECT_TRUE(refused({"power of two", "got 12"}, [&] {
    hadamard(encoder, {x.slice(0, 0, 12), x.slice(0, 0, 12)});
  }));
}

TEST(KvCodecParity, TqDequantizeKv) {
  for (const uint64_t head_dim : {64u, 128u, 256u, 512u})
    expect_dequantize(KvFormat::mlx_native4, head_dim, 0.016);
}

TEST(KvCodecParity, TqDequantizeHbKv) {
  for (const uint64_t head_dim : {256u, 512u}) {
    expect_dequantize(KvFormat::mlx_native5, head_dim, 0.004);
    expect_dequantize(KvFormat::mlx_native6, head_dim, 0.001);
    expect_dequantize(KvFormat::mlx_native8, head_dim, 0.00012);
  }
}

// The round trip in the original domain. Its 2 and 3-bit streams have no reader here: tq2 and tq3
// do their work.
TEST(KvCodecParity, CpuTurboquantQuantizeAndDequantize) {
  for (const uint64_t head_dim : {128u, 256u}) {
    const auto rows = gaussian_rows(200, head_dim, 42);
    EXPECT_LE(round_trip(cpu(), KvFormat::tq2, head_dim, rows).error, 1.05 * 0.117482 + 0.004);
    EXPECT_LE(round_trip(cpu(), KvFormat::tq3, head_dim, rows).error, 1.05 * 0.034548);
    EXPECT_LE(round_trip(cpu(), KvFormat::tq4, head_dim, rows).error, 1.05 * 0.009533);
    EXPECT_LE(round_trip(cpu(), KvFormat::mlx_native4, head_dim, rows).error, 1.05 * 0.009501);
  }
}

}  // namespace
}  // namespace gyre::test
