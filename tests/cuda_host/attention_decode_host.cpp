#include "attention_host.h"
#include "cuda_host.h"
// After cuda_host.h
#include "cuda/kernels/attention/decode.cu"

namespace gyre::test {
namespace {

template <uint32_t kK, uint32_t kV, uint32_t kN, uint32_t kRows, uint32_t kCluster, uint32_t kNV>
void run_decode(const void* params, const uint64_t* args, const HostLaunch& launch) {
  cuda::Args copied{};
  std::copy_n(args, 12, copied.at);
  cuda_host::launch_clusters(dim3(launch.grid[0], launch.grid[1], launch.grid[2]), kCluster,
                             launch.threads, launch.shared_bytes,
                             cuda::attention_decode<kK, kV, kN, kRows, kCluster, kNV>,
                             *static_cast<const abi::AttentionParams*>(params), copied);
}

struct Variant {
  uint32_t k, v, head_dim, value_dim, rows, cluster;
  HostKernel run;
};

template <uint32_t kK, uint32_t kV, uint32_t kN, uint32_t kRows, uint32_t kCluster = 1,
          uint32_t kNV = kN>
constexpr Variant variant() {
  return {kK, kV, kN, kNV, kRows, kCluster, run_decode<kK, kV, kN, kRows, kCluster, kNV>};
}

constexpr uint32_t kF16 = cuda::kFormatF16, kBf16 = cuda::kFormatBf16;
constexpr Variant kVariants[] = {
    variant<kF16, kF16, 64, 8>(),
    variant<kF16, kF16, 128, 8>(),
    variant<kF16, kF16, 256, 8>(),
    variant<kF16, kF16, 128, 16>(),
    variant<kBf16, kBf16, 64, 8>(),
    variant<kBf16, kBf16, 128, 8>(),
    variant<kBf16, kBf16, 512, 8>(),
    variant<abi::kTq2, abi::kTq2, 64, 4>(),
    variant<abi::kTq2, abi::kTq2, 128, 4>(),
    variant<abi::kTq2, abi::kTq2, 128, 8>(),
    variant<abi::kTq2, abi::kTq2, 512, 4>(),
    variant<abi::kTq3, abi::kTq3, 128, 4>(),
    variant<abi::kTq3, abi::kTq3, 128, 8>(),
    variant<abi::kTq3, abi::kTq3, 256, 4>(),
    variant<abi::kTq3, abi::kTq3, 512, 4>(),
    variant<abi::kTq4, abi::kTq4, 64, 4>(),
    variant<abi::kTq4, abi::kTq4, 64, 12>(),
    variant<abi::kTq4, abi::kTq4, 64, 16>(),
    variant<abi::kTq4, abi::kTq4, 128, 4>(),
    variant<abi::kTq4, abi::kTq4, 128, 8>(),
    variant<abi::kTq4, abi::kTq4, 128, 12>(),
    variant<abi::kTq4, abi::kTq4, 128, 16>(),
    variant<abi::kTq4, abi::kTq4, 256, 4>(),
    variant<abi::kTq4, abi::kTq4, 256, 8>(),
    variant<abi::kTq4, abi::kTq4, 512, 4>(),
    variant<abi::kTq4, abi::kTq4, 512, 8>(),
    variant<abi::kTq5, abi::kTq5, 128, 4>(),
    variant<abi::kTq5, abi::kTq5, 128, 8>(),
    variant<abi::kTq5, abi::kTq5, 256, 4>(),
    variant<abi::kTq6, abi::kTq6, 64, 4>(),
    variant<abi::kTq6, abi::kTq6, 128, 4>(),
    variant<abi::kTq6, abi::kTq6, 128, 8>(),
    variant<abi::kTq6, abi::kTq6, 512, 4>(),
    variant<abi::kTq8, abi::kTq8, 64, 4>(),
    variant<abi::kTq8, abi::kTq8, 128, 4>(),
    variant<abi::kTq8, abi::kTq8, 128, 8>(),
    variant<abi::kTq8, abi::kTq8, 256, 4>(),
    variant<abi::kTq8, abi::kTq8, 512, 4>(),
    variant<abi::kTq8, abi::kTq8, 512, 8>(),
    variant<abi::kTq8, abi::kTq4, 64, 4>(),
    variant<abi::kTq8, abi::kTq4, 128, 4>(),
    variant<abi::kTq8, abi::kTq4, 128, 8>(),
    variant<kF16, abi::kTq3, 128, 4>(),
    variant<kF16, abi::kTq3, 128, 12>(),
    variant<abi::kTq6, kBf16, 256, 8>(),
    variant<abi::kTq6, kBf16, 256, 16>(),
    variant<kF16, kF16, 256, 16>(),
    variant<kF16, kF16, 512, 8>(),
    variant<kF16, kF16, 512, 16>(),
    variant<kF16, abi::kTq4, 512, 4>(),
    variant<abi::kTq8, kF16, 512, 8>(),
    variant<abi::kTq8, kF16, 512, 16>(),
    variant<abi::kTq4, kF16, 128, 8>(),
    variant<abi::kTq4, kF16, 128, 16>(),
    variant<kF16, abi::kTq4, 128, 4>(),
    variant<kF16, abi::kTq4, 128, 8>(),
    variant<kF16, abi::kTq4, 128, 12>(),
    variant<kF16, kF16, 192, 8, 1, 128>(),
    variant<abi::kTq4, abi::kTq4, 192, 4, 1, 128>(),
    variant<abi::kTq8, abi::kTq3, 64, 4, 1, 96>(),
    variant<abi::kTq3, kF16, 80, 8, 1, 64>(),
    variant<kF16, kF16, 80, 8>(),
    variant<kF16, kF16, 96, 8>(),
    variant<kF16, kF16, 96, 16>(),
    variant<kBf16, kBf16, 112, 8>(),
    variant<kF16, kF16, 192, 8>(),
    variant<abi::kTq2, abi::kTq2, 80, 4>(),
    variant<abi::kTq2, abi::kTq2, 112, 4>(),
    variant<abi::kTq3, abi::kTq3, 64, 4>(),
    variant<abi::kTq3, abi::kTq3, 80, 4>(),
    variant<abi::kTq3, abi::kTq3, 96, 4>(),
    variant<abi::kTq3, abi::kTq3, 96, 8>(),
    variant<abi::kTq3, abi::kTq3, 160, 4>(),
    variant<abi::kTq4, abi::kTq4, 80, 4>(),
    variant<abi::kTq4, abi::kTq4, 80, 8>(),
    variant<abi::kTq4, abi::kTq4, 96, 4>(),
    variant<abi::kTq4, abi::kTq4, 96, 12>(),
    variant<abi::kTq4, abi::kTq4, 112, 4>(),
    variant<abi::kTq4, abi::kTq4, 192, 4>(),
    variant<abi::kTq5, abi::kTq5, 64, 4>(),
    variant<abi::kTq5, abi::kTq5, 80, 4>(),
    variant<abi::kTq5, abi::kTq5, 192, 4>(),
    variant<abi::kTq6, abi::kTq6, 80, 4>(),
    variant<abi::kTq6, abi::kTq6, 96, 4>(),
    variant<abi::kTq6, abi::kTq6, 112, 4>(),
    variant<abi::kTq8, abi::kTq8, 80, 4>(),
    variant<abi::kTq8, abi::kTq8, 96, 4>(),
    variant<abi::kTq8, abi::kTq8, 96, 16>(),
    variant<abi::kTq8, abi::kTq8, 112, 4>(),
    variant<abi::kTq8, abi::kTq4, 96, 4>(),
    variant<kF16, abi::kTq4, 80, 4>(),
    variant<abi::kTq3, kF16, 80, 8>(),
    variant<abi::kTq6, kBf16, 96, 8>(),
    variant<abi::kTq4, abi::kTq4, 96, 4, cuda::kDecodeCluster>(),
    variant<kF16, kF16, 80, 8, cuda::kDecodeCluster>(),
    variant<abi::kTq4, abi::kTq4, 80, 16, cuda::kDecodePair>(),
    variant<kF16, kF16, 64, 8, cuda::kDecodeCluster>(),
    variant<kF16, kF16, 256, 16, cuda::kDecodeCluster>(),
    variant<abi::kTq4, abi::kTq4, 64, 4, cuda::kDecodeCluster>(),
    variant<abi::kTq4, abi::kTq4, 64, 12, cuda::kDecodeCluster>(),
    variant<abi::kTq8, abi::kTq4, 128, 4, cuda::kDecodeCluster>(),
    variant<abi::kTq4, abi::kTq4, 512, 4, cuda::kDecodeCluster>(),
    variant<kF16, kF16, 128, 16, cuda::kDecodePair>(),
    variant<abi::kTq4, abi::kTq4, 128, 12, cuda::kDecodePair>(),
    variant<abi::kTq4, abi::kTq4, 128, 16, cuda::kDecodePair>(),
    variant<abi::kTq4, abi::kTq4, 512, 4, cuda::kDecodePair>(),
    variant<abi::kTq4, abi::kTq4, 512, 8, cuda::kDecodePair>(),
};

}  // namespace

HostKernel host_attention_decode(uint32_t k_format, uint32_t v_format, uint32_t head_dim,
                                 uint32_t value_dim, uint32_t rows, uint32_t cluster) {
  for (const Variant& x : kVariants) {
    if (x.k == k_format && x.v == v_format && x.head_dim == head_dim && x.value_dim == value_dim &&
        x.rows == rows && x.cluster == cluster)
      return x.run;
  }
  return nullptr;
}

}  // namespace gyre::test
