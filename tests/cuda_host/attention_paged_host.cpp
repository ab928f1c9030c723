#include "attention_host.h"
#include "cuda_host.h"
// After cuda_host.h
#include "cuda/kernels/attention/decode.cu"
#include "cuda/kernels/attention/schedule.cu"

namespace gyre::test {

cuda::EarlyBits host_early_bits = {0, 0};
void allow_early_reads(bool allow) { host_early_bits = {allow ? ~0u : 0, allow ? ~0u : 0}; }

namespace {

template <uint32_t kK, uint32_t kV, uint32_t kN, uint32_t kRows, bool kOnePage>
void run_decode(const void* params, const uint64_t* args, const HostLaunch& launch) {
  cuda::Args copied{};
  std::copy_n(args, 16, copied.at);
  cuda_host::launch(dim3(launch.grid[0], launch.grid[1], launch.grid[2]), launch.threads,
                    launch.shared_bytes, cuda::attention_decode_paged<kK, kV, kN, kRows, kOnePage>,
                    *static_cast<const abi::AttentionParams*>(params), copied, host_early_bits);
}

struct Variant {
  uint32_t k, v, head_dim, rows;
  HostKernel run, run_one_page;
};
template <uint32_t kK, uint32_t kV, uint32_t kN, uint32_t kRows>
constexpr Variant variant() {
  return {
      kK, kV, kN, kRows, run_decode<kK, kV, kN, kRows, false>, run_decode<kK, kV, kN, kRows, true>};
}

constexpr uint32_t kF16 = cuda::kFormatF16, kBf16 = cuda::kFormatBf16;
constexpr Variant kVariants[] = {
    variant<kF16, kF16, 64, 8>(),
    variant<kF16, kF16, 128, 8>(),
    variant<kF16, kF16, 256, 8>(),
    variant<kBf16, kBf16, 128, 8>(),
    variant<abi::kTq2, abi::kTq2, 64, 4>(),
    variant<abi::kTq2, abi::kTq2, 128, 4>(),
    variant<abi::kTq4, abi::kTq4, 64, 4>(),
    variant<abi::kTq4, abi::kTq4, 64, 16>(),
    variant<abi::kTq4, abi::kTq4, 128, 4>(),
    variant<abi::kTq4, abi::kTq4, 128, 8>(),
    variant<abi::kTq4, abi::kTq4, 256, 4>(),
    variant<abi::kTq4, abi::kTq4, 256, 8>(),
    variant<abi::kTq4, abi::kTq4, 512, 4>(),
    variant<abi::kTq8, abi::kTq8, 64, 4>(),
    variant<abi::kTq8, abi::kTq4, 128, 4>(),
    variant<kF16, kF16, 80, 8>(),
    variant<abi::kTq4, abi::kTq4, 96, 4>(),
    variant<abi::kTq3, abi::kTq3, 80, 4>(),
    variant<abi::kTq8, kF16, 512, 8>(),
    variant<kF16, abi::kTq4, 128, 4>(),
};

}  // namespace

uint32_t host_schedule_shift(uint64_t fewest_keys, uint64_t most_groups, uint32_t length) {
  return cuda::cut_shift({fewest_keys, most_groups}, length);
}
void host_attention_schedule(const void* params, const uint64_t* args, const HostLaunch& launch) {
  cuda::Args copied{};
  std::copy_n(args, 5, copied.at);
  cuda_host::launch(dim3(launch.grid[0], launch.grid[1], launch.grid[2]), launch.threads,
                    launch.shared_bytes, cuda::attention_schedule,
                    *static_cast<const abi::AttentionScheduleParams*>(params), copied);
}

HostKernel host_attention_decode_paged(uint32_t k_format, uint32_t v_format, uint32_t head_dim,
                                       uint32_t rows, bool one_page) {
  for (const Variant& x : kVariants) {
    if (x.k == k_format && x.v == v_format && x.head_dim == head_dim && x.rows == rows)
      return one_page ? x.run_one_page : x.run;
  }
  return nullptr;
}

}  // namespace gyre::test
