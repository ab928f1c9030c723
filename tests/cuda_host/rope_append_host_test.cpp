// rope_append's CUDA text on the host, on the cases of the CPU's kernel, bit for bit; and against
// rope and kv_write on such a device, with angles and norms that are rounded.
#include <gtest/gtest.h>

#include <string>

#include "cuda/kernels.h"
#include "cuda_host/host_device.h"
#include "rope_append/rope_append_case.h"
#include "runtime/device_impl.h"
// After cuda_host.h
#include "cuda/kernels/rope_append.cu"

namespace gyre::test {
namespace {

constexpr uint32_t kF16 = 1, kTq3 = 17, kTq4 = 18, kTq8 = 21;

template <class In, uint32_t kK, uint32_t kV, bool kAdjacent, bool kNorm, class Where,
          uint32_t kQuads>
void run(const void* params, const uint64_t* args, uint32_t /*task*/, uint32_t /*tasks*/) noexcept {
  abi::RopeAppendSpec spec{};
  spec.dtype = static_cast<uint8_t>(sizeof(In) == 4 ? DType::f32 : DType::f16);
  launch_on_host(cuda::rope_append<In, kK, kV, kAdjacent, kNorm, Where, kQuads>,
                 cuda::launch_rope_append, params, args, kRopeAppend.info.arg_count,
                 spec_key(spec));
}

template <class In, uint32_t kK, uint32_t kV, class Where>
cpu::TaskFn select_options(const abi::RopeAppendSpec& spec) {
  if (spec.norm != 0)
    return spec.adjacent != 0 ? run<In, kK, kV, true, true, Where, 1>
                              : run<In, kK, kV, false, true, Where, 1>;
  return spec.adjacent != 0 ? run<In, kK, kV, true, false, Where, 1>
                            : run<In, kK, kV, false, false, Where, 1>;
}

// Rows longer than 128.
template <class In, uint32_t kK, uint32_t kV, class Where>
cpu::TaskFn select_long(const abi::RopeAppendSpec& spec) {
  if (spec.adjacent != 0) return nullptr;
  if (spec.lane_quads == 4)
    return spec.norm != 0 ? nullptr : run<In, kK, kV, false, false, Where, 4>;
  return spec.norm != 0 ? run<In, kK, kV, false, true, Where, 2>
                        : run<In, kK, kV, false, false, Where, 2>;
}

template <class In, uint32_t kK, uint32_t kV, class Where>
cpu::TaskFn select(const abi::RopeAppendSpec& spec) {
  return spec.lane_quads == 1 ? select_options<In, kK, kV, Where>(spec)
                              : select_long<In, kK, kV, Where>(spec);
}

// Some pairs of formats and dtypes; nothing for many tokens, as on the GPU.
cpu::TaskFn select_some(uint64_t key) {
  const auto s = spec_from_key<abi::RopeAppendSpec>(key);
  const auto is = [&](DType dtype, uint32_t k, uint32_t v) {
    return s.dtype == static_cast<uint8_t>(dtype) && s.k_format == k && s.v_format == v;
  };
  if (s.lane_quads == 0) return nullptr;
  if (is(DType::f32, kTq8, kTq4)) {
    if (s.slot_bytes == 0) return select<float, kTq8, kTq4, abi::KvState>(s);
    if (s.slot_bytes == 8) return select<float, kTq8, kTq4, int64_t>(s);
  }
  const bool plain = s.adjacent == 0 && s.lane_quads == 1, norm = s.norm != 0;
  if (is(DType::f16, kTq3, kTq8) && s.slot_bytes == 0)
    return select<cuda::Half, kTq3, kTq8, abi::KvState>(s);
  if (!plain || norm) return nullptr;
  if (is(DType::f32, kTq8, kTq4)) return run<float, kTq8, kTq4, false, false, int32_t, 1>;
  if (is(DType::f32, kTq8, kTq3) && s.slot_bytes == 8)
    return run<float, kTq8, kTq3, false, false, int64_t, 1>;
  if (is(DType::f32, kTq8, kF16) && s.slot_bytes == 0)
    return run<float, kTq8, kF16, false, false, abi::KvState, 1>;
  if (is(DType::bf16, kF16, kTq4) && s.slot_bytes == 8)
    return run<cuda::BFloat16, kF16, kTq4, false, false, int64_t, 1>;
  return nullptr;
}

class RopeAppendOnHost : public testing::Test {
 protected:
  void check(const OpCase& op_case) const { EXPECT_TRUE(check_case(device_, op_case)); }
  void TearDown() override { early_args = 0; }

  std::vector<cpu::CpuKernel> table_ =
      table_with(std::vector<cpu::CpuKernel>{{&kRopeAppend.info, select_some, one_task}});
  Device device_ = device_of(cpu::make_device({.threads = 1}, table_));
};

// What the table does not have is refused by name, so that only such cases are left out.
TEST_F(RopeAppendOnHost, CasesOfTheTable) {
  uint32_t ran = 0;
  for (const OpCase& op_case : rope_append_cases()) {
    early_args = ran % 2 == 0 ? 0 : ~0u;
    try {
      check(op_case);
      ++ran;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << op_case.name;
    }
  }
  EXPECT_GE(ran, 60u);
}

TEST_F(RopeAppendOnHost, Shapes) {
  struct Shape {
    uint64_t k_dim, v_dim, kv_heads, tokens;
  };
  for (const Shape& s :
       {Shape{128, 128, 8, 1}, Shape{128, 128, 3, 7}, Shape{256, 192, 2, 5}, Shape{16, 40, 5, 9},
        Shape{80, 96, 1, 32}, Shape{64, 256, 9, 2}, Shape{512, 320, 2, 3}}) {
    for (const bool norm : {false, true}) {
      if (norm && s.k_dim > 256) continue;  // not in the table
      early_args = ~early_args;
      RopeAppendCase c;
      c.k_dim = s.k_dim, c.v_dim = s.v_dim, c.kv_heads = s.kv_heads, c.tokens = s.tokens;
      c.heads = 3 * s.kv_heads;
      c.norm = norm;
      c.sink_tokens = 2, c.tail = 3, c.start = 1;
      c.name = "shape " + std::to_string(s.k_dim) + "/" + std::to_string(s.v_dim);
      check(make_case(c));
      c.k = KvFormat::tq3, c.v = KvFormat::tq8, c.dtype = DType::f16;
      check(make_case(c));
    }
  }
}

}  // namespace
}  // namespace gyre::test
