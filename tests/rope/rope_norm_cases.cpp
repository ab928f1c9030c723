
#include "gyre_test.h"
#include "rope/rope_case.h"

namespace gyre::test {
namespace {

constexpr std::optional<DType> kWeights[] = {std::nullopt, DType::f32, DType::f16, DType::bf16};

std::string weight_text(const RopeNorm& norm) {
  return norm.weight ? str_cat("weight ", *norm.weight) : "no weight";
}

}  // namespace

// Every pair of dtypes with every kind of weight, both pairings, x alone and with k.
std::vector<RopeCase> norm_convention_cases() {
  std::vector<RopeCase> cases;
  for (size_t i = 0; i < 9 * 4 * 4; ++i) {
    RopeCase c;
    c.x = kFloats[i / 48];
    c.out = kFloats[i / 16 % 3];
    c.norm = RopeNorm{.weight = kWeights[i / 4 % 4]};
    c.norm->weight_offset = i % 3 == 0 ? 1.0f : 0.0f;
    c.options.pairing = (i & 1) != 0 ? RopePairing::adjacent : RopePairing::split_half;
    c.k_heads = (i & 2) != 0 ? 6 : 0;
    c.in_place = c.x == c.out && i % 5 < 2;
    c.name = str_cat(types_text(c), " ", weight_text(*c.norm), i % 3 == 0 ? " + 1" : "",
                     (i & 1) != 0 ? " adjacent" : " split", c.k_heads != 0 ? " x+k" : " x",
                     c.in_place ? " in place" : "");
    cases.push_back(c);
  }
  // Both halves of the head have their own part of the weight.
  for (const RopeMode mode :
       {RopeMode::vision, RopeMode::vision_2d, RopeMode::sectioned, RopeMode::interleaved}) {
    for (const uint64_t head_dim : {20u, 72u, 128u}) {
      RopeCase c{.k_heads = 2, .head_dim = head_dim, .norm = RopeNorm{.weight = DType::bf16}};
      c.options.mode = mode;
      c.options.sections[0] = static_cast<uint32_t>(head_dim / 8);
      c.options.sections[1] = static_cast<uint32_t>(head_dim / 2 - head_dim / 8);
      c.name = str_cat("mode ", static_cast<int>(mode), " head_dim ", head_dim);
      cases.push_back(c);
    }
  }
  return cases;
}

// A second output of each dtype in each layout, beside an output of each dtype.
std::vector<RopeCase> norm_output_cases() {
  std::vector<RopeCase> cases;
  constexpr KvLayout kLayouts[] = {KvLayout::head_major, KvLayout::token_major, KvLayout::padded};
  for (size_t i = 0; i < 9 * 3 * 2; ++i) {
    RopeCase c;
    c.out = kFloats[i / 18];
    c.x = i % 4 == 0 ? c.out : DType::f32;
    c.in_place = c.x == c.out && i % 5 == 0;
    c.norm = RopeNorm{
        .weight = DType::f32, .second = kFloats[i / 6 % 3], .second_layout = kLayouts[i / 2 % 3]};
    c.k_heads = i % 2 == 0 ? 0 : 5;
    c.options.rotary_dim = i % 3 == 0 ? 6 : 20;
    c.options.pairing = i % 7 == 0 ? RopePairing::adjacent : RopePairing::split_half;
    c.name =
        str_cat(types_text(c), " second ", *c.norm->second, " ", layout_name(c.norm->second_layout),
                c.k_heads != 0 ? " x+k" : " x", c.in_place ? " in place" : "", " ", i);
    cases.push_back(c);
  }
  return cases;
}

namespace {

void add_head_dims(std::vector<RopeCase>& cases) {
  constexpr uint64_t kHeadDims[] = {2, 4, 6, 10, 30, 64, 80, 96, 128, 192, 256, 512, 576, 2048};
  for (const uint64_t head_dim : kHeadDims) {
    for (const RopePairing pairing : {RopePairing::split_half, RopePairing::adjacent}) {
      RopeCase c{.tokens = 2, .heads = 5, .head_dim = head_dim};
      c.x = c.out = head_dim % 3 == 0 ? DType::bf16 : DType::f32;
      c.norm = RopeNorm{.weight = DType::f32};
      c.options.pairing = pairing;
      c.name = str_cat(types_text(c), " head_dim ", head_dim,
                       pairing == RopePairing::adjacent ? " adjacent" : " split");
      cases.push_back(c);
    }
  }
}

void add_partial(std::vector<RopeCase>& cases) {
  for (const uint32_t rotary_dim : {2u, 16u, 50u, 62u}) {
    for (size_t i = 0; i < 8; ++i) {
      RopeCase c{.k_heads = 1, .head_dim = 64, .norm = RopeNorm{.weight = DType::f16}};
      c.options.rotary_dim = rotary_dim;
      c.options.partner = (i & 1) != 0 ? RopeSpan::head_dim : RopeSpan::rotary_dim;
      c.options.exponent = (i & 2) != 0 ? RopeSpan::head_dim : RopeSpan::rotary_dim;
      c.options.pairing = (i & 4) != 0 ? RopePairing::adjacent : RopePairing::split_half;
      c.options.magnitude = 1.25f;
      c.name = str_cat("rotary_dim ", rotary_dim, " of 64, convention ", i);
      cases.push_back(c);
    }
  }
}

// Without rotation any head_dim will do.
void add_norm_alone(std::vector<RopeCase>& cases) {
  for (const uint64_t head_dim : {1u, 7u, 64u, 99u, 576u, 2047u, 2048u}) {
    for (const DType dtype : kFloats) {
      RopeCase c{.tokens = 3, .heads = 6, .k_heads = 1, .head_dim = head_dim, .x = dtype};
      c.norm = RopeNorm{.turns = false, .weight = DType::bf16, .second = dtype};
      c.name = str_cat(types_text(c), " norm alone, head_dim ", head_dim);
      cases.push_back(c);
    }
  }
}

// Rows whose squares leave f32, or are lost there: the norm is right all the same.
void add_sizes(std::vector<RopeCase>& cases) {
  struct Size {
    float size, epsilon;
  };
  constexpr Size kSizes[] = {{0x1p100f, 0.0f},  {0x1p66f, 0x1p126f},   {0x1p70f, 1e-6f},
                             {0x1p-60f, 0.0f},  {0x1p-60f, 0x1p-121f}, {0x1p-100f, 0.0f},
                             {0x1p-60f, 1e-6f}, {0.0f, 0.25f}};
  for (const Size& s : kSizes) {
    RopeCase c{.tokens = 2, .k_heads = 1, .size = s.size};
    c.norm = RopeNorm{.epsilon = s.epsilon, .weight = DType::f32};
    c.name =
        str_cat("values of size ", std::log2(s.size), " epsilon of size ", std::log2(s.epsilon));
    cases.push_back(c);
  }
}

}  // namespace

std::vector<RopeCase> norm_shape_cases() {
  std::vector<RopeCase> cases;
  add_head_dims(cases);
  add_partial(cases);
  add_norm_alone(cases);
  add_sizes(cases);
  for (const float epsilon : {0.0f, 0.5f, 1e6f}) {
    cases.push_back({.name = str_cat("epsilon ", epsilon),
                     .norm = RopeNorm{.epsilon = epsilon, .weight_offset = 1}});
  }
  for (const auto source : {RopeFrequencySource::radians, RopeFrequencySource::table}) {
    cases.push_back({.name = str_cat("frequencies ", static_cast<int>(source)),
                     .positions = RopePositions::extreme,
                     .positions_apart = true,
                     .frequencies = source,
                     .factors = std::vector<float>(10, 2.0f),
                     .norm = RopeNorm{}});
  }
  RopeCase large{.name = "large", .tokens = 65, .heads = 7, .k_heads = 2, .head_dim = 128};
  large.x = DType::bf16;
  large.norm = RopeNorm{.weight = DType::bf16, .second = DType::f16};
  cases.push_back(large);
  large.out = DType::bf16;
  large.in_place = true;
  large.name = "large in place";
  cases.push_back(large);
  return cases;
}

}  // namespace gyre::test
