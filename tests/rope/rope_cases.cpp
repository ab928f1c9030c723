
#include "gyre_test.h"
#include "rope/rope_case.h"

namespace gyre::test {
namespace {

struct Convention {
  const char* name;
  RopePairing pairing;
  RopeMode mode;
};

constexpr Convention kConventions[] = {
    {"split plain", RopePairing::split_half, RopeMode::plain},
    {"split sectioned", RopePairing::split_half, RopeMode::sectioned},
    {"split interleaved", RopePairing::split_half, RopeMode::interleaved},
    {"vision", RopePairing::split_half, RopeMode::vision},
    {"vision_2d", RopePairing::split_half, RopeMode::vision_2d},
    {"adjacent plain", RopePairing::adjacent, RopeMode::plain},
    {"adjacent sectioned", RopePairing::adjacent, RopeMode::sectioned},
    {"adjacent interleaved", RopePairing::adjacent, RopeMode::interleaved},
};

constexpr KvLayout kRowLayouts[] = {KvLayout::token_major, KvLayout::head_major, KvLayout::padded};

RopeOptions options_of(const Convention& convention, uint64_t head_dim) {
  RopeOptions options{.pairing = convention.pairing, .mode = convention.mode};
  const auto pairs = static_cast<uint32_t>(head_dim / 2);
  if (convention.mode == RopeMode::vision) {
    options.sections[0] = pairs / 3;
    options.sections[1] = pairs - pairs / 3;
  } else if (convention.mode != RopeMode::plain && convention.mode != RopeMode::vision_2d) {
    options.sections[0] = 3;
    options.sections[1] = 2;
    options.sections[2] = 2;
    options.sections[3] = 1;
  }
  return options;
}

void set_sections(RopeOptions& options, const uint32_t (&sections)[4]) {
  std::copy(std::begin(sections), std::end(sections), std::begin(options.sections));
}

std::string sections_text(const RopeOptions& options) {
  const auto& s = options.sections;
  return str_cat("[", s[0], " ", s[1], " ", s[2], " ", s[3], "]");
}

}  // namespace

// Every pairing with every mode, every pair of dtypes, x alone and with k.
std::vector<RopeCase> rope_convention_cases() {
  std::vector<RopeCase> cases;
  for (const Convention& convention : kConventions) {
    for (size_t i = 0; i < 18; ++i) {
      RopeCase c;
      c.options = options_of(convention, c.head_dim);
      c.x = kFloats[i / 6];
      c.out = kFloats[i / 2 % 3];
      c.k_heads = i % 2 == 0 ? 0 : 5;
      c.in_place = c.x == c.out && i % 2 == 1;
      c.x_layout = kRowLayouts[i % 3];
      c.out_layout = kRowLayouts[(i + i / 3) % 3];
      c.name = str_cat(convention.name, " ", types_text(c), c.k_heads != 0 ? " x+k" : " x",
                       c.in_place ? " in place" : "");
      cases.push_back(c);
    }
  }
  return cases;
}

// Every size that a vector loop or its rest may get wrong.
std::vector<RopeCase> rope_head_dim_cases() {
  constexpr uint64_t kHeadDims[] = {2,  4,  6,  8,   10,  14,  30,  32,  34,
                                    64, 80, 96, 128, 192, 256, 512, 576, 2048};
  std::vector<RopeCase> cases;
  for (const uint64_t head_dim : kHeadDims) {
    for (const Convention& convention : kConventions) {
      if (convention.mode == RopeMode::vision_2d && head_dim % 4 != 0) continue;
      for (const DType dtype : kFloats) {
        RopeCase c{.tokens = 2, .k_heads = 2, .head_dim = head_dim, .x = dtype};
        c.out = kFloats[(static_cast<size_t>(dtype) + head_dim / 2) % 3];
        c.options = options_of(convention, head_dim);
        c.options.base = 500000;
        c.name = str_cat(convention.name, " ", types_text(c), " head_dim ", head_dim);
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// rotary_dim below head_dim, with every convention for partner and exponent; what does not turn
// must come through bit for bit.
std::vector<RopeCase> rope_partial_cases() {
  struct Dims2 {
    uint64_t head_dim;
    uint32_t rotary_dim;
  };
  constexpr Dims2 kDims[] = {{64, 16}, {80, 32}, {128, 2}, {256, 64}, {192, 190}, {20, 6}, {8, 4}};
  std::vector<RopeCase> cases;
  for (size_t i = 0; i < std::size(kDims) * 8 * 3; ++i) {
    const auto [head_dim, rotary_dim] = kDims[i / 24];
    RopeCase c{.tokens = 3, .heads = 5, .head_dim = head_dim};
    c.options.rotary_dim = rotary_dim;
    c.options.partner = (i & 1) != 0 ? RopeSpan::head_dim : RopeSpan::rotary_dim;
    c.options.exponent = (i & 2) != 0 ? RopeSpan::head_dim : RopeSpan::rotary_dim;
    c.options.pairing = (i & 4) != 0 ? RopePairing::adjacent : RopePairing::split_half;
    c.options.base = 1e7;
    c.k_heads = (i & 1) != 0 ? 2 : 0;
    c.x = kFloats[i / 8 % 3];
    c.out = i / 24 % 2 == 0 ? c.x : kFloats[i / 4 % 3];
    c.in_place = c.x == c.out && (i & 2) != 0;
    c.name = str_cat(types_text(c), " rotary_dim ", rotary_dim, " of ", head_dim,
                     (i & 4) != 0 ? " adjacent" : "", (i & 1) != 0 ? " partner by head_dim" : "",
                     (i & 2) != 0 ? " exponent by head_dim" : "");
    cases.push_back(c);
  }
  return cases;
}

std::vector<RopeCase> rope_layout_cases() {
  constexpr KvLayout kLayouts[] = {KvLayout::token_major, KvLayout::head_major, KvLayout::padded,
                                   KvLayout::interleaved};
  std::vector<RopeCase> cases;
  for (const KvLayout x : kLayouts) {
    for (const KvLayout out : kLayouts) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        RopeCase c{.heads = 5, .k_heads = 5, .x = dtype, .out = dtype};
        c.x_layout = x;
        c.out_layout = out;
        c.options.rotary_dim = 14;
        c.name = types_text(c) + " " + layout_name(x) + " to " + layout_name(out);
        cases.push_back(c);
        if (x != out) continue;
        c.in_place = true;
        c.name += " in place";
        cases.push_back(c);
      }
    }
  }
  // Head counts around the number of rows that are done together, and enough tokens for many tasks.
  for (uint64_t heads = 1; heads <= 9; ++heads) {
    RopeCase c{.tokens = 2 * heads - 1, .heads = heads, .k_heads = 10 - heads};
    c.x = c.out = kFloats[heads % 3];
    c.name = str_cat("heads ", heads, " + ", c.k_heads, " tokens ", c.tokens);
    cases.push_back(c);
  }
  for (const Convention& convention : kConventions) {
    RopeCase c{.tokens = 97, .heads = 5, .k_heads = 3, .head_dim = 128, .out = DType::bf16};
    c.x_layout = KvLayout::head_major;
    c.options = options_of(convention, c.head_dim);
    c.name = std::string("large ") + convention.name;
    cases.push_back(c);
    c.out = DType::f32;
    c.in_place = true;
    c.name += " in place";
    cases.push_back(c);
  }
  return cases;
}

std::vector<RopeCase> rope_position_cases() {
  std::vector<RopeCase> cases;
  const auto kinds = {RopePositions::mixed, RopePositions::extreme, RopePositions::unsigned_top};
  for (const Convention& convention : kConventions) {
    for (const RopePositions positions : kinds) {
      for (const uint64_t tokens : {1u, 7u, 33u}) {
        RopeCase c{.tokens = tokens, .positions = positions, .positions_apart = tokens != 33};
        c.options = options_of(convention, c.head_dim);
        c.name = str_cat(convention.name, " positions ", static_cast<int>(positions), " tokens ",
                         tokens, c.positions_apart ? " apart" : "");
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// Sums below, at and above rotary_dim / 2, empty sections, and those of current models.
std::vector<RopeCase> rope_section_cases() {
  constexpr uint32_t kSections[][4] = {
      {0, 0, 0, 0},    {1, 0, 0, 0},   {0, 1, 0, 0},    {0, 0, 0, 5},       {0, 5, 0, 0},
      {3, 2, 1, 0},    {1, 1, 1, 1},   {2, 0, 3, 1},    {11, 11, 10, 0},    {16, 24, 24, 0},
      {24, 20, 20, 0}, {8, 8, 8, 8},   {40, 30, 20, 1}, {100, 100, 100, 9}, {1024, 1, 1024, 1024},
      {0, 0, 7, 0},    {1, 30, 1, 30},
  };
  std::vector<RopeCase> cases;
  for (const auto& sections : kSections) {
    for (const RopeMode mode : {RopeMode::sectioned, RopeMode::interleaved}) {
      for (const uint32_t rotary_dim : {64u, 128u}) {
        RopeCase c{.tokens = 3, .heads = 2, .head_dim = 128};
        c.options.mode = mode;
        c.options.rotary_dim = rotary_dim;
        c.options.pairing = rotary_dim == 128 ? RopePairing::adjacent : RopePairing::split_half;
        set_sections(c.options, sections);
        c.name = str_cat(mode == RopeMode::sectioned ? "sectioned " : "interleaved ",
                         sections_text(c.options), " rotary_dim ", rotary_dim);
        cases.push_back(c);
      }
    }
  }
  // The last two are not for mode vision and must change nothing.
  constexpr uint32_t kVision[][4] = {{32, 32, 0, 0}, {64, 0, 0, 0}, {0, 64, 0, 0}, {13, 51, 9, 77}};
  for (const auto& sections : kVision) {
    RopeCase c{.head_dim = 128, .options = {.mode = RopeMode::vision}};
    set_sections(c.options, sections);
    c.name = "vision " + sections_text(c.options);
    cases.push_back(c);
  }
  return cases;
}

// Frequencies from each source, with factors (1e30: no rotation), magnitudes, and odd bases.
std::vector<RopeCase> rope_frequency_cases() {
  constexpr float kFactors[] = {1.0f, 0.5f, 1e30f, 8.0f, 0.05f, 3.7f, 0.25f, 32.0f, 1e30f, 1.5f};
  std::vector<RopeCase> cases;
  const auto sources = {RopeFrequencySource::base, RopeFrequencySource::radians,
                        RopeFrequencySource::table};
  for (const Convention& convention : kConventions) {
    for (const RopeFrequencySource source : sources) {
      for (const bool factors : {false, true}) {
        RopeCase c;
        c.options = options_of(convention, c.head_dim);
        c.options.magnitude = factors ? 1.3465736f : 0.5f;
        c.frequencies = source;
        if (factors) c.factors.assign(std::begin(kFactors), std::end(kFactors));
        c.name = str_cat(convention.name, " frequencies ", static_cast<int>(source),
                         factors ? " with factors" : "");
        cases.push_back(c);
        if (!factors) continue;
        // An angle that cannot be computed is NaN, and none over infinity.
        c.factors[0] = 0.0f, c.factors[3] = std::numeric_limits<float>::quiet_NaN();
        c.factors[5] = std::numeric_limits<float>::infinity(), c.factors[6] = -0.0f;
        c.name += " that are none";
        cases.push_back(c);
      }
    }
  }
  for (const double base : {1.0, 0.02, 2.5, 500000.0, 1e6, 1e7, 1e30}) {
    cases.push_back(
        {.name = str_cat("base ", base), .k_heads = 1, .options = {.base = base, .magnitude = -2}});
  }
  return cases;
}

// NaN, infinities and values that overflow the output stay in their pair.
std::vector<RopeCase> rope_value_cases() {
  std::vector<RopeCase> cases;
  for (size_t i = 0; i < 18; ++i) {
    RopeCase c{.tokens = 7, .heads = 5, .x = kFloats[i / 6], .out = kFloats[i / 2 % 3]};
    c.specials = true;
    c.options.pairing = i % 2 == 0 ? RopePairing::split_half : RopePairing::adjacent;
    c.options.rotary_dim = 14;
    c.name = str_cat("special values ", types_text(c), i % 2 == 0 ? " split" : " adjacent");
    cases.push_back(c);
  }
  return cases;
}

}  // namespace gyre::test
