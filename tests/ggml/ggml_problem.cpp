#include "ggml/ggml_problem.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "gyre/dtype.h"
#include "in_threads.h"
#include "integrations/ggml/attention.h"

namespace gyre::ggml::test {
namespace {

void put_bits(uint8_t* at, uint16_t bits) { std::memcpy(at, &bits, 2); }
void put_half(uint8_t* at, float value) { put_bits(at, Half(value).bits); }
double get_half(const uint8_t* at) {
  uint16_t bits = 0;
  std::memcpy(&bits, at, 2);
  return static_cast<float>(Half::from_bits(bits));
}

struct BlockLayout {
  uint32_t bits;
  bool has_minimum;
};
BlockLayout layout_of(RowType type) {
  switch (type) {
    case RowType::q4_0:
      return {4, false};
    case RowType::q4_1:
      return {4, true};
    case RowType::q5_0:
      return {5, false};
    case RowType::q5_1:
      return {5, true};
    default:
      return {8, false};
  }
}

void encode_block(RowType type, const float* x, uint8_t* bytes) {
  const auto [bits, has_minimum] = layout_of(type);
  const auto [low, high] = std::minmax_element(x, x + 32);
  const float magnitude = std::max(std::fabs(*low), std::fabs(*high));
  const float levels = static_cast<float>((1 << bits) - 1),
              middle = static_cast<float>(1 << (bits - 1));
  const float step = has_minimum ? (*high - *low) / levels : magnitude / (middle - 1);
  const float minimum = has_minimum ? *low : bits == 8 ? 0 : -middle * step;
  put_half(bytes, step);
  uint8_t* codes = bytes + 2;
  if (has_minimum) put_half(codes, minimum), codes += 2;
  uint8_t code[32];
  for (int i = 0; i < 32; ++i) {
    const float whole = step > 0 ? std::round((x[i] - minimum) / step) : 0;
    code[i] = static_cast<uint8_t>(static_cast<int>(whole));
  }
  if (bits == 8) return void(std::memcpy(codes, code, 32));
  if (bits == 5) {
    uint32_t fifth = 0;
    for (uint32_t i = 0; i < 32; ++i) fifth |= static_cast<uint32_t>(code[i] >> 4) << i;
    std::memcpy(codes, &fifth, 4);
    codes += 4;
  }
  for (int i = 0; i < 16; ++i)
    codes[i] = static_cast<uint8_t>((code[i] & 15) | (code[i + 16] & 15) << 4);
}

void decode_block(RowType type, const uint8_t* bytes, double* x) {
  const auto [bits, has_minimum] = layout_of(type);
  const double step = get_half(bytes), middle = 1 << (bits - 1);
  const double minimum = has_minimum ? get_half(bytes + 2) : bits == 8 ? 0 : -middle * step;
  const uint8_t* codes = bytes + (has_minimum ? 4 : 2);
  if (bits == 8) {
    for (int i = 0; i < 32; ++i) x[i] = step * static_cast<int8_t>(codes[i]);
    return;
  }
  uint32_t fifth = 0;
  if (bits == 5) std::memcpy(&fifth, codes, 4), codes += 4;
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t low = i < 16 ? codes[i] & 15u : codes[i - 16] >> 4;
    x[i] = step * (low | (fifth >> i & 1) << 4) + minimum;
  }
}

}  // namespace

void encode_row(RowType type, const float* values, uint64_t count, uint8_t* bytes) {
  for (uint64_t i = 0; i < count; i += row_format(type).block) {
    uint8_t* const at = bytes + row_bytes(type, i);
    switch (type) {
      case RowType::f32:
        std::memcpy(at, values + i, 4);
        break;
      case RowType::f16:
        put_half(at, values[i]);
        break;
      case RowType::bf16:
        put_bits(at, BFloat16(values[i]).bits);
        break;
      default:
        encode_block(type, values + i, at);
    }
  }
}

void decode_row(RowType type, const uint8_t* bytes, uint64_t count, double* values) {
  for (uint64_t i = 0; i < count; i += row_format(type).block) {
    const uint8_t* const at = bytes + row_bytes(type, i);
    float single = 0;
    uint16_t bits = 0;
    switch (type) {
      case RowType::f32:
        std::memcpy(&single, at, 4);
        values[i] = single;
        break;
      case RowType::f16:
        values[i] = get_half(at);
        break;
      case RowType::bf16:
        std::memcpy(&bits, at, 2);
        values[i] = static_cast<float>(BFloat16::from_bits(bits));
        break;
      default:
        decode_block(type, at, values + i);
    }
  }
}

Rows Memory::cache(std::vector<uint8_t>& bytes, RowType type, uint64_t dim, const Shape& shape) {
  // Two bytes or an element of padding between rows: strides are anything.
  const uint64_t row = row_bytes(type, dim) + (type == RowType::f32 ? 4 : 2);
  Rows rows;
  rows.type = type;
  rows.heads = shape.kv_heads;
  rows.streams = shape.kv_streams;
  rows.strides[0] = shape.head_major ? row : row * shape.kv_heads;
  rows.strides[1] = shape.head_major ? row * shape.cells : row;
  rows.strides[2] = row * shape.kv_heads * shape.cells;
  bytes.resize(rows.strides[2] * shape.kv_streams);
  rows.data = bytes.data();
  std::normal_distribution<float> normal;
  std::vector<float> values(dim);
  for (uint64_t at = 0; at < bytes.size(); at += row) {
    for (float& value : values) value = normal(random_);
    encode_row(type, values.data(), dim, bytes.data() + at);
  }
  return rows;
}

Memory::Memory(const Shape& s) : random_(s.seed) {
  Problem& p = problem;
  p.tokens = s.tokens, p.cells = s.cells, p.heads = s.heads, p.streams = s.streams;
  p.k_dim = s.k_dim, p.v_dim = s.v_dim;
  p.scale = s.scale, p.max_bias = s.max_bias, p.soft_cap = s.soft_cap;
  std::normal_distribution<float> normal;
  q.resize(s.streams * s.tokens * s.heads * s.k_dim);
  for (float& value : q) value = normal(random_);
  // As llama.cpp has them: heads of a token side by side.
  p.q.data = reinterpret_cast<const uint8_t*>(q.data());
  p.q.strides[0] = 4 * s.heads * s.k_dim;
  p.q.strides[1] = 4 * s.k_dim;
  p.q.strides[2] = p.q.strides[0] * s.tokens;
  p.q.heads = s.heads, p.q.streams = s.streams;
  p.k = cache(k, s.k, s.k_dim, s);
  p.v = cache(v, s.v, s.v_dim, s);
  if (s.mask) {
    mask.resize(s.mask_streams * s.mask_heads * s.tokens * s.cells);
    for (uint64_t i = 0; i < mask.size(); ++i) {
      const uint64_t row = i / s.cells;
      mask[i] = Half(s.mask(row / s.tokens % s.mask_heads, row % s.tokens, i % s.cells)).bits;
    }
    p.mask.data = reinterpret_cast<const uint8_t*>(mask.data());
    p.mask.strides[0] = 2 * s.cells;
    p.mask.strides[1] = p.mask.strides[0] * s.tokens;
    p.mask.strides[2] = p.mask.strides[1] * s.mask_heads;
    p.mask.heads = s.mask_heads, p.mask.streams = s.mask_streams;
  }
  if (s.sinks) {
    sinks.resize(s.heads);
    for (float& sink : sinks) sink = normal(random_);
    p.sinks = sinks.data();
  }
  out.assign(s.streams * s.tokens * s.heads * s.v_dim, std::numeric_limits<float>::quiet_NaN());
  p.out = reinterpret_cast<uint8_t*>(out.data());
  p.out_strides[1] = 4 * s.v_dim;
  p.out_strides[0] = p.out_strides[1] * s.heads;
  p.out_strides[2] = p.out_strides[0] * s.tokens;
}

std::vector<float> Memory::run(uint32_t threads) {
  const Plan plan(problem);
  std::vector<float> partials(plan.partial_floats(problem));
  Call call(problem, plan, partials.data());
  gyre::test::in_threads(threads, [&](size_t) {
    const uint64_t bytes = (plan.scratch_floats(problem) * 4 + 63) / 64 * 64;
    const std::unique_ptr<void, decltype(&std::free)> scratch(std::aligned_alloc(64, bytes),
                                                              &std::free);
    // Whatever was there before must not matter.
    std::fill_n(static_cast<float*>(scratch.get()), bytes / 4,
                std::numeric_limits<float>::quiet_NaN());
    ggml::run(call, threads, static_cast<float*>(scratch.get()));
  });
  return out;
}

std::vector<double> Memory::expected() const {
  const Problem& p = problem;
  std::vector<double> result(out.size(), 0.0), row(std::max(p.k_dim, p.v_dim));
  std::vector<double> logit(p.cells);
  uint64_t power = 1;
  while (2 * power <= p.heads) power *= 2;
  for (uint64_t at = 0; at < p.streams * p.tokens * p.heads; ++at) {
    const uint64_t head = at % p.heads, token = at / p.heads % p.tokens;
    const uint64_t stream = at / (p.heads * p.tokens), kv_head = head / p.group();
    double slope = 1;
    if (p.max_bias > 0)
      slope = head < power
                  ? std::pow(2.0, -p.max_bias / double(power) * double(head + 1))
                  : std::pow(2.0, -p.max_bias / 2 / double(power) * double(2 * (head - power) + 1));
    const auto* const query = reinterpret_cast<const float*>(p.q.row(token, head, stream));
    double largest = p.sinks != nullptr ? double{p.sinks[head]} : -HUGE_VAL;
    for (uint64_t cell = 0; cell < p.cells; ++cell) {
      double bias = 0;
      if (p.mask.data != nullptr)
        bias = slope *
               get_half(p.mask.row(token, head % p.mask.heads, stream % p.mask.streams) + 2 * cell);
      logit[cell] = -HUGE_VAL;
      if (bias == -HUGE_VAL) continue;
      const uint64_t of_k = stream / (p.streams / p.k.streams);
      decode_row(p.k.type, p.k.row(cell, kv_head, of_k), p.k_dim, row.data());
      double dot = 0;
      for (uint64_t c = 0; c < p.k_dim; ++c) dot += double{query[c]} * row[c];
      dot *= p.scale;
      if (p.soft_cap > 0) dot = p.soft_cap * std::tanh(dot / p.soft_cap);
      logit[cell] = dot + bias;
      largest = std::max(largest, logit[cell]);
    }
    if (largest == -HUGE_VAL) continue;
    double sum = p.sinks != nullptr ? std::exp(p.sinks[head] - largest) : 0;
    double* const to = result.data() + at * p.v_dim;
    for (uint64_t cell = 0; cell < p.cells; ++cell) {
      const double weight = std::exp(logit[cell] - largest);
      if (weight == 0) continue;
      sum += weight;
      decode_row(p.v.type, p.v.row(cell, kv_head, stream / (p.streams / p.v.streams)), p.v_dim,
                 row.data());
      for (uint64_t c = 0; c < p.v_dim; ++c) to[c] += weight * row[c];
    }
    for (uint64_t c = 0; c < p.v_dim; ++c) to[c] /= sum;
  }
  return result;
}

double nmse(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, power = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    power += want[i] * want[i];
  }
  return power > 0 ? error / power : error;
}

}  // namespace gyre::ggml::test
