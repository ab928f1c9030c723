// What callers of the codec rely on beyond the bytes of one call, which op_test compares.
#include "expect_error.h"
#include "format_classes.h"
#include "gyre_test.h"
#include "kv_codec/kv_codec_fixture.h"

namespace gyre::test {
namespace {

// Tokens written one by one share bytes of V: the commands must not run at the same time.
TEST(KvCodecUse, TokensOfOneTileInSeparateCommands) {
  const Device device = Device::open("cpu", {.threads = 3});
  const auto rows = gaussian_rows(24, 64, 24);
  const Tensor x = tensor_of(device, rows, {24, 1, 64});
  const auto run = [&](uint64_t tokens_per_command) {
    const KvBuffer k = KvBuffer::allocate(device, {KvFormat::tq4, KvRole::k, 1, 24, 64});
    const KvBuffer v = KvBuffer::allocate(device, {KvFormat::tq3, KvRole::v, 1, 24, 64});
    Encoder encoder(device);
    for (uint64_t t = 0; t < 24; t += tokens_per_command) {
      kv_quantize(encoder, {.k = x, .k_cache = k, .v = x, .v_cache = v},
                  {.position = t, .source_begin = t, .tokens = tokens_per_command});
    }
    encoder.submit().wait();
    return std::pair(bytes_of(v.codes), bytes_of(v.scales));
  };
  const auto expected = run(24);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(run(1), expected);
  EXPECT_EQ(run(3), expected);
}

TEST(KvCodecUse, EveryHeadDimIsStoredOrRefused) {
  for (uint64_t head_dim = 0; head_dim <= 1100; head_dim += 4) {
    const KvShape shape{KvFormat::tq4, KvRole::k, 1, 40, head_dim};
    const bool stored = head_dim % 8 == 0 && head_dim >= 16 && head_dim <= 1024;
    if (!stored) {
      EXPECT_REFUSED(("got " + std::to_string(head_dim)), KvBuffer::allocate(cpu(), shape));
      continue;
    }
    const auto rows = gaussian_rows(40, head_dim, 25);
    EXPECT_LE(round_trip(cpu(), KvFormat::tq4, head_dim, rows).error, 0.0125) << head_dim;
  }
}

// A buffer says how it was written, so that memory of another format is refused, not misread.
TEST(KvCodecUse, TheFormatTravelsWithTheData) {
  const auto rows = gaussian_rows(4, 256, 26);
  for (const KvFormat format : {KvFormat::tq4, KvFormat::mlx_native4}) {
    const KvBuffer cache = encoded(cpu(), format, 256, rows);
    const KvFormatInfo info = describe(cache.shape.format);
    EXPECT_EQ(info.format, format);
    EXPECT_EQ(info.bits, 4u);
    EXPECT_TRUE(info.compressed);
    EXPECT_EQ(info.signs_version, format == KvFormat::tq4 ? 1u : 0u);
    EXPECT_EQ(info.scale, format == KvFormat::tq4 ? KvScaleKind::u8e8 : KvScaleKind::f32_norm);
    // One call undoes everything, without the caller knowing a convention.
    EXPECT_LE(distortion(rows, decoded(cpu(), cache), 256).error, 0.013);
    EXPECT_EQ(info.packing, format == KvFormat::tq4 ? KvPacking::planes : KvPacking::nibbles);
    EXPECT_EQ(info.scale_block, 256u);
    // The other format's tag on this memory is refused, not misread.
    KvBuffer wrong = cache;
    wrong.shape.format = format == KvFormat::tq4 ? KvFormat::mlx_native4 : KvFormat::tq4;
    const Tensor out = cpu().tensor(DType::f32, {4, 1, 256});
    Encoder encoder(cpu());
    EXPECT_REFUSED(("kv_dequantize"), kv_dequantize(encoder, {wrong, out}));
    // So are signs of a generator that this library does not have.
    wrong = cache;
    EXPECT_EQ(wrong.shape.signs_version, kKvSignsVersion);
    wrong.shape.signs_version = 7;
    if (format == KvFormat::tq4) {
      EXPECT_REFUSED(("kv_dequantize", "signs of version 1", "got 7"),
                     kv_dequantize(encoder, {wrong, out}));
    }
  }
}

TEST(KvCodecUse, EveryFormatSaysHowItsBytesLie) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
    EXPECT_EQ(describe(format).packing, KvPacking::dense) << name(format);
    EXPECT_EQ(describe(format).scale_block, 0u) << name(format);
  }
  for (const KvFormat format : native_formats()) {
    EXPECT_EQ(describe(format).packing, KvPacking::planes) << name(format);
    EXPECT_EQ(describe(format).scale_block, 256u) << name(format);
    // The bits of its name, and 16 for each row's scale.
    for (const KvRole role : {KvRole::k, KvRole::v}) {
      const KvBuffer cache = KvBuffer::allocate(cpu(), {format, role, 4, 64, 128});
      EXPECT_EQ(cache.bytes() * 8, 4 * 64 * (128 * describe(format).bits + 16)) << name(format);
    }
  }
  for (const KvFormat format :
       {KvFormat::mlx_native5, KvFormat::mlx_native6, KvFormat::mlx_native8}) {
    EXPECT_EQ(describe(format).packing, KvPacking::bytes) << name(format);
    // A row of 512 has two norms.
    EXPECT_EQ(describe(format).scale_block, 256u) << name(format);
    EXPECT_EQ(kv_scales_shape({format, KvRole::k, 1, 1, 512})[2], 2u) << name(format);
  }
}

TEST(KvCodecUse, MemoryThatWasNeverWrittenDecodesToZero) {
  for (const KvFormat format :
       {KvFormat::tq4, KvFormat::tq8, KvFormat::mlx_native4, KvFormat::mlx_native8}) {
    const KvBuffer untouched = KvBuffer::allocate(cpu(), {format, KvRole::v, 2, 9, 512});
    for (const float v : decoded(cpu(), untouched)) ASSERT_EQ(v, 0.0f) << name(format);
  }
}

}  // namespace
}  // namespace gyre::test
