// The codec's CUDA text on the host: hadamard, kv_quantize, kv_dequantize and kv_append write the
// CPU's bytes.
#include <gtest/gtest.h>

#include <random>

#include "cuda/kernels.h"
#include "cuda_host/host_device.h"
#include "cuda_host/select_types.h"
#include "kv_codec/kv_codec_case.h"
#include "op_case.h"
#include "ops/cache_ops.h"
// After cuda_host.h
#include "cuda/kernels/hadamard.cu"
#include "cuda/kernels/kv_dequantize.cu"
#include "cuda/kernels/write.cu"

namespace gyre::test {
namespace {

using cpu::TaskFn;

template <class In, class Out>
void run_hadamard(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  launch_on_host(cuda::hadamard<In, Out>, cuda::launch_hadamard, params, args, 2, 0);
}

TaskFn select_hadamard(uint64_t key) {
  const auto spec = spec_from_key<abi::HadamardSpec>(key);
  return with_float(spec.x_dtype, [&](auto in) {
    return with_float(spec.out_dtype,
                      [](auto out) -> TaskFn { return run_hadamard<decltype(in), decltype(out)>; });
  });
}

template <class Out, uint32_t kFormat>
void run_dequantize(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  launch_on_host(cuda::kv_dequantize<Out, kFormat>, cuda::launch_kv_dequantize, params, args, 3, 0);
}

TaskFn select_dequantize(uint64_t key) {
  const auto spec = spec_from_key<abi::KvDequantizeSpec>(key);
  return with_float(spec.out_dtype, [&](auto out) {
    return with_format(Compressed(), spec.format, [](auto format) -> TaskFn {
      return run_dequantize<decltype(out), decltype(format)::value>;
    });
  });
}

template <class Source, uint32_t kFormatK, uint32_t kFormatV>
void launch_quantize(abi::WriteParams p, const uint64_t* args) {
  p.first_stream = kFormatK != 0 ? 0 : 1;
  p.streams = kFormatK != 0 && kFormatV != 0 ? 2 : 1;
  launch_on_host(cuda::kv_quantize<Source, kFormatK, kFormatV>, cuda::launch_write, &p, args,
                 kKvQuantize.info.arg_count, 0);
}

// Most pairs as K alone and V alone: a kernel for each of them would take minutes to compile.
template <class Source, uint32_t kFormatK, uint32_t kFormatV>
void run_quantize(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  const auto& p = *static_cast<const abi::WriteParams*>(params);
  constexpr bool kTakesPair = (kFormatK == 18 || kFormatK == 21) && kFormatV == 18;
  if constexpr (kFormatK == 0 || kFormatV == 0 || kTakesPair) {
    launch_quantize<Source, kFormatK, kFormatV>(p, args);
  } else {
    launch_quantize<Source, kFormatK, 0>(p, args);
    launch_quantize<Source, 0, kFormatV>(p, args);
  }
}

TaskFn select_quantize(uint64_t key) {
  const auto spec = spec_from_key<abi::WriteSpec>(key);
  return with_float(spec.source_dtype, [&](auto source) {
    using Source = decltype(source);
    if (spec.k_format == 0) {
      return with_format(Compressed(), spec.v_format, [](auto v) -> TaskFn {
        return run_quantize<Source, 0, decltype(v)::value>;
      });
    }
    return with_format(Compressed(), spec.k_format, [&](auto k) -> TaskFn {
      constexpr uint32_t kK = decltype(k)::value;
      if (spec.v_format == 0) return run_quantize<Source, kK, 0>;
      return with_format(Compressed(), spec.v_format, [](auto v) -> TaskFn {
        return run_quantize<Source, kK, decltype(v)::value>;
      });
    });
  });
}

template <class Source, uint32_t kFormatK, uint32_t kFormatV>
void run_append(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  launch_on_host(cuda::kv_append<Source, kFormatK, kFormatV>, cuda::launch_write, params, args,
                 kKvAppend.info.arg_count, 0);
}

TaskFn select_append(uint64_t key) {
  const auto spec = spec_from_key<abi::WriteSpec>(key);
  const auto is = [&](DType source, KvFormat k, KvFormat v) {
    return spec.source_dtype == static_cast<uint8_t>(source) &&
           spec.k_format == static_cast<uint8_t>(k) && spec.v_format == static_cast<uint8_t>(v);
  };
  if (is(DType::f32, KvFormat::tq8, KvFormat::tq4)) return run_append<float, 21, 18>;
  if (is(DType::bf16, KvFormat::tq5, KvFormat::tq3)) return run_append<cuda::BFloat16, 19, 17>;
  if (is(DType::f16, KvFormat::f16, KvFormat::tq6)) return run_append<cuda::Half, 1, 20>;
  if (is(DType::f32, KvFormat::bf16, KvFormat::f32)) return run_append<float, 2, 0>;
  if (is(DType::f16, KvFormat::mlx_native4, KvFormat::tq2)) return run_append<cuda::Half, 32, 16>;
  return nullptr;
}

class CodecOnHost : public testing::Test {
 protected:
  void check(const std::vector<OpCase>& cases, size_t each) const {
    for (size_t i = 0; i < cases.size(); i += each) EXPECT_TRUE(check_case(device_, cases[i]));
  }
  static std::vector<uint8_t> bytes(const Tensor& tensor) {
    std::vector<uint8_t> all(tensor.defined() ? tensor.bytes() : 0);
    if (tensor.defined() && tensor.dtype() == DType::f32) {
      tensor.read_to(std::span(reinterpret_cast<float*>(all.data()), tensor.elements()));
    } else if (tensor.defined() && tensor.dtype() == DType::u8) {
      tensor.read_to(std::span(all));
    } else if (tensor.defined() && tensor.dtype() == DType::f16) {
      tensor.read_to(std::span(reinterpret_cast<Half*>(all.data()), tensor.elements()));
    } else if (tensor.defined()) {
      tensor.read_to(std::span(reinterpret_cast<BFloat16*>(all.data()), tensor.elements()));
    }
    return all;
  }

  std::vector<cpu::CpuKernel> table_ = table_with(std::vector<cpu::CpuKernel>{
      {&kHadamard.info, select_hadamard, one_task},
      {&kKvDequantize.info, select_dequantize, one_task},
      {&kKvQuantize.info, select_quantize, one_task},
      {&kKvAppend.info, select_append, one_task},
  });
  Device device_ = device_of(cpu::make_device({.threads = 1}, table_));
  Device cpu_ = Device::open("cpu", {.threads = 1});
};

TEST_F(CodecOnHost, CasesOfHadamard) { check(hadamard_cases(), 7); }
TEST_F(CodecOnHost, CasesOfQuantize) { check(kv_quantize_cases(), 23); }
TEST_F(CodecOnHost, CasesOfDequantize) { check(kv_dequantize_cases(), 13); }
TEST_F(CodecOnHost, MlxNativeFormats) {
  check(kv_mlx_native_quantize_cases(), 1);
  check(kv_mlx_native_dequantize_cases(), 1);
}

// Codes and scales of K and of V, and V decoded, after `record` wrote rows of `head_dim` into a
// ring of the format.
using Record = void (*)(Encoder&, const KvQuantizeInputs&);
std::vector<Tensor> written(const Device& device, KvFormat format, uint64_t head_dim,
                            Record record) {
  const auto values =
      kv_values(head_dim == 128 ? KvValues::extreme : KvValues::everyday, 17, head_dim, "aligned");
  const Tensor x = device.tensor(DType::f32, {17, 1, head_dim});
  x.write_from(std::span<const float>(values));
  const KvQuantizeInputs in{
      .k = x,
      .k_cache = KvBuffer::allocate(device, {format, KvRole::k, 1, 20, head_dim}),
      .v = x,
      .v_cache = KvBuffer::allocate(device, {format, KvRole::v, 1, 20, head_dim})};
  const Tensor out = device.tensor(DType::f16, {20, 1, head_dim});
  Encoder encoder(device);
  record(encoder, in);
  kv_dequantize(encoder, {in.v_cache, out});
  encoder.submit().wait();
  return {in.k_cache.codes, in.k_cache.scales, in.v_cache.codes, in.v_cache.scales, out};
}

constexpr KvRange kRingAtSeven{.position = 7, .cache = CacheKind::ring};

void write_both(Encoder& encoder, const KvQuantizeInputs& in) {
  kv_quantize(encoder, in, kRingAtSeven);
}
void write_each(Encoder& encoder, const KvQuantizeInputs& in) {
  kv_quantize(encoder, {.v = in.v, .v_cache = in.v_cache}, kRingAtSeven);
  kv_quantize(encoder, {.k = in.k, .k_cache = in.k_cache}, kRingAtSeven);
}

// Aligned rows and full tiles, which the cases, between guards, do not have; K and V in one command
// and each alone.
TEST_F(CodecOnHost, AlignedRowsGiveTheCpusBytes) {
  for (const KvFormat format : kv_formats()) {
    const KvFormatInfo info = describe(format);
    if (!info.compressed) continue;
    const bool native = info.packing == KvPacking::planes;
    const auto dims =
        native ? std::vector<uint64_t>{64, 128, 192, 576, 1024} : std::vector<uint64_t>{256, 512};
    for (const uint64_t head_dim : dims) {
      const auto expected = written(cpu_, format, head_dim, write_both);
      const auto both = written(device_, format, head_dim, write_both);
      const auto each = written(device_, format, head_dim, write_each);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(bytes(both[i]) == bytes(expected[i]))
            << name(format) << " " << head_dim << " tensor " << i;
        EXPECT_TRUE(bytes(each[i]) == bytes(expected[i]))
            << name(format) << " " << head_dim << " tensor " << i << ", written alone";
      }
    }
  }
}

struct AppendCase {
  DType source;
  KvFormat k, v;
  uint64_t head_dim, v_head_dim;
  uint64_t sink_tokens, tail, window;
};

// Some steps of a layer with sink tokens, tail and a body that wraps, as KvCache records them.
class AppendOnHost : public CodecOnHost, public testing::WithParamInterface<AppendCase> {
 protected:
  static constexpr uint64_t kHeads = 2;

  CacheSegments segments(const Device& device, const Tensor& state) const {
    const AppendCase& c = GetParam();
    const uint64_t tail_slots = c.tail != 0 ? c.tail + 12 : 0;
    const abi::KvPlaces places{c.sink_tokens, c.tail, tail_slots, c.window != 0 ? c.window : 40};
    CacheSegments made;
    const auto body = [&](KvFormat format, KvRole role, uint64_t head_dim) {
      return KvBuffer::allocate(device, {format, role, kHeads, places.body_capacity, head_dim});
    };
    made.of[0] = {body(c.k, KvRole::k, c.head_dim),
                  body(c.v, KvRole::v, c.v_head_dim),
                  {state, places, abi::kSegmentBody}};
    if (c.sink_tokens != 0 || c.tail != 0) {
      const auto near = [&](const KvBuffer& half) {
        return device.tensor(DType::f16, near_shape(half.shape, places));
      };
      add_near(made, near(made.of[0].k), near(made.of[0].v));
    }
    return made;
  }

  Tensor rows(const Device& device, uint64_t tokens, uint64_t head_dim, uint32_t seed) const {
    const auto values =
        kv_values(KvValues::everyday, tokens * kHeads, head_dim, std::to_string(seed));
    const Tensor tensor = device.tensor(GetParam().source, {tokens, kHeads, head_dim});
    if (tensor.dtype() == DType::f32) {
      tensor.write_from(std::span<const float>(values));
    } else if (tensor.dtype() == DType::f16) {
      const std::vector<Half> halves(values.begin(), values.end());
      tensor.write_from(std::span<const Half>(halves));
    } else {
      const std::vector<BFloat16> halves(values.begin(), values.end());
      tensor.write_from(std::span<const BFloat16>(halves));
    }
    return tensor;
  }

  std::vector<std::vector<uint8_t>> life(const Device& device) const {
    const AppendCase& c = GetParam();
    const Tensor state = device.tensor(DType::u8, {sizeof(abi::KvState)});
    const Tensor positions = device.tensor(DType::i32, {64});
    const CacheSegments made = segments(device, state);
    uint64_t length = 0;
    uint32_t seed = 0;
    for (const uint64_t tokens : {3, 1, 9, 1, 2, 12, 1}) {
      abi::KvExtendParams params{};
      params.state = {length, length + tokens, 0};
      length += tokens;
      params.positions = tokens;
      Encoder encoder(device);
      extend_cache(encoder, state, positions, params);
      append_cache(encoder, {rows(device, tokens, c.head_dim, ++seed),
                             rows(device, tokens, c.v_head_dim, ++seed), made});
      encoder.submit().wait();
    }
    std::vector<std::vector<uint8_t>> all;
    for (uint32_t i = 0; i < made.count; ++i) {
      for (const KvBuffer* buffer : {&made.of[i].k, &made.of[i].v}) {
        all.push_back(bytes(buffer->codes));
        all.push_back(bytes(buffer->scales));
      }
    }
    return all;
  }
};

TEST_P(AppendOnHost, WritesTheCpusBytes) { EXPECT_EQ(life(device_), life(cpu_)); }

INSTANTIATE_TEST_SUITE_P(
    Layers, AppendOnHost,
    testing::Values(AppendCase{DType::f32, KvFormat::tq8, KvFormat::tq4, 128, 128, 2, 5, 0},
                    AppendCase{DType::f32, KvFormat::tq8, KvFormat::tq4, 80, 24, 0, 0, 13},
                    AppendCase{DType::bf16, KvFormat::tq5, KvFormat::tq3, 96, 64, 3, 0, 0},
                    AppendCase{DType::f16, KvFormat::f16, KvFormat::tq6, 64, 576, 0, 6, 0},
                    AppendCase{DType::f32, KvFormat::bf16, KvFormat::f32, 20, 36, 0, 0, 18},
                    AppendCase{DType::f16, KvFormat::mlx_native4, KvFormat::tq2, 64, 40, 1, 7, 0}));

// The kernels find a magnitude's index by a polynomial; the format by thresholds.
template <uint32_t kBits, size_t kCount>
void check_indices(const uint8_t (&thresholds)[kCount]) {
  const auto check = [&](float v) {
    uint32_t index = 0;
    for (const uint8_t threshold : thresholds) index += v > static_cast<float>(threshold) ? 1 : 0;
    EXPECT_EQ(cuda::magnitude_index<kBits>(v) >> 16 & 0xFF, index) << kBits << " bits, " << v;
  };
  for (uint32_t i = 0; i <= 2048; ++i) {  // beyond every doubled magnitude
    const auto v = static_cast<float>(i);
    check(v), check(std::nextafter(v, 1e9f)), check(std::fabs(std::nextafter(v, -1.0f)));
    check(v + 0.5f);
  }
}

TEST(MagnitudeIndex, IsTheOneThatThresholdsGive) {
  check_indices<2>(abi::kTq2Thresholds);
  check_indices<3>(abi::kTq3Thresholds);
  check_indices<4>(abi::kTq4Thresholds);
}

}  // namespace
}  // namespace gyre::test
