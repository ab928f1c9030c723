// kv_quantize and kv_dequantize over the mlx-native formats: codes and norms bit for bit,
// decoded values to within their last places.
#include "gyre_test.h"
#include "kv_codec/kv_memory.h"
#include "kv_codec/kv_mlx_native_reference.h"

namespace gyre::test {
namespace {

using reference::KvSide;

constexpr KvLayout kLayout = KvLayout::head_major;  // compressed formats have one of their own
constexpr uint64_t kHeads = 2, kCapacity = 9, kTokens = 5, kPosition = 6;  // wraps

struct MlxNativeCase {
  DType dtype = DType::f32;  // of the source, or of what is decoded
  KvShape k, v;              // v.head_dim 0: K alone
  KvDomain domain = KvDomain::restored;
  std::string name = {};
};

KvSide side_of(DType dtype, const KvShape& shape) {
  return {dtype, KvLayout::token_major, kTokens, kHeads, shape.head_dim, 0};
}

// Source, codes and scales of one stream.
void add_quantized(const MlxNativeCase& c, const KvShape& shape, std::mt19937& random, OpRun& run) {
  const KvSide side = side_of(c.dtype, shape);
  Block source;
  source.dtype = c.dtype;
  source.before.resize(side.elements() * size_bytes(c.dtype));
  KvMemory cache =
      kv_memory(shape, kLayout, [&](uint64_t) { return normal_row(shape, DType::f32, random); });
  for (uint64_t t = 0; t < kTokens; ++t) {
    for (uint64_t h = 0; h < kHeads; ++h) {
      const std::vector<float> row = normal_row(shape, c.dtype, random);
      reference::store_row(side, source.before, t, h, row);
      expect_kv_row(shape, kLayout, {(kPosition + t) % kCapacity, h}, row, cache);
    }
  }
  source.after = source.before;
  for (const Block& block : {source, cache.codes, cache.scales}) run.blocks.push_back(block);
}

OpRun make_quantize(const MlxNativeCase& c) {
  OpRun run;
  std::mt19937 random = random_of(c.name);
  add_quantized(c, c.k, random, run);
  if (c.v.head_dim != 0) add_quantized(c, c.v, random, run);
  run.record = [c](Encoder& encoder, std::span<const Tensor> t) {
    KvQuantizeInputs in;
    in.k = kv_view(t[0], side_of(c.dtype, c.k));
    in.k_cache = kv_buffer(c.k, kLayout, t[1], t[2]);
    if (c.v.head_dim != 0) {
      in.v = kv_view(t[3], side_of(c.dtype, c.v));
      in.v_cache = kv_buffer(c.v, kLayout, t[4], t[5]);
    }
    kv_quantize(encoder, in, {.position = kPosition, .cache = CacheKind::ring});
  };
  return run;
}

double length_of(std::span<const double> row) {
  double sum = 0;
  for (const double x : row) sum += x * x;
  return std::sqrt(sum);
}

OpRun make_dequantize(const MlxNativeCase& c) {
  constexpr uint64_t kFirst = 2;
  OpRun run;
  std::mt19937 random = random_of(c.name);
  const KvMemory cache =
      kv_memory(c.k, kLayout, [&](uint64_t) { return normal_row(c.k, DType::f32, random); });
  const KvSide side = side_of(c.dtype, c.k);
  Block out = plain_block(c.dtype, pattern_bytes(side.elements() * size_bytes(c.dtype), 3));
  const uint64_t dim = c.k.head_dim;
  for (uint64_t row = 0; row < kTokens * kHeads; ++row) {
    std::vector<double> values(cache.values.begin() + (kFirst * kHeads + row) * dim,
                               cache.values.begin() + (kFirst * kHeads + row + 1) * dim);
    const double bound = 1e-6 * length_of(values);  // f32 sums of up to 1024 products
    if (c.domain == KvDomain::rotated) values = reference::mlx_native_rotated(values);
    for (uint64_t e = 0; e < dim; ++e)
      expect_near(out, side.index(row / kHeads, row % kHeads, e), values[e], bound);
  }
  run.blocks = {cache.codes, cache.scales, out};
  run.record = [c, side](Encoder& encoder, std::span<const Tensor> t) {
    kv_dequantize(encoder, {kv_buffer(c.k, kLayout, t[0], t[1]), kv_view(t[2], side)},
                  {.first_slot = kFirst, .domain = c.domain});
  };
  return run;
}

OpCase made(MlxNativeCase c, const std::string& what, OpRun (*make)(const MlxNativeCase&)) {
  c.name = what;
  const auto supported = [c](const Device& device) {
    return supports(device, KvQuantizeTypes{c.dtype, c.k.format});
  };
  return {.name = what, .supported = supported, .make = [c, make] { return make(c); }};
}

std::string text(const KvShape& shape) {
  return str_cat(shape.format, "/", shape.head_dim, shape.scale_factor != 1 ? " scaled" : "");
}

// A head_dim, and at 512 a scale factor.
struct Size {
  uint64_t head_dim;
  float scale_factor = 1;
};
constexpr Size kSizes[] = {{4},   {8},   {16},   {32},        {64},     {128},
                           {256}, {512}, {1024}, {512, 0.7f}, {512, 16}};

KvShape shape_of(KvFormat format, KvRole role, const Size& size) {
  return {.format = format,
          .role = role,
          .kv_heads = kHeads,
          .capacity = kCapacity,
          .head_dim = size.head_dim,
          .scale_factor = size.scale_factor};
}

}  // namespace

// Every format in either role, at each size it stores, from every dtype, alone and with another.
std::vector<OpCase> kv_mlx_native_quantize_cases() {
  std::vector<OpCase> cases;
  size_t i = 0;
  for (const KvFormat format : formats_of(FormatClass::mlx_native)) {
    for (const Size& size : kSizes) {
      if (!stores(format, size.head_dim)) continue;
      for (const KvRole role : {KvRole::k, KvRole::v}) {
        const KvShape shape = shape_of(format, role, size);
        KvShape other{format_of(FormatClass::levels, i), KvRole::k, kHeads, kCapacity, 80};
        MlxNativeCase c{.dtype = kFloats[i % 3]};
        c.k = role == KvRole::k ? shape : other;
        if (role == KvRole::v) c.v = shape;
        if (role == KvRole::k && i % 4 == 0) other.role = KvRole::v, c.v = other;
        const std::string beside = c.v.head_dim != 0 ? " with " + text(c.v) : " alone";
        cases.push_back(
            made(c, str_cat("kv_quantize ", text(c.k), beside, " from ", c.dtype), make_quantize));
        ++i;
      }
    }
  }
  return cases;
}

std::vector<OpCase> kv_mlx_native_dequantize_cases() {
  std::vector<OpCase> cases;
  for (const KvFormat format : formats_of(FormatClass::mlx_native)) {
    for (const Size& size : kSizes) {
      if (!stores(format, size.head_dim)) continue;
      for (const DType out : kFloats) {
        for (const KvDomain domain : {KvDomain::restored, KvDomain::rotated}) {
          MlxNativeCase c{.dtype = out};
          c.k = shape_of(format, out == DType::f16 ? KvRole::v : KvRole::k, size);
          c.domain = domain;
          cases.push_back(made(c,
                               str_cat("kv_dequantize ", text(c.k), " to ", out,
                                       domain == KvDomain::rotated ? " rotated" : " restored"),
                               make_dequantize));
        }
      }
    }
  }
  return cases;
}

}  // namespace gyre::test
