// kv_feedback's and kv_transform's CUDA text on the host, and that of the writers with calibrated
// rows: the bits of the documented arithmetic, and the CPU's bytes.
#include <gtest/gtest.h>

#include <random>

#include "cpu/kernels.h"
#include "cuda/kernels.h"
#include "cuda_host/host_device.h"
#include "cuda_host/select_types.h"
#include "kv_codec/calibrated_reference.h"
#include "kv_codec/kv_codec_case.h"
#include "op_case.h"
#include "ops/cache_ops.h"
// After cuda_host.h
#include "cuda/kernels/kv_feedback.cu"
#include "cuda/kernels/kv_transform.cu"
#include "cuda/kernels/write.cu"

namespace gyre::test {
namespace {

using cpu::TaskFn;

// K alone and V alone: a kernel for each pair would take minutes to compile.
template <class Source, uint32_t kFormatK, uint32_t kFormatV>
void run_encode(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  abi::KvFeedbackParams p = *static_cast<const abi::KvFeedbackParams*>(params);
  if constexpr (kFormatK == 0) p.stream[0].head_dim = 0;
  if constexpr (kFormatV == 0) p.stream[1].head_dim = 0;
  launch_on_host(cuda::kv_feedback<Source, kFormatK, kFormatV>, cuda::launch_kv_feedback, &p, args,
                 kKvFeedback.info.arg_count, 0);
}
template <class Source>
TaskFn encode_of(uint32_t stream, uint32_t format) {
  return with_format(Native(), format, [&](auto f) -> TaskFn {
    constexpr uint32_t kFormat = decltype(f)::value;
    return stream == 0 ? run_encode<Source, kFormat, 0> : run_encode<Source, 0, kFormat>;
  });
}
template <class Source>
void run_encodes(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  const auto& p = *static_cast<const abi::KvFeedbackParams*>(params);
  const uint32_t k = p.stream[0].format, v = p.stream[1].format;
  const bool both = p.stream[0].head_dim != 0 && p.stream[1].head_dim != 0;
  if (both && k == abi::kTq8 && v == abi::kTq4)
    return run_encode<Source, abi::kTq8, abi::kTq4>(params, args, 0, 1);
  if (both && k == abi::kTq4 && v == abi::kTq4)
    return run_encode<Source, abi::kTq4, abi::kTq4>(params, args, 0, 1);
  for (uint32_t stream = 0; stream < 2; ++stream) {
    if (p.stream[stream].head_dim != 0)
      encode_of<Source>(stream, p.stream[stream].format)(params, args, 0, 1);
  }
}
TaskFn select_encode(uint64_t key) {
  const auto spec = spec_from_key<abi::KvFeedbackSpec>(key);
  return with_float(spec.source_dtype,
                    [](auto source) -> TaskFn { return run_encodes<decltype(source)>; });
}

template <class X, class Out>
void run_transform(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  launch_on_host(cuda::kv_transform<X, Out>, cuda::launch_kv_transform, params, args, 5, 0);
}
TaskFn select_transform(uint64_t key) {
  const auto spec = spec_from_key<abi::KvTransformSpec>(key);
  return with_float(spec.x_dtype, [&](auto x) {
    return with_float(spec.out_dtype,
                      [](auto out) -> TaskFn { return run_transform<decltype(x), decltype(out)>; });
  });
}

// One stream of a kv_quantize.
template <uint32_t kFormatK, uint32_t kFormatV>
void run_quantize(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  launch_on_host(cuda::kv_quantize<cuda::CalibratedRow, kFormatK, kFormatV>, cuda::launch_write,
                 params, args, kKvQuantize.info.arg_count, 0);
}
TaskFn quantize_of(uint32_t stream, uint32_t format) {
  return with_format(Native(), format, [&](auto f) -> TaskFn {
    constexpr uint32_t kFormat = decltype(f)::value;
    return stream == 0 ? run_quantize<kFormat, 0> : run_quantize<0, kFormat>;
  });
}
// The CPU writes the streams that are not calibrated. Which are is in the spec alone.
template <uint32_t kDType, uint32_t kCalibrated>
void run_quantizes(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  const auto& all = *static_cast<const abi::WriteParams*>(params);
  for (uint32_t i = all.first_stream; i < all.first_stream + all.streams; ++i) {
    abi::WriteParams p = all;
    p.first_stream = i, p.streams = 1;
    const auto format = static_cast<uint8_t>(p.stream[i].cache.format);
    const abi::WriteSpec spec{
        kDType, i == 0 ? format : uint8_t{0}, i == 1 ? format : uint8_t{0}, 0, 0, 0, {}};
    const bool calibrated = (kCalibrated >> i & 1) != 0;
    (calibrated ? quantize_of(i, format) : cpu::select_write(spec_key(spec)))(&p, args, 0, 1);
  }
}
template <uint32_t kDType>
TaskFn quantizes_of(uint32_t calibrated) {
  constexpr TaskFn kOf[] = {run_quantizes<kDType, 0>, run_quantizes<kDType, 1>,
                            run_quantizes<kDType, 2>, run_quantizes<kDType, 3>};
  return kOf[calibrated];
}
TaskFn select_quantize(uint64_t key) {
  const auto spec = spec_from_key<abi::WriteSpec>(key);
  constexpr auto kOf = std::array{quantizes_of<0>, quantizes_of<1>, quantizes_of<2>};
  return kOf[spec.source_dtype](spec.calibrated);
}

// Spec of a writer, and the kernel that the table names for it.
struct WriterCase {
  DType source;
  KvFormat k, v;
  uint32_t calibrated;  // 1 K, 2 V
  uint64_t head_dim, v_head_dim;

  bool is(uint32_t dtype, uint32_t k_format, uint32_t v_format, uint32_t mask) const {
    return dtype == static_cast<uint32_t>(source) && k_format == static_cast<uint32_t>(k) &&
           v_format == static_cast<uint32_t>(v) && mask == calibrated;
  }
};
constexpr WriterCase kWriters[] = {
    {DType::f32, KvFormat::tq4, KvFormat::tq4, 3, 128, 128},
    {DType::f32, KvFormat::tq8, KvFormat::tq4, 1, 128, 24},
    {DType::bf16, KvFormat::tq5, KvFormat::tq3, 2, 40, 256},
    {DType::f16, KvFormat::tq2, KvFormat::tq6, 3, 16, 64},
};
template <class Spec>
TaskFn writer_of(uint64_t key, const TaskFn (&of)[std::size(kWriters)]) {
  const auto s = spec_from_key<Spec>(key);
  for (size_t i = 0; i < std::size(kWriters); ++i)
    if (kWriters[i].is(s.source_dtype, s.k_format, s.v_format, s.calibrated)) return of[i];
  return nullptr;
}

template <class Source, uint32_t kK, uint32_t kV, uint32_t kCalibrated>
void run_append(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  launch_on_host(cuda::kv_append<Source, kK, kV, kCalibrated>, cuda::launch_write, params, args,
                 kKvAppend.info.arg_count, 0);
}
TaskFn select_append(uint64_t key) {
  return writer_of<abi::WriteSpec>(
      key, {run_append<cuda::CalibratedRow, 18, 18, 0>, run_append<float, 21, 18, 1>,
            run_append<cuda::BFloat16, 19, 17, 2>, run_append<cuda::CalibratedRow, 16, 20, 0>});
}

template <class Source, uint32_t kK, uint32_t kV, uint32_t kCalibrated>
void run_write(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  launch_on_host(cuda::kv_write<Source, kK, kV, int32_t, kCalibrated>, cuda::launch_write, params,
                 args, kKvWrite.info.arg_count, 0);
}
TaskFn select_write(uint64_t key) {
  return writer_of<abi::WriteSpec>(
      key, {run_write<cuda::CalibratedRow, 18, 18, 0>, run_write<float, 21, 18, 1>,
            run_write<cuda::BFloat16, 19, 17, 2>, run_write<cuda::CalibratedRow, 16, 20, 0>});
}

class CalibratedOnHost : public testing::Test {
 protected:
  void check(const std::vector<OpCase>& cases) const {
    for (const OpCase& one : cases) EXPECT_TRUE(check_case(device_, one));
  }

  std::vector<cpu::CpuKernel> table_ = table_with(std::vector<cpu::CpuKernel>{
      {&kKvFeedback.info, select_encode, one_task},
      {&kKvTransform.info, select_transform, one_task},
      {&kKvQuantize.info, select_quantize, one_task},
      {&kKvAppend.info, select_append, one_task},
      {&kKvWrite.info, select_write, one_task},
  });
  Device device_ = device_of(cpu::make_device({.threads = 1}, table_));
  Device cpu_ = Device::open("cpu", {.threads = 1});
};

TEST_F(CalibratedOnHost, CasesOfCalibratedRows) { check(kv_calibrated_cases()); }
TEST_F(CalibratedOnHost, CasesOfTransform) { check(kv_transform_cases()); }

std::vector<float> normal_values(uint64_t count, float spread, const std::string& seed) {
  std::seed_seq seeds(seed.begin(), seed.end());
  std::mt19937 random(seeds);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  return values;
}

Tensor floats(const Device& device, const Dims& shape, const std::vector<float>& values) {
  const Tensor tensor = device.tensor(DType::f32, shape);
  tensor.write_from(std::span<const float>(values));
  return tensor;
}

// kBasisFewRows and more: as on a prompt, many rows to a thread. Fewer: the matrix in stages.
void transform_has_the_cpus_bits(const Device& one, const Device& other, uint64_t tokens) {
  for (const uint64_t n : {16u, 80u, 128u, 144u, 272u, 528u, 1024u}) {
    constexpr uint64_t kKvHeads = 2, kGroup = 2;
    const auto x = normal_values(tokens * kKvHeads * kGroup * n, 1, "x");
    const auto matrix = normal_values(kKvHeads * n * n, 0.1f, "m");
    const auto vectors = normal_values(kKvHeads * n, 1, "v");
    const auto run = [&](const Device& device) {
      const Tensor rows = floats(device, {tokens, kKvHeads * kGroup, n}, x);
      const Tensor vector = floats(device, {kKvHeads, n}, vectors);
      Encoder encoder(device);
      kv_transform(encoder, {rows, floats(device, {kKvHeads, n, n}, matrix), vector, vector, rows});
      encoder.submit().wait();
      std::vector<float> out(x.size());
      rows.read_to(std::span(out));
      return out;
    };
    EXPECT_TRUE(run(one) == run(other)) << n;
  }
}
TEST_F(CalibratedOnHost, TransformHasTheCpusBits) {
  for (const uint64_t tokens : {3u, 131u}) transform_has_the_cpus_bits(device_, cpu_, tokens);
}

// A calibration with all of its parts, for one of K and V.
KvCalibration calibration_for(const Device& device, uint64_t heads, uint64_t n,
                              const std::string& seed) {
  const auto near_identity = [&](const char* part) {
    auto values = normal_values(heads * n * n, 0.5f / static_cast<float>(n), seed + part);
    for (uint64_t i = 0; i < heads * n; ++i) values[i * n + i % n] += 1.0f;
    return floats(device, {heads, n, n}, values);
  };
  auto diagonal = normal_values(heads * n, 0.3f, seed + "d");
  for (float& x : diagonal) x = 0.5f + std::fabs(x);
  KvCalibration made;
  made.transform = {near_identity("b"), near_identity("i"),
                    floats(device, {heads, n}, normal_values(heads * n, 0.5f, seed + "m"))};
  made.feedback = {floats(device, {heads, n, n}, normal_values(heads * n * n, 0.1f, seed + "f")),
                   floats(device, {heads, n}, diagonal),
                   {1.0f, 0.9f, 1.1f}};
  return made;
}

KvLayerCalibration layer_calibration(const Device& device, const WriterCase& c, uint64_t heads) {
  KvLayerCalibration made;
  if ((c.calibrated & 1) != 0) made.k = calibration_for(device, heads, c.head_dim, "k");
  if ((c.calibrated & 2) != 0) made.v = calibration_for(device, heads, c.v_head_dim, "v");
  return made;
}

template <class T>
Tensor rounded(const Device& device, DType dtype, const Dims& shape, const std::vector<float>& of) {
  const Tensor tensor = device.tensor(dtype, shape);
  const std::vector<T> values(of.begin(), of.end());
  tensor.write_from(std::span<const T>(values));
  return tensor;
}

class CalibratedWriters : public CalibratedOnHost, public testing::WithParamInterface<WriterCase> {
 protected:
  static constexpr uint64_t kHeads = 2;

  static Tensor rows(const Device& device, uint64_t tokens, uint64_t n, const std::string& seed) {
    const auto values = kv_values(KvValues::everyday, tokens * kHeads, n, seed);
    const Dims shape = {tokens, kHeads, n};
    if (GetParam().source == DType::f32) return floats(device, shape, values);
    if (GetParam().source == DType::f16) return rounded<Half>(device, DType::f16, shape, values);
    return rounded<BFloat16>(device, DType::bf16, shape, values);
  }
  static std::vector<uint8_t> bytes(const Tensor& x) {
    const auto* const at = reinterpret_cast<const uint8_t*>(x.address());
    return x.defined() ? std::vector<uint8_t>(at, at + x.bytes()) : std::vector<uint8_t>();
  }

  // Steps of a layer with sink tokens and tail, as KvCache records them.
  static std::vector<std::vector<uint8_t>> appended(const Device& device) {
    const WriterCase& c = GetParam();
    const abi::KvPlaces places{2, 5, 17, 21};
    const Tensor state = device.tensor(DType::u8, {sizeof(abi::KvState)});
    const Tensor positions = device.tensor(DType::i32, {64});
    CacheSegments made;
    made.of[0] = {KvBuffer::allocate(device, {c.k, KvRole::k, kHeads, 21, c.head_dim}),
                  KvBuffer::allocate(device, {c.v, KvRole::v, kHeads, 21, c.v_head_dim}),
                  {state, places, abi::kSegmentBody}};
    add_near(made, device.tensor(DType::f16, near_shape(made.of[0].k.shape, places)),
             device.tensor(DType::f16, near_shape(made.of[0].v.shape, places)));
    made.calibration = layer_calibration(device, c, kHeads);
    uint64_t length = 0;
    for (const uint64_t tokens : {3, 1, 9, 12, 1}) {
      abi::KvExtendParams params{};
      params.state = {length, length + tokens, 0};
      params.positions = tokens;
      length += tokens;
      Encoder encoder(device);
      extend_cache(encoder, state, positions, params);
      append_cache(encoder,
                   {rows(device, tokens, c.head_dim, "k" + std::to_string(length)),
                    rows(device, tokens, c.v_head_dim, "v" + std::to_string(length)), made});
      encoder.submit().wait();
    }
    const auto& body = made.of[0];
    return {bytes(body.k.codes),  bytes(body.k.scales), bytes(body.v.codes),
            bytes(body.v.scales), bytes(made.k_near),   bytes(made.v_near)};
  }

  static std::vector<uint8_t> written(const Device& device) {
    const WriterCase& c = GetParam();
    const KvPages pages =
        KvPages::allocate(device, {c.k, c.v, kHeads, c.head_dim, c.v_head_dim, 16}, 3);
    const std::vector<int32_t> list = {16, 17, 18, 19, 20, 21, 22, 23, 5, 3, -1, 47, 40};
    const Tensor slots = device.tensor(DType::i32, {list.size()});
    slots.write_from(std::span<const int32_t>(list));
    const KvLayerCalibration calibration = layer_calibration(device, c, kHeads);
    Encoder encoder(device);
    kv_write(encoder, {.k = rows(device, list.size(), c.head_dim, "k"),
                       .v = rows(device, list.size(), c.v_head_dim, "v"),
                       .pages = pages,
                       .slots = slots,
                       .k_calibration = calibration.k,
                       .v_calibration = calibration.v});
    encoder.submit().wait();
    return bytes(pages.bytes);
  }
};

TEST_P(CalibratedWriters, AppendLeavesTheCpusBytes) {
  EXPECT_TRUE(appended(device_) == appended(cpu_));
}
TEST_P(CalibratedWriters, WriteLeavesTheCpusBytes) {
  EXPECT_TRUE(written(device_) == written(cpu_));
}

INSTANTIATE_TEST_SUITE_P(Kernels, CalibratedWriters, testing::ValuesIn(kWriters));

// The f16 part, which readers of sink tokens and tail see, and rows beyond what squares of f32
// hold. Few rows, and a tile and a half of many; with a basis and a mean and without.
void encodes_what_the_document_says(uint64_t n, uint64_t rows, bool transform) {
  auto x = normal_values(rows * n, 1, "rows");
  constexpr float kScales[] = {1, 1e30f, 1e-40f, 0, 1, 1, 1e-12f, 3e9f};
  for (uint64_t i = 0; i < x.size(); ++i) x[i] *= kScales[i / n % std::size(kScales)];
  x[4 * n + 3] = std::numeric_limits<float>::quiet_NaN();
  x[5 * n + 1] = std::numeric_limits<float>::infinity();
  x[7 * n + 2] = -0.0f;
  const auto matrix = normal_values(n * n, 1, "m"), factor = normal_values(n * n, 0.1f, "f"),
             mean = normal_values(n, 0.5f, "mean");
  const std::vector<float> diagonal(n, 0.75f);
  abi::KvFeedbackParams p{rows, 1, {}};
  p.stream[0] = {n * 4, n * 4, static_cast<uint32_t>(n), abi::kTq4, 2, 0, {1.0f, 1.05f}};
  const uint64_t row_bytes = abi::kv_calibrated_bytes(n);
  std::vector<uint8_t> calibrated((rows + 1) * row_bytes, 0xA5);
  const auto at = [](const auto& of) { return reinterpret_cast<uint64_t>(of.data()); };
  const uint64_t args[14] = {at(x),
                             transform ? at(matrix) : 0,
                             transform ? at(matrix) : 0,
                             transform ? at(mean) : 0,
                             at(factor),
                             at(diagonal),
                             at(calibrated)};
  run_encode<float, abi::kTq4, 0>(&p, args, 0, 1);
  const reference::CalibratedRowInputs in{transform ? matrix.data() : nullptr,
                                          transform ? matrix.data() : nullptr,
                                          transform ? mean.data() : nullptr,
                                          factor.data(),
                                          diagonal.data(),
                                          {1.0f, 1.05f}};
  for (uint64_t r = 0; r < rows; ++r) {
    SCOPED_TRACE(std::to_string(n) + " row " + std::to_string(r) + " of " + std::to_string(rows));
    const auto expected =
        reference::calibrated_row("tq4", false, std::span(x).subspan(r * n, n), in);
    const uint8_t* const got = &calibrated[r * row_bytes];
    EXPECT_EQ(std::memcmp(got, expected.near.data(), 2 * n), 0);
    EXPECT_EQ(std::memcmp(got + 2 * n, expected.codes.data(), n), 0);
    EXPECT_EQ(std::memcmp(got + 3 * n, &expected.scale, 2), 0);
  }
  EXPECT_TRUE(std::all_of(calibrated.end() - static_cast<ptrdiff_t>(row_bytes), calibrated.end(),
                          [](uint8_t byte) { return byte == 0xA5; }))
      << "behind the last row";
}
TEST_F(CalibratedOnHost, EncodesWhatTheDocumentSays) {
  for (const uint64_t n : {16u, 64u, 128u, 256u}) {
    for (const uint64_t rows : {8u, 27u}) {
      for (const bool transform : {true, false}) encodes_what_the_document_says(n, rows, transform);
    }
  }
}

// As many rows as shared memory has room for, in one block or in two side by side.
TEST(CalibratedLaunch, TilesFitIntoEveryGpu) {
  const auto rows_of = [](uint32_t n, uint32_t gains, const cuda::CudaLimits& limits) {
    abi::KvFeedbackParams p{512, 8, {}};
    for (abi::KvFeedbackStream& s : p.stream) s.head_dim = n, s.gains = gains;
    if (!cuda::encode_takes_tiles(p)) return 0u;
    const cuda::Launch how = cuda::launch_kv_feedback(&p, 0, limits);
    EXPECT_LE(how.shared_bytes + 1024, limits.shared_bytes_per_block) << n << " " << gains;
    return how.block / cuda::kEncodeRowThreads;
  };
  const cuda::CudaLimits small{84, 99 << 10, 100 << 10, 89}, hopper{132, 227 << 10, 228 << 10, 90};
  for (const uint32_t n : {16u, 32u, 64u, 128u, 256u}) {
    for (uint32_t gains = 1; gains <= abi::kKvMostGains; ++gains) {
      EXPECT_EQ(rows_of(n, gains, small) == 0, n == 256 && gains > 6);
      EXPECT_EQ(rows_of(n, gains, hopper) == 0, n == 256 && gains > 6);
    }
  }
  EXPECT_EQ(rows_of(128, 3, hopper), 16u);
  EXPECT_EQ(rows_of(256, 3, hopper), 8u);
  EXPECT_EQ(rows_of(128, 3, small), 16u);
  EXPECT_EQ(rows_of(256, 3, small), 4u);
}

}  // namespace
}  // namespace gyre::test
