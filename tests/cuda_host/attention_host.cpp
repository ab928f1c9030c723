#include "attention_host.h"

#include "cuda_host.h"
// After cuda_host.h
#include "cuda/kernels/attention/merge.cu"
#include "cuda/kernels/attention/prefill.cu"

namespace gyre::test {
namespace {

template <class Params, class Kernel>
void run(const Kernel& kernel, const void* params, const uint64_t* args, uint32_t count,
         const HostLaunch& launch) {
  cuda::Args copied{};
  std::copy_n(args, count, copied.at);
  cuda_host::launch(dim3(launch.grid[0], launch.grid[1], launch.grid[2]), launch.threads,
                    launch.shared_bytes, kernel, *static_cast<const Params*>(params), copied);
}

template <uint32_t kK, uint32_t kV>
void run_attention(const void* params, const uint64_t* args, const HostLaunch& launch) {
  run<abi::AttentionParams>(cuda::attention_prefill<kK, kV>, params, args, 16, launch);
}

template <class Out>
void run_merge(const void* params, const uint64_t* args, const HostLaunch& launch) {
  run<abi::AttentionMergeParams>(cuda::attention_merge<Out>, params, args, 4, launch);
}

struct Pair {
  uint32_t k, v;
  HostKernel run;
};

template <uint32_t kK, uint32_t kV = kK>
constexpr Pair pair() {
  return {kK, kV, run_attention<kK, kV>};
}

constexpr uint32_t kF32 = cuda::kFormatF32, kF16 = cuda::kFormatF16, kBf16 = cuda::kFormatBf16;
constexpr Pair kPairs[] = {
    pair<kF32>(),
    pair<kF16>(),
    pair<kBf16>(),
    pair<abi::kTq2>(),
    pair<abi::kTq3>(),
    pair<abi::kTq4>(),
    pair<abi::kTq5>(),
    pair<abi::kTq6>(),
    pair<abi::kTq8>(),
    pair<abi::kMlxNative4>(),
    pair<abi::kMlxNative5>(),
    pair<abi::kMlxNative6>(),
    pair<abi::kMlxNative8>(),
    pair<abi::kTq8, abi::kTq4>(),
    pair<kF16, abi::kTq3>(),
    pair<abi::kTq6, kBf16>(),
    pair<kF32, abi::kMlxNative4>(),
};

}  // namespace

HostKernel host_attention(uint32_t k_format, uint32_t v_format) {
  for (const Pair& p : kPairs) {
    if (p.k == k_format && p.v == v_format) return p.run;
  }
  return nullptr;
}

HostKernel host_attention_merge(uint32_t out_dtype) {
  if (out_dtype == 0) return run_merge<float>;
  return out_dtype == 1 ? run_merge<cuda::Half> : run_merge<cuda::BFloat16>;
}

}  // namespace gyre::test
