// rope's CUDA text on the host, on the cases of the CPU's kernel and within their bounds.
#include <gtest/gtest.h>

#include "cuda/kernels.h"
#include "cuda_host/host_device.h"
#include "op_case.h"
// After cuda_host.h
#include "cuda/kernels/rope.cu"

namespace gyre::test {
namespace {

template <class In, class Out, bool kAdjacent, bool kNorm>
void run(const void* params, const uint64_t* args, uint32_t /*task*/, uint32_t /*tasks*/) noexcept {
  const auto dtype = static_cast<uint64_t>(sizeof(In) == 4 ? DType::f32 : DType::f16);
  launch_on_host(cuda::rope<In, Out, kAdjacent, kNorm>, cuda::launch_rope, params, args,
                 kRope.info.arg_count, dtype);
}

template <class In, class Out>
cpu::TaskFn select_variant(const abi::RopeSpec& spec) {
  if (spec.norm != 0) {
    return spec.adjacent != 0 ? run<In, Out, true, true> : run<In, Out, false, true>;
  }
  return spec.adjacent != 0 ? run<In, Out, true, false> : run<In, Out, false, false>;
}

template <class In>
cpu::TaskFn select_out(const abi::RopeSpec& spec) {
  if (spec.out_dtype == 0) return select_variant<In, float>(spec);
  if (spec.out_dtype == 1) return select_variant<In, cuda::Half>(spec);
  return select_variant<In, cuda::BFloat16>(spec);
}

cpu::TaskFn select_rope(uint64_t key) {
  const auto spec = spec_from_key<abi::RopeSpec>(key);
  if (spec.x_dtype == 0) return select_out<float>(spec);
  if (spec.x_dtype == 1) return select_out<cuda::Half>(spec);
  return select_out<cuda::BFloat16>(spec);
}

class RopeOnHost : public testing::Test {
 protected:
  void check(const std::vector<OpCase>& cases, size_t each) const {
    for (size_t i = 0; i < cases.size(); i += each) EXPECT_TRUE(check_case(device_, cases[i]));
  }

  std::vector<cpu::CpuKernel> table_ =
      table_with(std::vector<cpu::CpuKernel>{{&kRope.info, select_rope, one_task}});
  Device device_ = device_of(cpu::make_device({.threads = 1}, table_));
};

TEST_F(RopeOnHost, CasesOfRope) { check(rope_cases(), 7); }
TEST_F(RopeOnHost, CasesOfNormRope) { check(norm_rope_cases(), 5); }

}  // namespace
}  // namespace gyre::test
