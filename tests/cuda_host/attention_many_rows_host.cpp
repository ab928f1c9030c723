#include "attention_host.h"
#include "cuda_host.h"
// After cuda_host.h
#include "cuda/kernels/attention/many_rows.cu"

namespace gyre::test {
namespace {

template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim, uint32_t kGpu>
void run_many_rows(const void* params, const uint64_t* args, const HostLaunch& launch) {
  cuda::Args copied{};
  std::copy_n(args, 16, copied.at);
  cuda_host::launch(dim3(launch.grid[0], launch.grid[1], launch.grid[2]), launch.threads,
                    launch.shared_bytes, cuda::attention_many_rows<kK, kV, kKDim, kVDim, kGpu>,
                    *static_cast<const abi::AttentionParams*>(params), copied);
}

template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim, uint32_t kGroups>
void run_drafts(const void* params, const uint64_t* args, const HostLaunch& launch) {
  cuda::Args copied{};
  std::copy_n(args, 16, copied.at);
  cuda_host::launch(dim3(launch.grid[0], launch.grid[1], launch.grid[2]), launch.threads,
                    launch.shared_bytes, cuda::attention_drafts<kK, kV, kKDim, kVDim, kGroups>,
                    *static_cast<const abi::AttentionParams*>(params), copied);
}

struct Variant {
  uint32_t k, v, k_dim, v_dim, gpu;
  HostKernel run;
};
template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim = kKDim, uint32_t kGpu = 0>
constexpr Variant variant() {
  return {kK, kV, kKDim, kVDim, kGpu, run_many_rows<kK, kV, kKDim, kVDim, kGpu>};
}

template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim = kKDim, uint32_t kGroups = 1>
constexpr Variant drafts() {
  return {kK,
          kV,
          kKDim,
          kVDim,
          kGroups == 1 ? cuda::kManyRowsDrafts : cuda::kManyRowsDrafts2,
          run_drafts<kK, kV, kKDim, kVDim, kGroups>};
}

constexpr uint32_t kF16 = cuda::kFormatF16, kBf16 = cuda::kFormatBf16;
constexpr uint32_t kHalf = cuda::kManyRowsHalf, kMedium = cuda::kManyRowsMedium,
                   kSmall = cuda::kManyRowsSmall;
constexpr Variant kVariants[] = {
    variant<kF16, kF16, 64>(),
    variant<kF16, kF16, 80>(),
    variant<kBf16, kBf16, 128>(),
    variant<kBf16, kBf16, 192, 128>(),
    variant<kF16, kF16, 256>(),
    variant<abi::kTq2, abi::kTq2, 64>(),
    variant<abi::kTq3, abi::kTq3, 128>(),
    variant<abi::kTq4, abi::kTq4, 64>(),
    variant<abi::kTq4, abi::kTq4, 128>(),
    variant<abi::kTq5, abi::kTq5, 128>(),
    variant<abi::kTq6, abi::kTq6, 64>(),
    variant<abi::kTq8, abi::kTq8, 64>(),
    variant<abi::kTq8, abi::kTq4, 256>(),
    variant<kF16, abi::kTq4, 64>(),
    variant<abi::kTq8, kBf16, 128>(),
    variant<kF16, kF16, 64, 64, kHalf>(),
    variant<kF16, kF16, 256, 256, kHalf>(),
    variant<kBf16, kBf16, 112, 112, kHalf>(),
    variant<abi::kTq4, abi::kTq4, 128, 128, kHalf>(),
    variant<abi::kTq8, abi::kTq8, 64, 64, kHalf>(),
    variant<abi::kTq8, abi::kTq4, 256, 256, kHalf>(),
    variant<abi::kTq8, kF16, 128, 128, kHalf>(),
    variant<abi::kTq8, kBf16, 128, 128, kHalf>(),
    variant<kF16, kF16, 64, 64, kMedium>(),
    variant<abi::kTq4, abi::kTq4, 256, 256, kMedium>(),
    variant<kF16, kF16, 192, 128, kSmall>(),
    variant<abi::kTq4, abi::kTq4, 128, 128, kSmall>(),
    drafts<abi::kTq4, abi::kTq4, 128>(),
    drafts<abi::kTq4, abi::kTq4, 128, 128, 2>(),
    drafts<abi::kTq8, abi::kTq8, 128>(),
    drafts<abi::kTq8, abi::kTq4, 256>(),
    drafts<abi::kTq2, abi::kTq2, 64>(),
    drafts<abi::kTq3, abi::kTq3, 128>(),
    drafts<abi::kTq5, abi::kTq5, 128>(),
    drafts<abi::kTq6, abi::kTq6, 64>(),
};

}  // namespace

HostKernel host_attention_many_rows(uint32_t k_format, uint32_t v_format, uint32_t k_dim,
                                    uint32_t v_dim, uint32_t gpu) {
  for (const Variant& x : kVariants) {
    if (x.k == k_format && x.v == v_format && x.k_dim == k_dim && x.v_dim == v_dim && x.gpu == gpu)
      return x.run;
  }
  return nullptr;
}

}  // namespace gyre::test
