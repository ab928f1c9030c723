// kv_quantize with calibrations, and kv_transform: every bit from the documented arithmetic.
#include <bit>

#include "gyre_test.h"
#include "kv_codec/calibrated_reference.h"
#include "kv_codec/kv_codec_case.h"

namespace gyre::test {
namespace {

// Normal numbers times `spread`, and `diagonal` on the diagonal of each [n, n].
std::vector<float> random_matrices(const std::string& seed, uint64_t heads, uint64_t n,
                                   float spread, float diagonal) {
  std::mt19937 random = random_of(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(heads * n * n);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = spread * normal(random) + (i / n % n == i % n ? diagonal : 0.0f);
  return values;
}

// Values of one of K and V; empty: not given.
struct CalibrationValues {
  std::vector<float> matrix, inverse, mean, factor, diagonal, gains;

  reference::CalibratedRowInputs head(uint64_t g, uint64_t n) const {
    const auto at = [&](const std::vector<float>& of, uint64_t size) {
      return of.empty() ? nullptr : of.data() + g * size;
    };
    reference::CalibratedRowInputs in{at(matrix, n * n), at(inverse, n * n), at(mean, n),
                                      at(factor, n * n), at(diagonal, n)};
    if (!gains.empty()) in.gains = gains;
    return in;
  }
};

struct KvCalibratedCase {
  std::string name;
  DType source = DType::f32;
  uint64_t tokens = 3, heads = 2, capacity = 9;
  KvStream k, v;
  bool transform = true, mean = false, feedback = true, v_plain = false;
  uint64_t gains = 3;
  KvValues values = KvValues::everyday;

  const KvStream& stream(bool is_v) const { return is_v ? v : k; }
  bool calibrated(bool is_v) const { return !(is_v && v_plain); }
  CalibrationValues calibration(bool is_v) const {
    const uint64_t n = stream(is_v).head_dim;
    const std::string seed = name + (is_v ? "v" : "k");
    const float spread = 0.5f / static_cast<float>(n);
    CalibrationValues made;
    if (transform) {
      made.matrix = random_matrices(seed + "b", heads, n, spread, 1.0f);
      made.inverse = random_matrices(seed + "i", heads, n, spread, 1.0f);
    }
    if (transform && mean) made.mean = kv_values(KvValues::everyday, heads, n, seed + "m");
    if (feedback) {
      made.factor = random_matrices(seed + "f", heads, n, 0.1f, 0.0f);
      made.diagonal = kv_values(KvValues::everyday, heads, n, seed + "d");
      for (float& d : made.diagonal) d = 0.5f + std::fabs(d);
    }
    constexpr float kGains[] = {0.9f, 1.0f, 1.1f, 0.82f, 1.05f, 0.95f, 1.12f, 2.0f};
    made.gains.assign(kGains, kGains + gains);
    return made;
  }
};

// Blocks of a stream: source, codes, scales, then those of its calibration.
void add_stream(const KvCalibratedCase& c, bool is_v, std::vector<Block>& blocks) {
  const KvStream& stream = c.stream(is_v);
  const uint64_t n = stream.head_dim;
  const KvRole role = is_v ? KvRole::v : KvRole::k;
  const auto places = places_of({stream.format, role, c.heads, c.capacity, n});
  const CalibrationValues calibration =
      c.calibrated(is_v) ? c.calibration(is_v) : CalibrationValues{};
  const auto values = kv_values(c.values, c.tokens * c.heads, n, c.name + (is_v ? "v" : "k"));
  Block source, codes, scales;
  source.dtype = c.source;
  source.before.resize(values.size() * size_bytes(c.source));
  codes = plain_block(DType::u8, pattern_bytes(c.heads * places.head_bytes(), is_v ? 5 : 4));
  scales = plain_block(DType::u8, pattern_bytes(c.heads * places.scale_head_bytes(), is_v ? 7 : 6));
  for (uint64_t t = 0; t < c.tokens; ++t) {
    for (uint64_t g = 0; g < c.heads; ++g) {
      std::vector<float> row(n);
      for (uint64_t e = 0; e < n; ++e) {
        const uint64_t at = (t * c.heads + g) * n + e;
        reference::store_value(c.source, source.before.data(), at, values[at]);
        row[e] = reference::rounded(c.source, values[at]);
      }
      reference::KvCodes made;
      if (c.calibrated(is_v)) {
        made =
            reference::calibrated_row(name(stream.format), is_v, row, calibration.head(g, n)).coded;
      } else {
        made = reference::kv_feedback(places.coder, row);
      }
      reference::kv_store(places, 2 + t, made, codes.after.data() + g * places.head_bytes(),
                          scales.after.data() + g * places.scale_head_bytes());
    }
  }
  source.after = source.before;
  for (Block* block : {&source, &codes, &scales}) blocks.push_back(std::move(*block));
  for (const auto* of : {&calibration.matrix, &calibration.inverse, &calibration.mean,
                         &calibration.factor, &calibration.diagonal})
    blocks.push_back(plain_block(DType::f32, of->empty() ? std::vector<float>{0.0f} : *of));
}

KvCalibration calibration_of(const KvCalibratedCase& c, bool is_v, std::span<const Tensor> t) {
  KvCalibration made;
  if (!c.calibrated(is_v)) return made;
  const uint64_t n = c.stream(is_v).head_dim;
  const Dims matrix = {c.heads, n, n}, vector = {c.heads, n};
  if (c.transform)
    made.transform.matrix = t[0].reshape(matrix), made.transform.inverse = t[1].reshape(matrix);
  if (c.transform && c.mean) made.transform.mean = t[2].reshape(vector);
  if (c.feedback)
    made.feedback.factor = t[3].reshape(matrix), made.feedback.diagonal = t[4].reshape(vector);
  made.feedback.gains = c.calibration(is_v).gains;
  return made;
}

OpCase make_case(const KvCalibratedCase& c) {
  const auto supported = [c](const Device& device) {
    return has_kernel(device, "kv_feedback") &&
           supports(device, KvQuantizeTypes{c.source, c.k.format});
  };
  const auto make = [c] {
    OpRun run;
    add_stream(c, false, run.blocks);
    add_stream(c, true, run.blocks);
    run.commands = 2;
    run.record = [c](Encoder& encoder, std::span<const Tensor> t) {
      const auto cache = [&](bool is_v, std::span<const Tensor> of) {
        const KvShape shape{c.stream(is_v).format, is_v ? KvRole::v : KvRole::k, c.heads,
                            c.capacity, c.stream(is_v).head_dim};
        return KvBuffer{shape, of[1].reshape(kv_codes_shape(shape)),
                        of[2].reshape(kv_scales_shape(shape))};
      };
      const auto k = t.subspan(0, 8), v = t.subspan(8, 8);
      kv_quantize(encoder,
                  {.k = k[0].reshape({c.tokens, c.heads, c.k.head_dim}),
                   .k_cache = cache(false, k),
                   .v = v[0].reshape({c.tokens, c.heads, c.v.head_dim}),
                   .v_cache = cache(true, v),
                   .k_calibration = calibration_of(c, false, k.subspan(3)),
                   .v_calibration = calibration_of(c, true, v.subspan(3))},
                  {.position = 2});
    };
    return run;
  };
  return {.name = "kv_calibrated " + c.name, .supported = supported, .make = make};
}

constexpr KvValues kKinds[] = {KvValues::everyday, KvValues::extreme, KvValues::ties};

// What the i-th case is calibrated with, and its name. Formats, source and tokens are there.
OpCase varied_case(KvCalibratedCase c, uint64_t i, uint64_t kind) {
  c.values = kKinds[kind];
  if (c.values == KvValues::extreme) c.tokens = 6;
  // GPUs take many tokens in tiles; which cases have them depends on nothing else.
  if (static_cast<uint32_t>(i * 2654435761u) >> 30 == 0) c.tokens = 16 + i % 11, c.capacity = 30;
  c.transform = i % 4 != 3;
  c.mean = i % 2 == 0;
  c.feedback = i % 5 != 4;
  c.v_plain = i % 7 == 6;
  c.gains = i % 9;
  c.name = str_cat(c.k.format, "/", c.k.head_dim, " ", c.v.format, "/", c.v.head_dim, " from ",
                   c.source, " values ", kind, c.transform ? " transform" : "",
                   c.transform && c.mean ? " mean" : "", c.feedback ? " feedback" : "",
                   c.v_plain ? " plain v" : "", " gains ", c.gains);
  if (!c.transform && !c.feedback && c.gains == 0) c.gains = 1;  // a calibration has something
  return make_case(c);
}

// Rows of two scale blocks. The emulated GPU has kernels for these formats and sources.
void add_cases_of_two_blocks(std::vector<OpCase>& cases) {
  const KvCalibratedCase wanted[] = {
      {.source = DType::f32, .k = {KvFormat::tq2, 512}, .v = {KvFormat::tq2, 512}},
      {.source = DType::f16, .k = {KvFormat::tq3, 512}, .v = {KvFormat::tq3, 512}},
      {.source = DType::bf16, .k = {KvFormat::tq4, 512}, .v = {KvFormat::tq4, 512}},
      {.source = DType::f32, .k = {KvFormat::tq5, 512}, .v = {KvFormat::tq5, 64}},
      {.source = DType::f16, .k = {KvFormat::tq6, 512}, .v = {KvFormat::tq6, 512}},
      {.source = DType::bf16, .k = {KvFormat::tq8, 512}, .v = {KvFormat::tq2, 512}},
      {.source = DType::f32, .k = {KvFormat::tq5, 64}, .v = {KvFormat::tq8, 512}},
      {.source = DType::f32, .k = {KvFormat::tq4, 512}, .v = {KvFormat::tq4, 256}},
  };
  for (uint64_t i = 0; i < 3 * std::size(wanted); ++i)
    cases.push_back(varied_case(wanted[i / 3], i, i % 3));
}

struct KvTransformCase {
  std::string name;
  DType x = DType::f32, out = DType::f32;
  uint64_t tokens = 3, kv_heads = 2, group = 3, head_dim = 64;
  bool before = true, after = true, in_place = false;
};

OpRun make_run(const KvTransformCase& c) {
  const uint64_t n = c.head_dim, heads = c.kv_heads * c.group, count = c.tokens * heads * n;
  const auto matrix = random_matrices(c.name + "b", c.kv_heads, n, 0.1f, 1.0f);
  const auto before = kv_values(KvValues::everyday, c.kv_heads, n, c.name + "m");
  const auto after = kv_values(KvValues::everyday, c.kv_heads, n, c.name + "a");
  const auto values = kv_values(KvValues::everyday, c.tokens * heads, n, c.name);
  Block x, out = plain_block(c.out, pattern_bytes(count * size_bytes(c.out), 3));
  x.dtype = c.x;
  x.before.resize(count * size_bytes(c.x));
  for (uint64_t row = 0; row < c.tokens * heads; ++row) {
    const uint64_t g = row % heads / c.group;
    std::vector<float> y(n);
    for (uint64_t e = 0; e < n; ++e) {
      reference::store_value(c.x, x.before.data(), row * n + e, values[row * n + e]);
      y[e] = reference::rounded(c.x, values[row * n + e]);
      if (c.before) y[e] = y[e] - before[g * n + e];
    }
    std::vector<float> z = reference::calibrated_product(matrix.data() + g * n * n, y);
    for (uint64_t e = 0; e < n; ++e) {
      if (c.after) z[e] = z[e] + after[g * n + e];
      reference::store_value(c.out, out.after.data(), row * n + e, z[e]);
    }
  }
  x.after = c.in_place ? out.after : x.before;
  OpRun run;
  run.blocks = {x, plain_block(DType::f32, matrix), plain_block(DType::f32, before),
                plain_block(DType::f32, after)};
  if (!c.in_place) run.blocks.push_back(out);
  run.record = [c, heads](Encoder& encoder, std::span<const Tensor> t) {
    const Dims rows = {c.tokens, heads, c.head_dim};
    const Dims vector = {c.kv_heads, c.head_dim};
    kv_transform(encoder, {.x = t[0].reshape(rows),
                           .matrix = t[1].reshape({c.kv_heads, c.head_dim, c.head_dim}),
                           .before = c.before ? t[2].reshape(vector) : Tensor(),
                           .after = c.after ? t[3].reshape(vector) : Tensor(),
                           .out = t[c.in_place ? 0 : 4].reshape(rows)});
  };
  return run;
}

}  // namespace

// Every format in either role, every head dim, dtype and kind of rows; each part of a calibration
// there and not there; every number of gains.
std::vector<OpCase> kv_calibrated_cases() {
  constexpr uint64_t kDims[] = {16, 32, 64, 128, 256};
  const uint64_t formats = native_formats().size();
  std::vector<OpCase> cases;
  for (uint64_t f = 0; f < formats; ++f) {
    for (uint64_t d = 0; d < std::size(kDims); ++d) {
      for (uint64_t kind = 0; kind < 3; ++kind) {
        const uint64_t i = f * 15 + d * 3 + kind;
        KvCalibratedCase c{.source = kFloats[(i + i / 3) % 3]};
        c.k = {native_formats()[f], kDims[d]};
        c.v = {native_formats()[(f + kind) % formats], kDims[(d + kind) % std::size(kDims)]};
        cases.push_back(varied_case(c, i, kind));
      }
    }
  }
  add_cases_of_two_blocks(cases);
  return cases;
}

std::vector<OpCase> kv_transform_cases() {
  std::vector<OpCase> cases;
  uint64_t i = 0;
  for (const uint64_t head_dim : {16u, 48u, 64u, 80u, 128u, 144u, 256u, 272u, 528u, 1024u}) {
    for (const uint64_t tokens : {1u, 5u, 33u}) {
      KvTransformCase c;
      c.head_dim = head_dim;
      c.tokens = head_dim > 256 ? 2 : tokens;
      c.x = kFloats[i % 3];
      c.out = kFloats[i / 3 % 3];
      c.group = 1 + i % 4;
      c.before = i % 2 == 0;
      c.after = i % 3 == 0;
      c.in_place = c.x == c.out && i % 2 == 1;
      c.name = str_cat("head_dim ", head_dim, " tokens ", c.tokens, " group ", c.group, " ", c.x,
                       " to ", c.out, c.in_place ? " in place" : "", " number ", i++);
      cases.push_back(kernel_case("kv_transform", c.name, [c] { return make_run(c); }));
    }
  }
  return cases;
}

}  // namespace gyre::test
