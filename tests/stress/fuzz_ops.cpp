// Ops that write and read K and V, and the formats.
#include <algorithm>
#include <cmath>

#include "stress/fuzz_world.h"

namespace gyre::test {

KvBuffer FuzzWorld::buffer(KvShape shape) {
  const bool scales = describe(shape.format).scale == KvScaleKind::f32_norm;
  shape.scale_factor = in.real(scales && shape.head_dim == 512 && in.chance(2) ? 4.0f : 1.0f);
  if (!in.chance(2)) {
    KvBuffer made = KvBuffer::allocate(some_device(), shape);
    if (in.spoil()) made.codes = tensor(made.codes.dtype(), made.codes.shape());
    if (in.spoil()) made.shape.capacity = in.number(shape.capacity);
    return made;
  }
  const KvFormatInfo info = describe(shape.format);
  KvBuffer made{.shape = shape, .codes = {}, .scales = {}};
  const DType dense = shape.format == KvFormat::f32    ? DType::f32
                      : shape.format == KvFormat::bf16 ? DType::bf16
                                                       : DType::f16;
  // Any bytes are codes; any scales are not.
  made.codes = packed(info.compressed ? DType::u8 : dense, kv_codes_shape(shape));
  if (info.compressed) made.scales = KvBuffer::allocate(device, shape).scales;
  if (in.spoil()) made.scales = packed(DType::u8, {4});
  return made;
}

KvPages FuzzWorld::pages(const KvPageShape& shape, uint64_t count) {
  if (in.chance(2)) return KvPages::allocate(some_device(), shape, count);
  const uint64_t bytes = kv_page_bytes(shape);
  const Tensor all = packed(DType::u8, {count, bytes + 16});
  KvPages made{.shape = shape, .bytes = all.defined() ? all.slice(1, 0, bytes) : all};
  if (in.spoil()) made.shape.page_tokens = in.number(shape.page_tokens);
  return made;
}

KvCalibration FuzzWorld::calibration(uint64_t kv_heads, uint64_t head_dim) {
  KvCalibration made;
  if (!in.chance(4)) return made;
  const Dims matrix = {kv_heads, head_dim, head_dim}, vector = {kv_heads, head_dim};
  if (in.chance(2)) made.transform = {packed(DType::f32, matrix), packed(DType::f32, matrix), {}};
  if (in.chance(4)) made.transform.mean = packed(DType::f32, vector);
  if (in.chance(2)) made.feedback = {packed(DType::f32, matrix), packed(DType::f32, vector), {}};
  for (uint64_t i = in.number(in.below(3)) % 10; i != 0; --i)
    made.feedback.gains.push_back(in.real(1.0f + 0.25f * static_cast<float>(i)));
  return made;
}

namespace {

// Where kv_copy and kv_quantize write.
KvRange write_options(FuzzWorld& w, uint64_t tokens, uint64_t capacity) {
  FuzzInput& in = w.in;
  KvRange made;
  made.cache = in.chance(2) ? CacheKind::ring : CacheKind::linear;
  const uint64_t last = capacity > tokens ? capacity - tokens : 0;
  made.position = in.number(made.cache == CacheKind::ring ? in.below(1000) : in.below(last + 1));
  if (in.chance(3)) made.source_begin = in.number(in.below(tokens + 1));
  if (in.chance(3))
    made.tokens = in.number(in.below(tokens - std::min(tokens, made.source_begin) + 1));
  return made;
}

// The newest token of every slot is there, and every other slot is as it was.
void expect_copied(const Tensor& from, const Tensor& to, const KvRange& options,
                   const Bytes& before) {
  const uint64_t capacity = to.shape(0);
  const uint64_t tokens = options.tokens.value_or(from.shape(0) - options.source_begin);
  const Bytes now = read_bytes(to);
  const uint64_t row = capacity == 0 ? 0 : now.size() / capacity;
  std::vector<uint64_t> source(capacity, ~uint64_t{0});
  for (uint64_t i = 0; i < tokens; ++i)
    source[(options.position + i) % capacity] = options.source_begin + i;
  const std::vector<float> given = values(from), stored = values(to);
  const uint64_t width = capacity == 0 ? 0 : stored.size() / capacity;
  for (uint64_t slot = 0; slot < capacity; ++slot) {
    if (source[slot] == ~uint64_t{0}) {
      const auto at = static_cast<ptrdiff_t>(slot * row);
      expect(std::equal(now.begin() + at, now.begin() + at + static_cast<ptrdiff_t>(row),
                        before.begin() + at),
             "a slot that was not named changed");
      continue;
    }
    for (uint64_t i = 0; i < width; ++i) {
      const float expected = given[source[slot] * width + i];
      expect(std::abs(stored[slot * width + i] - expected) <= 0x1p-8f,
             "a coordinate is not the copied one");
    }
  }
  ++fuzz_stats().compared;
}

void fuzz_kv_copy(FuzzWorld& w, FuzzInput& in) {
  const uint64_t tokens = in.below(7), heads = 1 + in.below(3), dim = w.head_dim();
  const uint64_t capacity = 1 + in.below(12);
  KvCopyInputs inputs{.k = w.floats({tokens, heads, dim}),
                      .k_cache = w.floats({capacity, heads, dim})};
  if (in.chance(2)) {
    inputs.v = w.tensor(inputs.k.dtype(), {tokens, heads, dim});
    inputs.v_cache = w.tensor(inputs.k_cache.dtype(), {capacity, heads, dim});
  }
  const KvRange options = write_options(w, tokens, capacity);
  const bool compare = w.checked() && in.chance(2) && w.submit();
  Bytes before;
  if (compare) before = read_bytes(inputs.k_cache);
  const bool done = w.call("kv_copy", [&] { kv_copy(w.some_encoder(), inputs, options); });
  if (!done || !compare || in.spoiled() || !w.submit()) return;
  expect_copied(inputs.k, inputs.k_cache, options, before);
}

void fuzz_kv_quantize(FuzzWorld& w, FuzzInput& in) {
  const uint64_t tokens = in.below(10), heads = 1 + in.below(3), dim = w.head_dim();
  const uint64_t capacity = 1 + in.below(16);
  KvQuantizeInputs inputs;
  if (!in.chance(4)) {
    inputs.k = w.floats({tokens, heads, dim});
    inputs.k_cache = w.buffer({w.format(), KvRole::k, heads, capacity, dim});
    inputs.k_calibration = w.calibration(heads, dim);
  }
  if (in.chance(2)) {
    inputs.v = w.floats({tokens, heads, dim});
    inputs.v_cache = w.buffer({w.format(), KvRole::v, heads, capacity, dim});
    inputs.v_calibration = w.calibration(heads, dim);
  }
  const KvRange options = write_options(w, tokens, capacity);
  w.call("kv_quantize", [&] { kv_quantize(w.some_encoder(), inputs, options); });
}

// Coordinates of finite size come back close to what they were.
void fuzz_kv_dequantize(FuzzWorld& w, FuzzInput& in) {
  const uint64_t capacity = 1 + in.below(12), heads = 1 + in.below(3), dim = w.head_dim();
  const KvFormat format = w.format();
  const KvRole role = in.chance(2) ? KvRole::v : KvRole::k;
  const KvBuffer cache = KvBuffer::allocate(w.some_device(), {format, role, heads, capacity, dim});
  const Tensor rows = w.floats({capacity, heads, dim});
  const bool compare = w.checked();
  KvQuantizeInputs write{.k = rows, .k_cache = cache};
  if (role == KvRole::v) write = {.v = rows, .v_cache = cache};
  const bool written = w.call("kv_quantize", [&] { kv_quantize(w.some_encoder(), write); });
  const uint64_t first = in.number(in.below(capacity));
  const Tensor out = w.floats({capacity - std::min(capacity, first), heads, dim});
  const KvDequantizeOptions options{first, in.chance(4) ? KvDomain::rotated : KvDomain::restored};
  const bool read = w.call("kv_dequantize", [&] {
    kv_dequantize(w.some_encoder(), {cache, out}, options);
  });
  if (!written || !read || !compare || in.spoiled() || options.domain != KvDomain::restored) return;
  if (!w.submit()) return;
  const std::vector<float> given = values(rows), got = values(out);
  const size_t skip = given.size() - got.size();
  double error = 0, all = 1e-6;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(static_cast<double>(got[i] - given[skip + i]), 2);
    all += std::pow(static_cast<double>(given[skip + i]), 2);
  }
  expect(error <= 0.3 * all,
         "decoded rows are far from what was stored in " + std::string(name(format)));
  ++fuzz_stats().compared;
}

void fuzz_hadamard(FuzzWorld& w, FuzzInput& in) {
  const uint64_t dim = w.head_dim();
  const Dims shape = in.chance(3)   ? Dims{dim}
                     : in.chance(2) ? Dims{in.below(9), dim}
                                    : Dims{in.below(5), 2, dim};
  const Tensor x = w.floats(shape), out = in.chance(3) ? x : w.floats(shape);
  const HadamardOptions options{
      in.chance(2) ? HadamardDirection::inverse : HadamardDirection::forward,
      static_cast<HadamardSigns>(in.number(in.below(3)) & 0xFF)};
  const bool compare = w.checked();
  const bool done = w.call("hadamard", [&] { hadamard(w.some_encoder(), {x, out}, options); });
  if (!done || !compare || in.spoiled() || !in.chance(2)) return;
  if (!w.submit()) return;
  expect_bounded(out, 1.01f * std::sqrt(static_cast<float>(dim)),
                 "a coordinate of an orthonormal transform");
}

void fuzz_kv_write(FuzzWorld& w, FuzzInput& in) {
  const uint64_t tokens = in.below(20), heads = 1 + in.below(3), dim = w.head_dim(),
                 pages = 1 + in.below(4);
  const KvPageShape shape{.k = w.format(),
                          .v = w.format(),
                          .kv_heads = heads,
                          .head_dim = dim,
                          .page_tokens = in.number(8 * (1 + in.below(3)))};
  KvWriteInputs inputs{.k = w.floats({tokens, heads, dim}), .pages = w.pages(shape, pages)};
  inputs.v = w.tensor(inputs.k.dtype(), {tokens, heads, dim});
  inputs.slots =
      w.indices(in.chance(2) ? DType::i32 : DType::i64, {tokens}, pages * shape.page_tokens);
  inputs.k_calibration = w.calibration(heads, dim);
  inputs.v_calibration = w.calibration(heads, dim);
  w.call("kv_write", [&] { kv_write(w.some_encoder(), inputs); });
}

void fuzz_kv_page_copy(FuzzWorld& w, FuzzInput& in) {
  const uint64_t pages = 2 + in.below(6), count = in.below(4);
  const KvPageShape shape{.k = w.format(),
                          .v = w.format(),
                          .kv_heads = 1 + in.below(2),
                          .head_dim = w.head_dim(),
                          .page_tokens = 8};
  const KvPageCopyInputs inputs{w.pages(shape, pages), w.indices(DType::i32, {count}, pages),
                                w.indices(DType::i32, {count}, pages)};
  w.call("kv_page_copy", [&] { kv_page_copy(w.some_encoder(), inputs); });
}

void fuzz_kv_transform(FuzzWorld& w, FuzzInput& in) {
  const uint64_t tokens = in.below(5), kv_heads = 1 + in.below(2),
                 dim = std::min<uint64_t>(w.head_dim(), 64);
  const uint64_t heads = kv_heads * (1 + in.below(3));
  const Tensor x = w.floats({tokens, heads, dim});
  KvTransformInputs inputs{.x = x,
                           .matrix = w.packed(DType::f32, {kv_heads, dim, dim}),
                           .out = in.chance(2) ? x : w.floats({tokens, heads, dim})};
  if (in.chance(2)) inputs.before = w.packed(DType::f32, {kv_heads, dim});
  if (in.chance(2)) inputs.after = w.packed(DType::f32, {kv_heads, dim});
  const bool compare = w.checked();
  const bool done = w.call("kv_transform", [&] { kv_transform(w.some_encoder(), inputs); });
  if (!done || !compare || in.spoiled() || !w.submit()) return;
  expect_bounded(inputs.out, 2.1f * static_cast<float>(dim) + 1, "a product with a matrix of ones");
}

void fuzz_kv_shapes(FuzzWorld& w, FuzzInput& in) {
  const KvShape shape{w.format(),
                      static_cast<KvRole>(in.number(in.below(2)) & 0xFF),
                      in.number(in.below(4)),
                      in.number(in.below(40)),
                      w.head_dim(),
                      static_cast<uint32_t>(in.number(kKvSignsVersion)),
                      in.real(1.0f)};
  Dims codes, scales;
  const bool sized = w.call("kv_codes_shape", [&] { codes = kv_codes_shape(shape); });
  w.call("kv_scales_shape", [&] { scales = kv_scales_shape(shape); });
  KvBuffer made;
  const bool done =
      w.call("KvBuffer::allocate", [&] { made = KvBuffer::allocate(w.some_device(), shape); });
  expect(!done || (sized && made.codes.shape() == codes),
         "kv_codes_shape() differs from what is allocated");
  const KvPageShape page{.k = w.format(),
                         .v = w.format(),
                         .kv_heads = in.number(in.below(4)),
                         .head_dim = w.head_dim(),
                         .v_head_dim = in.number(0),
                         .page_tokens = in.number(8 * in.below(20)),
                         .signs_version = static_cast<uint32_t>(in.number(kKvSignsVersion))};
  uint64_t bytes = 0;
  if (w.call("kv_page_bytes", [&] { bytes = kv_page_bytes(page); }))
    expect(bytes % 16 == 0, "a page is not a multiple of 16 bytes");
  w.call("KvPages::allocate",
         [&] { KvPages::allocate(w.some_device(), page, in.number(in.below(5))); });
}

void fuzz_formats(FuzzWorld& w, FuzzInput& in) {
  const KvFormat format = static_cast<KvFormat>(in.byte());
  KvFormatInfo info;
  if (w.call("describe", [&] { info = describe(format); })) {
    w.call("name", [&] { expect(name(format) == info.name, "two names of a format"); });
    w.call("kv_format",
           [&] { expect(kv_format(info.name) == format, "a name that is another format's"); });
  }
  std::string text(in.below(6), '\0');
  for (char& letter : text) letter = static_cast<char>(in.byte());
  w.call("kv_format", [&] { kv_format(text); });
  w.call("name", [&] { name(static_cast<DType>(in.byte())); });
  w.call("name", [&] { name(static_cast<ErrorCode>(in.byte())); });
  w.call("name", [&] { name(static_cast<KvSegmentKind>(in.byte())); });
  w.call("name", [&] { name(static_cast<KvRole>(in.byte())); });
  w.call("name", [&] { name(static_cast<KvPart>(in.byte())); });
  const uint64_t count = in.number(in.below(9));
  const KvPolicy policy{w.layer(),
                        in.number(in.below(3)),
                        w.format(),
                        in.number(in.below(30)),
                        in.number(in.below(4)),
                        w.format(),
                        in.number(in.below(3))};
  std::vector<KvLayer> layers;
  if (w.call("kv_layers", [&] { layers = kv_layers(count, policy); }))
    expect(layers.size() == count, "another number of layers than asked for");
}

}  // namespace

KvLayer FuzzWorld::layer() {
  KvLayer made{.k = format(), .v = format()};
  if (in.chance(3)) made.window = in.number(4 + in.below(20));
  if (in.chance(4)) made.tail = in.number(in.below(20));
  if (in.chance(4)) made.sink_tokens = in.number(in.below(6));
  if (in.chance(4)) made.kv_heads = in.number(1 + in.below(3));
  if (in.chance(4)) made.head_dim = head_dim();
  if (in.chance(8)) made.v_head_dim = head_dim();
  return made;
}

std::span<const FuzzCall> fuzz_op_calls() {
  static constexpr FuzzCall kCalls[] = {fuzz_kv_copy,      fuzz_kv_quantize, fuzz_kv_dequantize,
                                        fuzz_hadamard,     fuzz_kv_write,    fuzz_kv_page_copy,
                                        fuzz_kv_transform, fuzz_kv_shapes,   fuzz_formats};
  return kCalls;
}

}  // namespace gyre::test
