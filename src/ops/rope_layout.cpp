#include "ops/rope_layout.h"

#include <bit>
#include <cmath>
#include <vector>

#include "runtime/device_impl.h"
#include "runtime/require.h"

namespace gyre {
namespace {

bool is_vision(RopeMode mode) { return mode == RopeMode::vision || mode == RopeMode::vision_2d; }

void check_dims(const char* op, uint64_t head_dim, uint32_t rotary_dim,
                const RopeOptions& options) {
  require(head_dim > 0 && head_dim % 2 == 0, op, ": head_dim must be even and at least 2, got ",
          head_dim);
  require(rotary_dim >= 2 && rotary_dim % 2 == 0, op,
          ": rotary_dim must be even and at least 2, got ", rotary_dim);
  require(rotary_dim <= head_dim, op, ": rotary_dim must be at most head_dim ", head_dim, ", got ",
          rotary_dim);
  require(std::isfinite(options.base) && options.base > 0, op,
          ": base must be finite and positive, got ", options.base);
  require(options.pairing <= RopePairing::adjacent, op, ": ",
          static_cast<uint32_t>(options.pairing), " is not a pairing");
  require(options.partner <= RopeSpan::head_dim && options.exponent <= RopeSpan::head_dim, op,
          ": partner and exponent must be rotary_dim or head_dim, got ",
          static_cast<uint32_t>(options.partner), " and ", static_cast<uint32_t>(options.exponent));
  require(std::isfinite(options.magnitude), op, ": magnitude must be finite, got ",
          options.magnitude);
}

void check_mode(const char* op, uint64_t head_dim, uint32_t rotary_dim,
                const RopeOptions& options) {
  const uint32_t* s = options.sections;
  switch (options.mode) {
    case RopeMode::plain:
      break;
    case RopeMode::sectioned:
    case RopeMode::interleaved:
      for (const uint32_t section : options.sections) {
        require(section <= abi::kRopeMaxPairs, op, ": a section must be at most ",
                abi::kRopeMaxPairs, " pairs, got ", section);
      }
      break;
    case RopeMode::vision:
      require(rotary_dim == head_dim, op, ": mode vision turns all of head_dim ", head_dim,
              ", got rotary_dim ", rotary_dim);
      require(uint64_t{s[0]} + s[1] == head_dim / 2, op,
              ": mode vision needs sections[0] + sections[1] = head_dim / 2 = ", head_dim / 2,
              ", got ", s[0], " + ", s[1]);
      break;
    case RopeMode::vision_2d:
      require(rotary_dim == head_dim, op, ": mode vision_2d turns all of head_dim ", head_dim,
              ", got rotary_dim ", rotary_dim);
      require(head_dim % 4 == 0, op, ": mode vision_2d needs head_dim in steps of 4, got ",
              head_dim);
      break;
    default:
      fail(ErrorCode::invalid_argument, op, ": ", static_cast<uint32_t>(options.mode),
           " is not a rope mode; there are 0, 2, 8, 24, 40");
  }
  require(options.pairing == RopePairing::split_half || !is_vision(options.mode), op,
          ": the vision modes pair split halves, got adjacent pairs");
}

// 2 * exponent index / denominator of pair p, by mode.
long double exponent(uint64_t head_dim, const RopeOptions& options, const RopeLayout& layout,
                     uint32_t pair) {
  const auto half = static_cast<long double>(head_dim) / 2;
  switch (options.mode) {
    case RopeMode::vision: {
      const uint32_t sector = pair % (options.sections[0] + options.sections[1]);
      const uint32_t start = sector < options.sections[0] ? 0 : options.sections[0];
      return 2.0L * (sector - start) / half;
    }
    case RopeMode::vision_2d:
      return 2.0L * (pair % layout.block_pairs) / half;
    default: {
      const long double denominator = options.exponent == RopeSpan::rotary_dim
                                          ? layout.rotary_dim
                                          : static_cast<long double>(head_dim);
      return 2.0L * pair / denominator;
    }
  }
}

}  // namespace

RopeLayout checked_rope_layout(const char* op, uint64_t head_dim, const RopeOptions& options) {
  const uint32_t rotary_dim = options.rotary_dim.value_or(static_cast<uint32_t>(head_dim));
  check_dims(op, head_dim, rotary_dim, options);
  check_mode(op, head_dim, rotary_dim, options);
  RopeLayout layout;
  layout.rotary_dim = rotary_dim;
  layout.pairs = rotary_dim / 2;
  layout.block_pairs = layout.pairs;
  const auto dim = static_cast<uint32_t>(head_dim);
  layout.distance = (options.partner == RopeSpan::rotary_dim ? rotary_dim : dim) / 2;
  layout.block_stride = dim;
  if (options.mode == RopeMode::vision_2d) {
    layout.blocks = 2;
    layout.block_pairs = dim / 4;
    layout.distance = dim / 4;
    layout.block_stride = dim / 2;
    layout.axes = 2;
  } else if (options.mode != RopeMode::plain) {
    layout.axes = 4;
  }
  return layout;
}

Tensor base_frequencies(DeviceImpl& device, uint64_t head_dim, const RopeOptions& options,
                        const RopeLayout& layout) {
  constexpr uint64_t kRopeBase = 1;
  const uint64_t dims = head_dim << 32 | layout.rotary_dim;
  const uint64_t convention =
      static_cast<uint64_t>(options.exponent) << 8 | static_cast<uint64_t>(options.mode);
  // Only mode vision's exponents depend on the sections.
  const bool restarts = options.mode == RopeMode::vision;
  const uint64_t sections =
      restarts ? uint64_t{options.sections[0]} << 32 | options.sections[1] : 0;
  const ConstantCache::Key key = {
      kRopeBase, std::bit_cast<uint64_t>(options.base), dims, convention, sections, 0};
  return device.constants().find_or_make(key, [&] {
    std::vector<long double> radians;
    for (uint32_t pair = 0; pair < layout.pairs; ++pair) {
      radians.push_back(std::pow(static_cast<long double>(options.base),
                                 -exponent(head_dim, options, layout, pair)));
    }
    return exact_rope_table(device_of(device.shared_from_this()), radians);
  });
}

}  // namespace gyre
