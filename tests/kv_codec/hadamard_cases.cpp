#include <bit>

#include "gyre_test.h"
#include "kv_codec/kv_codec_case.h"
#include "kv_codec/kv_mlx_native_reference.h"
#include "refused_call.h"

namespace gyre::test {
namespace {

enum class RowLayout : uint8_t { contiguous, padded, swapped };

// One hadamard call on `outer` x `inner` rows of `points`.
struct HadamardCase {
  std::string name;
  DType x = DType::f32, out = DType::f32;
  uint64_t outer = 2, inner = 3, points = 64;
  RowLayout layout = RowLayout::contiguous;
  HadamardOptions options;
  bool in_place = false;
  uint32_t calls = 1;           // the second one in the other direction
  std::vector<float> row;       // in place of random values, if not empty
  std::vector<float> expected;  // in place of the reference, exactly, if not empty
};

uint64_t row_begin(const HadamardCase& c, uint64_t outer, uint64_t inner) {
  switch (c.layout) {
    case RowLayout::padded:
      return (outer * c.inner + inner) * (c.points + reference::kRowPadding);
    case RowLayout::swapped:
      return (inner * c.outer + outer) * c.points;
    default:
      return (outer * c.inner + inner) * c.points;
  }
}

Tensor rows_view(const HadamardCase& c, const Tensor& flat) {
  const uint64_t step = row_begin(c, 0, 1), jump = row_begin(c, 1, 0);
  return flat.strided({c.outer, c.inner, c.points}, {jump, step, 1});
}

uint64_t elements(const HadamardCase& c) {
  return c.outer * c.inner *
         (c.points + (c.layout == RowLayout::padded ? reference::kRowPadding : 0));
}

bool flips(HadamardSigns signs, uint32_t coordinate) {
  if (signs == HadamardSigns::none) return false;
  return signs == HadamardSigns::native ? reference::kv_flips(coordinate)
                                        : reference::mlx_native_flips(coordinate);
}

std::vector<double> transformed(const HadamardCase& c, std::vector<double> x,
                                HadamardDirection direction) {
  const auto flip = [&] {
    for (uint32_t j = 0; j < x.size(); ++j) x[j] = flips(c.options.signs, j) ? -x[j] : x[j];
  };
  if (direction == HadamardDirection::forward) flip();
  const auto points = static_cast<uint32_t>(x.size());
  for (const reference::KvSpan span : reference::kv_transform_spans(points)) {
    const auto block = std::span<double>(x).subspan(span.begin, span.size);
    reference::walsh_hadamard(block);
    for (double& v : block) v /= std::sqrt(static_cast<double>(span.size));
  }
  if (direction == HadamardDirection::inverse) flip();
  return x;
}

HadamardDirection other(HadamardDirection direction) {
  return direction == HadamardDirection::forward ? HadamardDirection::inverse
                                                 : HadamardDirection::forward;
}

// Each stage rounds by at most 2^-24 of what it adds up; after 1 / sqrt(n) that is at most the
// length of the row.
double bound_of(const HadamardCase& c, const std::vector<double>& x) {
  double energy = 0;
  for (const double v : x) energy += v * v;
  return c.calls * (std::log2(c.points) + 2) * 0x1p-24 * std::sqrt(energy);
}

void expect_row(const HadamardCase& c, const std::vector<double>& x, uint64_t begin, Block& out) {
  if (!c.expected.empty()) {
    for (uint64_t j = 0; j < c.points; ++j)
      reference::store_value(c.out, out.after.data(), begin + j, c.expected[j]);
    return;
  }
  std::vector<double> y = transformed(c, x, c.options.direction);
  if (c.calls == 2) y = x;
  for (uint64_t j = 0; j < c.points; ++j) expect_near(out, begin + j, y[j], bound_of(c, x));
}

OpRun make_run(const HadamardCase& c) {
  OpRun run;
  run.blocks.resize(c.in_place ? 1 : 2);
  Block& in = run.blocks.front();
  Block& out = run.blocks.back();
  const auto values = kv_values(KvValues::everyday, c.outer * c.inner, c.points, c.name);
  in.dtype = c.x;
  in.before = pattern_bytes(elements(c) * size_bytes(c.x), 1);
  out.dtype = c.out;
  if (!c.in_place) out.before = pattern_bytes(elements(c) * size_bytes(c.out), 2);
  for (uint64_t row = 0; row < c.outer * c.inner; ++row) {
    const uint64_t begin = row_begin(c, row / c.inner, row % c.inner);
    for (uint64_t j = 0; j < c.points; ++j) {
      const float value = !c.row.empty() ? c.row[j] : values[row * c.points + j];
      reference::store_value(c.x, in.before.data(), begin + j, value);
    }
  }
  const Bytes given = in.before;
  in.after = given;
  out.after = out.before;
  for (uint64_t row = 0; row < c.outer * c.inner; ++row) {
    const uint64_t begin = row_begin(c, row / c.inner, row % c.inner);
    std::vector<double> x(c.points);
    for (uint64_t j = 0; j < c.points; ++j)
      x[j] = reference::load_value(c.x, given.data(), begin + j);
    expect_row(c, x, begin, out);
  }
  run.commands = c.outer * c.inner == 0 ? 0 : c.calls;
  run.record = [c](Encoder& encoder, std::span<const Tensor> t) {
    const Tensor from = rows_view(c, t.front()), to = rows_view(c, t.back());
    hadamard(encoder, {from, to}, c.options);
    HadamardOptions back = c.options;
    back.direction = other(back.direction);
    if (c.calls == 2) hadamard(encoder, {to, to}, back);
  };
  return run;
}

std::string describe(const HadamardCase& c) {
  constexpr const char* kSigns[] = {"none", "native", "mlx_native"};
  return str_cat(c.x, " to ", c.out, " points ", c.points, " signs ",
                 kSigns[static_cast<size_t>(c.options.signs)],
                 c.options.direction == HadamardDirection::forward ? " forward" : " inverse",
                 c.in_place ? " in place" : "", c.calls == 2 ? " and back" : "");
}

// Every size: powers of two from 2, and multiples of 8.
std::vector<HadamardCase> size_cases() {
  std::vector<uint64_t> sizes;
  for (uint64_t n = 2; n <= 8192; n *= 2) sizes.push_back(n);
  for (uint64_t n = 24; n < 1024; n += 8) {
    if (!std::has_single_bit(n)) sizes.push_back(n);
  }
  std::vector<HadamardCase> cases;
  for (const uint64_t n : sizes) {
    for (uint32_t i = 0; i < 12; ++i) {
      // Each of the many sizes with several blocks takes some of the combinations.
      if (!std::has_single_bit(n) && (i + n / 8) % 5 != 0) continue;
      HadamardCase c;
      c.points = n;
      c.options.signs = static_cast<HadamardSigns>(i % 3);
      c.options.direction = static_cast<HadamardDirection>(i / 3 % 2);
      c.in_place = i >= 6;
      c.layout = static_cast<RowLayout>((i + n / 8) % 3);
      c.outer = n > 256 ? 1 : 2;
      c.inner = n > 1024 ? 1 : 3;
      if (c.options.signs == HadamardSigns::native && n > 1024) continue;
      if (c.options.signs == HadamardSigns::mlx_native && n != 256 && n != 512) continue;
      cases.push_back(c);
      c.calls = 2;
      c.in_place = !c.in_place;
      cases.push_back(c);
    }
  }
  return cases;
}

std::vector<HadamardCase> dtype_cases() {
  std::vector<HadamardCase> cases;
  for (const DType x : kFloats) {
    for (const DType out : kFloats) {
      for (const uint64_t points : {2u, 8u, 80u, 128u, 512u}) {
        HadamardCase c{.x = x, .out = out, .points = points};
        c.options.signs = HadamardSigns::native;
        c.layout = static_cast<RowLayout>(points % 3);
        c.in_place = x == out;
        cases.push_back(c);
      }
    }
  }
  cases.push_back({.outer = 40, .inner = 13, .points = 192});
  cases.push_back({.inner = 0});
  return cases;
}

// Natural order, and what integers must give exactly.
std::vector<HadamardCase> exact_cases() {
  std::vector<HadamardCase> cases;
  for (const DType dtype : kFloats) {
    HadamardCase c;
    c.x = c.out = dtype;
    c.points = 4;
    c.row = {1, 1, 1, 1};
    c.expected = {2, 0, 0, 0};
    cases.push_back(c);
    c.row = {1, 2, 3, 4};
    c.expected = {5, -1, -2, 0};
    cases.push_back(c);
    c.points = 16;
    c.row = std::vector<float>(16, 0.0f);
    c.row[5] = 4;
    c.expected = {1, -1, 1, -1, -1, 1, -1, 1, 1, -1, 1, -1, -1, 1, -1, 1};
    cases.push_back(c);
  }
  return cases;
}

struct Call {
  HadamardInputs in;
  HadamardOptions options;
};

Call good_call(FilledTensors& tensors) {
  return {{tensors.make(DType::f32, {3, 2, 64}), tensors.make(DType::f16, {3, 2, 64})}, {}};
}

constexpr RefusedCall<Call> refusal{
    "hadamard", good_call, [](Encoder& e, const Call& c) { hadamard(e, c.in, c.options); }};

Refusal size_refusal(uint64_t points, HadamardSigns signs, const std::string& rule) {
  return {"points " + std::to_string(points),
          {"hadamard", rule, "got " + std::to_string(points)},
          [=](Encoder& encoder, FilledTensors& tensors) {
            const Tensor x = tensors.make(DType::f32, {2, points});
            hadamard(encoder, {x, x}, {.signs = signs});
          }};
}

std::vector<Refusal> size_refusals() {
  std::vector<Refusal> list;
  for (const uint64_t points : {0u, 1u, 3u, 7u, 12u, 20u, 1020u, 1032u, 1536u, 12288u, 16384u})
    list.push_back(size_refusal(points, HadamardSigns::none, "power of two"));
  for (const uint64_t points : {2048u, 8192u})
    list.push_back(size_refusal(points, HadamardSigns::native, "native signs reach to 1024"));
  for (const uint64_t points : {64u, 128u, 1024u})
    list.push_back(size_refusal(points, HadamardSigns::mlx_native, "256 and 512"));
  return list;
}

}  // namespace

std::vector<OpCase> hadamard_cases() {
  std::vector<OpCase> cases;
  for (const auto& list : {size_cases(), dtype_cases(), exact_cases()}) {
    for (HadamardCase c : list) {
      c.name = describe(c);
      cases.push_back(kernel_case("hadamard", c.name, [c] { return make_run(c); }));
    }
  }
  return cases;
}

std::vector<Refusal> hadamard_refusals() {
  return concat(
      {size_refusals(),
       {
           refusal("no x", {"x is undefined"}, CHANGE(c.in.x = {})),
           refusal("no out", {"out is undefined"}, CHANGE(c.in.out = {})),
           refusal("x of rank 4", {"x must have 1 to 3 dimensions", "got 4"},
                   CHANGE(c.in.x = c.in.x.reshape({3, 2, 8, 8}))),
           refusal("x of u8", {"x must be f32, f16 or bf16", "u8"},
                   CHANGE(c.in.x = t.make(DType::u8, {3, 2, 64}))),
           refusal("out of i32", {"out must be f32, f16 or bf16", "i32"},
                   CHANGE(c.in.out = t.make(DType::i32, {3, 2, 64}))),
           refusal("shape of out", {"out must have the shape of x", "[3, 2, 64]", "got [2, 2, 64]"},
                   CHANGE(c.in.out = c.in.out.slice(0, 0, 2))),
           refusal("coordinates with gaps", {"last dimension of x must be contiguous", "stride 2"},
                   CHANGE(c.in.x = t.make(DType::f32, {768}).strided({3, 2, 64}, {256, 128, 2}))),
           refusal("rows of out in one place", {"share memory", "[0, 64, 1]"},
                   CHANGE(c.in.out = c.in.out.strided({3, 2, 64}, {0, 64, 1}))),
           refusal("out shifted against x", {"x and out share memory"},
                   [](auto& c, FilledTensors& t) {
                     const Tensor both = t.make(DType::f32, {400});
                     c.in.x = both.strided({3, 2, 64}, {128, 64, 1});
                     c.in.out = both.strided({3, 2, 64}, {128, 64, 1}, 16);
                   }),
           refusal("read-only out", {"read-only"},
                   CHANGE(c.in.out = read_only(t.device(), c.in.out))),
           refusal("unknown signs", {"7", "signs"},
                   CHANGE(c.options.signs = static_cast<HadamardSigns>(7))),
           refusal("unknown direction", {"9", "direction"},
                   CHANGE(c.options.direction = static_cast<HadamardDirection>(9))),
       }});
}

}  // namespace gyre::test
