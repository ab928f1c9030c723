#include "kv_codec/kv_codec_case.h"

#include "gyre_test.h"
#include "subnormals.h"

namespace gyre::test {
namespace {

using reference::KvCodes;
using reference::KvPlaces;
using reference::KvSide;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void fill_extreme_row(uint64_t kind, std::mt19937& random, std::span<float> row) {
  std::normal_distribution<float> everyday;
  constexpr float kSizes[] = {1e30f, 1e-30f, 1e-34f, 1.0f, 1.0f, 1.0f, 0.0f, 1e19f, 1e-13f, 3e4f};
  const float size = kSizes[kind % std::size(kSizes)];
  for (float& v : row) v = everyday(random) * size;
  // One block out of range among ordinary ones: the first, which is the largest, or the last.
  if (kind % 10 == 3) row.front() = kNaN;
  if (kind % 10 == 4) row.back() = -kInfinity;
  if (kind % 10 == 5) {
    const auto spans = reference::kv_transform_spans(static_cast<uint32_t>(row.size()));
    for (uint32_t j = 0; j < spans.back().size; ++j) row[spans.back().begin + j] *= 1e25f;
  }
  if (kind % 10 == 9) {
    std::fill(row.begin(), row.end(), 0.0f);
    row[random() % row.size()] = -size;
  }
}

uint64_t quantized_tokens(const KvQuantizeCase& c) {
  return c.options.tokens.value_or(c.source_tokens - c.options.source_begin);
}

KvShape shape_of(const KvQuantizeCase& c, bool v) {
  const KvStream& stream = v ? *c.v : *c.k;
  return {stream.format, v ? KvRole::v : KvRole::k, c.heads, c.capacity, stream.head_dim};
}

KvSide source_of(const KvQuantizeCase& c, bool v) {
  return {c.source, c.layout, c.source_tokens, c.heads, v ? c.v->head_dim : c.k->head_dim, 0};
}

// Multiplies a row by the last factor before its first scale changes, or by the next one. There the
// order in which squares are added shows, which anywhere else rounding hides.
void move_to_scale_edge(const reference::KvCoder& coder, bool beyond, std::span<float> row) {
  const std::vector<float> given(row.begin(), row.end());
  const auto scale_at = [&](float factor) {
    for (size_t j = 0; j < row.size(); ++j) row[j] = given[j] * factor;
    return reference::kv_feedback(coder, row).scales.front();
  };
  const uint16_t first = scale_at(1.0f);
  float low = 1.0f, high = 1.01f;  // two steps of a scale
  while (std::nextafter(low, high) != high) {
    const float middle = (low + high) / 2;
    (scale_at(middle) == first ? low : high) = middle;
  }
  scale_at(beyond ? high : low);
}

Bytes source_bytes(const KvQuantizeCase& c, bool v) {
  const KvSide side = source_of(c, v);
  auto values =
      kv_values(c.values, side.tokens * side.heads, side.head_dim, c.name + (v ? "v" : "k"));
  for (uint64_t r = 0; c.values == KvValues::scale_edges && r < side.tokens * side.heads; ++r) {
    move_to_scale_edge(coder_of(v ? c.v->format : c.k->format, v ? KvRole::v : KvRole::k),
                       r % 2 == 1, std::span(values).subspan(r * side.head_dim, side.head_dim));
  }
  Bytes bytes = pattern_bytes(side.elements() * size_bytes(side.dtype), 3);
  for (uint64_t r = 0; r < side.tokens * side.heads; ++r) {
    reference::store_row(side, bytes, r / side.heads, r % side.heads,
                         std::span(values).subspan(r * side.head_dim, side.head_dim));
  }
  return bytes;
}

// Tokens in order, each over what its slot held: the last one stays.
void quantize(const KvQuantizeCase& c, bool v, std::vector<Block>& blocks) {
  const KvSide side = source_of(c, v);
  const KvPlaces places = places_of(shape_of(c, v));
  Block source = plain_block(c.source, source_bytes(c, v)), codes, scales;
  codes = plain_block(DType::u8, pattern_bytes(c.heads * places.head_bytes(), v ? 5 : 4));
  scales = plain_block(DType::u8, pattern_bytes(c.heads * places.scale_head_bytes(), v ? 7 : 6));
  const uint64_t tokens = quantized_tokens(c);
  for (uint64_t t = 0; t < tokens; ++t) {
    if (t + c.capacity < tokens) continue;  // overwritten
    const uint64_t slot = (c.options.position % c.capacity + t) % c.capacity;
    for (uint64_t g = 0; g < c.heads; ++g) {
      const auto row =
          reference::load_row<float>(side, source.before, c.options.source_begin + t, g);
      reference::kv_store(places, slot, reference::kv_feedback(places.coder, row),
                          codes.after.data() + g * places.head_bytes(),
                          scales.after.data() + g * places.scale_head_bytes());
    }
  }
  for (Block* block : {&source, &codes, &scales}) blocks.push_back(std::move(*block));
}

KvBuffer buffer_of(const KvShape& shape, const Tensor& codes, const Tensor& scales) {
  return {shape, codes.reshape(kv_codes_shape(shape)), scales.reshape(kv_scales_shape(shape))};
}

void record_quantize(const KvQuantizeCase& c, Encoder& encoder, std::span<const Tensor> t) {
  KvQuantizeInputs inputs;
  if (c.k) {
    inputs.k = kv_view(t[0], source_of(c, false));
    inputs.k_cache = buffer_of(shape_of(c, false), t[1], t[2]);
    t = t.subspan(3);
  }
  if (c.v) {
    inputs.v = kv_view(t[0], source_of(c, true));
    inputs.v_cache = buffer_of(shape_of(c, true), t[1], t[2]);
  }
  kv_quantize(encoder, inputs, c.options);
}

KvShape shape_of(const KvDequantizeCase& c) {
  return {c.stream.format, c.role, c.heads, c.capacity, c.stream.head_dim};
}

KvSide out_of(const KvDequantizeCase& c) {
  return {c.out, c.layout, c.tokens, c.heads, c.stream.head_dim, 0};
}

double norm(std::span<const double> values) {
  double sum = 0;
  for (const double v : values) sum += v * v;
  return std::sqrt(sum);
}

// Every stage of the butterfly rounds by at most 2^-24 of what it adds up, which after the factor 1
// / sqrt(n) is at most the length of the block; the factor and its product round once more each.
void expect_restored(const std::vector<double>& y, const KvSide& side, uint64_t t, uint64_t g,
                     Block& out) {
  const std::vector<double> x = reference::kv_restored(y);
  for (const reference::KvSpan span :
       reference::kv_transform_spans(static_cast<uint32_t>(y.size()))) {
    const double length = norm(std::span<const double>(y).subspan(span.begin, span.size));
    const double bound = (std::log2(span.size) + 2) * 0x1p-24 * length + 0x1p-149;
    for (uint32_t j = span.begin; j < span.begin + span.size; ++j)
      expect_near(out, side.index(t, g, j), x[j], bound);
  }
}

// A level times a scale is exact in f32, so also the narrow dtypes have one right answer.
void expect_rotated(const std::vector<double>& y, const KvSide& side, uint64_t t, uint64_t g,
                    Block& out) {
  for (uint64_t j = 0; j < y.size(); ++j) {
    if (std::isnan(y[j])) {
      expect_near(out, side.index(t, g, j), y[j], 0);
      continue;
    }
    reference::store_value(out.dtype, out.after.data(), side.index(t, g, j),
                           static_cast<float>(y[j]));
  }
}

std::vector<Block> dequantize_blocks(const KvDequantizeCase& c) {
  const KvPlaces places = places_of(shape_of(c));
  const KvSide side = out_of(c);
  std::vector<Block> blocks(3);
  Block &codes = blocks[0], &scales = blocks[1], &out = blocks[2];
  codes.dtype = scales.dtype = DType::u8;
  codes.before = pattern_bytes(c.heads * places.head_bytes(), 4);
  scales.before = pattern_bytes(c.heads * places.scale_head_bytes(), 6);
  out = plain_block(c.out, pattern_bytes(side.elements() * size_bytes(c.out), 3));
  const auto values = kv_values(c.values, c.capacity * c.heads, c.stream.head_dim, c.name);
  for (uint64_t slot = 0; slot < c.capacity; ++slot) {
    for (uint64_t g = 0; g < c.heads; ++g) {
      const auto row =
          std::span(values).subspan((slot * c.heads + g) * c.stream.head_dim, c.stream.head_dim);
      const KvCodes encoded = reference::kv_feedback(places.coder, row);
      reference::kv_store(places, slot, encoded, codes.before.data() + g * places.head_bytes(),
                          scales.before.data() + g * places.scale_head_bytes());
      if (slot < c.options.first_slot || slot >= c.options.first_slot + c.tokens) continue;
      const auto y = reference::kv_rotated(places.coder, encoded);
      const auto expect = c.options.domain == KvDomain::rotated ? expect_rotated : expect_restored;
      expect(y, side, slot - c.options.first_slot, g, out);
    }
  }
  codes.after = codes.before;
  scales.after = scales.before;
  return blocks;
}

}  // namespace

std::vector<float> kv_values(KvValues kind, uint64_t count, uint64_t head_dim,
                             const std::string& seed) {
  std::mt19937 random = random_of(seed);
  std::normal_distribution<float> everyday;
  std::vector<float> values(count * head_dim);
  for (float& v : values)
    v = kind == KvValues::ties ? static_cast<float>(random() % 5) - 2.0f : everyday(random);
  if (kind == KvValues::subnormal) {
    for (uint64_t i = 0; i < values.size(); ++i)
      values[i] *= i / head_dim % 2 == 0 ? 1e-40f : 1e-42f;
  }
  if (kind != KvValues::extreme) return values;
  for (uint64_t row = 0; row < count; ++row)
    fill_extreme_row(row, random, std::span(values).subspan(row * head_dim, head_dim));
  return values;
}

reference::KvCoder coder_of(KvFormat format, KvRole role) {
  return reference::kv_coder(name(format), role == KvRole::v);
}

KvPlaces places_of(const KvShape& shape) {
  return {coder_of(shape.format, shape.role), shape.head_dim, shape.capacity,
          shape.role == KvRole::k};
}

void expect_near(Block& block, uint64_t at, double value, double tolerance) {
  if (block.near.empty()) block.near.resize(block.after.size() / size_bytes(block.dtype));
  reference::store_value(block.dtype, block.after.data(), at, static_cast<float>(value));
  const double stored = reference::load_value(block.dtype, block.after.data(), at);
  if (std::isinf(stored)) return;  // bit for bit
  const reference::Format format = reference::format_of(block.dtype);
  const int least = 2 - (1 << (format.exponent_bits - 1));  // ilogb of 0 is the least int
  const double step = std::ldexp(
      1.0, std::max(std::ilogb(std::abs(value) + tolerance), least) - format.mantissa_bits);
  const double rounding = block.dtype == DType::f32 ? 0 : step / 2;
  block.near[at] = {value, std::isnan(value) ? 1 : tolerance + rounding + 1e-300};
}

OpCase make_case(const KvQuantizeCase& numbers) {
  const auto supported = [numbers](const Device& device) {
    if (numbers.values == KvValues::subnormal && !keeps_subnormals(device)) return false;
    return (!numbers.k || supports(device, KvQuantizeTypes{numbers.source, numbers.k->format})) &&
           (!numbers.v || supports(device, KvQuantizeTypes{numbers.source, numbers.v->format}));
  };
  const auto make = [numbers] {
    OpRun run;
    if (numbers.k) quantize(numbers, false, run.blocks);
    if (numbers.v) quantize(numbers, true, run.blocks);
    run.commands = quantized_tokens(numbers) * numbers.heads == 0 ? 0 : 1;
    run.record = [numbers](Encoder& encoder, std::span<const Tensor> tensors) {
      record_quantize(numbers, encoder, tensors);
    };
    return run;
  };
  return {.name = "kv_quantize " + numbers.name, .supported = supported, .make = make};
}

OpCase make_case(const KvDequantizeCase& numbers) {
  const auto supported = [numbers](const Device& device) {
    if (numbers.values == KvValues::subnormal && !keeps_subnormals(device)) return false;
    return supports(device, KvQuantizeTypes{numbers.out, numbers.stream.format});
  };
  const auto make = [numbers] {
    OpRun run;
    run.blocks = dequantize_blocks(numbers);
    run.commands = numbers.tokens * numbers.heads == 0 ? 0 : 1;
    run.record = [numbers](Encoder& encoder, std::span<const Tensor> t) {
      const KvBuffer cache = buffer_of(shape_of(numbers), t[0], t[1]);
      kv_dequantize(encoder, {cache, kv_view(t[2], out_of(numbers))}, numbers.options);
    };
    return run;
  };
  return {.name = "kv_dequantize " + numbers.name, .supported = supported, .make = make};
}

}  // namespace gyre::test
