#include "metal/test_kernels.h"

#include <cstring>

#include "metal_host/host_kernel.h"

namespace gyre::test {
namespace {

constexpr const char* kMixText = R"(
#include <metal_stdlib>
using namespace metal;
struct MixParams { ulong a_bytes, b_bytes, out_bytes; uint salt, fold; };
kernel void test_mix(constant MixParams& p [[buffer(0)]], device const uchar* a [[buffer(1)]],
                     device const uchar* b [[buffer(2)]], device uchar* out [[buffer(3)]],
                     constant uint& arguments [[buffer(17)]],
                     uint index [[thread_position_in_grid]], uint count [[threads_per_grid]]) {
  for (ulong i = index; i < p.out_bytes; i += count) {
    const uint x = p.a_bytes == 0 ? 0 : a[i % p.a_bytes];
    const uint y = p.b_bytes == 0 ? 0 : b[i % p.b_bytes];
    out[i] = uchar(x * 7 + y * 13 + uint(i) * 5 + p.salt + (p.fold != 0 ? out[i] * 3 : 0));
  }
}
kernel void test_copy(constant MixParams& p [[buffer(0)]], device const uchar* a [[buffer(1)]],
                      device uchar* out [[buffer(2)]],
                      uint index [[thread_position_in_grid]], uint count [[threads_per_grid]]) {
  for (ulong i = index; i < p.out_bytes; i += count) out[i] = a[i];
}
)";

constexpr const char* kArgumentsText = R"(
#include <metal_stdlib>
using namespace metal;
kernel void test_arguments(constant ulong& salt [[buffer(0)]], device uchar* out [[buffer(1)]],
                           device const uchar* a [[buffer(2)]], device const uchar* b [[buffer(3)]],
                           constant uint& arguments [[buffer(17)]],
                           uint index [[thread_position_in_grid]]) {
  if (index != 0) return;
  for (uint i = 0; i < 4; ++i) out[i] = uchar(arguments >> (8 * i));
  out[4] = (arguments & 2) != 0 ? a[0] : uchar(salt);
  out[5] = (arguments & 4) != 0 ? b[0] : uchar(salt);
}
)";

void run_mix(const metal_host::HostDispatch& d) {
  const auto& p = *static_cast<const MixParams*>(d.params);
  const auto* const a = static_cast<const uint8_t*>(d.args[0]);
  const auto* const b = static_cast<const uint8_t*>(d.args[1]);
  auto* const out = static_cast<uint8_t*>(d.args[2]);
  for (uint64_t i = 0; i < p.out_bytes; ++i) {
    const uint8_t x = p.a_bytes == 0 ? uint8_t{0} : a[i % p.a_bytes];
    const uint8_t y = p.b_bytes == 0 ? uint8_t{0} : b[i % p.b_bytes];
    out[i] = mixed(x, y, p.fold != 0 ? out[i] : uint8_t{0}, i, p);
  }
}

void run_copy(const metal_host::HostDispatch& d) {
  const auto& p = *static_cast<const MixParams*>(d.params);
  std::memcpy(d.args[1], d.args[0], p.out_bytes);
}

void run_arguments(const metal_host::HostDispatch& d) {
  auto* const out = static_cast<uint8_t*>(d.args[0]);
  const auto salt = static_cast<uint8_t>(*static_cast<const uint64_t*>(d.params));
  for (int i = 0; i < 4; ++i) out[i] = static_cast<uint8_t>(d.arguments >> (8 * i));
  for (uint32_t i = 1; i <= 2; ++i) {
    const bool is_there = (d.arguments >> i & 1) != 0;
    out[3 + i] = is_there ? *static_cast<const uint8_t*>(d.args[i]) : salt;
  }
}

[[maybe_unused]] const bool kRegistered =
    metal_host::register_kernel({"test_mix", run_mix}) &&
    metal_host::register_kernel({"test_copy", run_copy}) &&
    metal_host::register_kernel({"test_arguments", run_arguments});

const CustomKernel& copy_kernel() {
  static const CustomKernel kKernel({.name = "copy",
                                     .args = {{"a", Access::read}, {"out", Access::write}},
                                     .params_bytes = sizeof(MixParams),
                                     .metal = {kMixText, "test_copy"}});
  return kKernel;
}

}  // namespace

const CustomKernel& mix_kernel() {
  static const CustomKernel kKernel(
      {.name = "mix",
       .args = {{"a", Access::read}, {"b", Access::read}, {"out", Access::read_write}},
       .params_bytes = sizeof(MixParams),
       .metal = {kMixText, "test_mix"}});
  return kKernel;
}

const CustomKernel& arguments_kernel() {
  static const CustomKernel kKernel(
      {.name = "arguments",
       .args = {{"out", Access::write}, {"a", Access::read}, {"b", Access::read}},
       .params_bytes = sizeof(uint64_t),
       .metal = {kArgumentsText, "test_arguments"}});
  return kKernel;
}

void record_mix(Encoder& encoder, const MixCall& call) {
  const auto bytes = [](const Tensor& tensor) { return tensor.defined() ? tensor.elements() : 0; };
  const MixParams params{.a_bytes = bytes(call.a),
                         .b_bytes = bytes(call.b),
                         .out_bytes = bytes(call.out),
                         .salt = call.salt,
                         .fold = call.fold ? 1u : 0u};
  mix_kernel()(encoder, params, {call.a, call.b, call.out}, call.launch);
}

void record_copy(Encoder& encoder, const Tensor& a, const Tensor& out) {
  copy_kernel()(encoder, MixParams{.out_bytes = out.elements()}, {a, out},
                {.grid = {4, 1, 1}, .block = 128});
}

}  // namespace gyre::test
