#include "cpu/attention/isa/kernels.h"

#if defined(GYRE_HAVE_NEON)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(GYRE_HAVE_X86_KERNELS)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace gyre::cpu {
namespace {

#if defined(GYRE_HAVE_X86_KERNELS)
bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;  // leaf 7.0, edx
  constexpr unsigned kAvx512Bf16 = 1u << 5;                                 // leaf 7.1, eax
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & (kBf16 | kTile | kInt8)) != (kBf16 | kTile | kInt8)) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kAvx512Bf16) != 0;
}
#endif

// Whether this process may use AMX's tiles, after asking for it: the kernel keeps 8 KiB more of a
// thread then, and refuses if a signal stack is too small for that.
bool ask_for_tiles() {
#if defined(GYRE_HAVE_X86_KERNELS) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

const AttentionKernels*& chosen() {
  static const AttentionKernels* set = attention_kernel_sets().data();
  return set;
}

}  // namespace

std::vector<AttentionKernels> find_attention_kernel_sets([[maybe_unused]] bool (*may_use_tiles)()) {
  std::vector<AttentionKernels> sets;
#if defined(GYRE_HAVE_NEON)
  constexpr unsigned long kHalf = HWCAP_ASIMDHP | HWCAP_ASIMDFHM;
  const unsigned long machine = getauxval(AT_HWCAP), more = getauxval(AT_HWCAP2);
  const bool dotprod = (machine & HWCAP_ASIMDDP) != 0, half = (machine & kHalf) == kHalf;
  if (dotprod && half && (more & HWCAP2_I8MM) != 0) {
    AttentionKernels& set = sets.emplace_back(i8mm_attention_kernels());
    add_f16_attention_kernels(set);
    if ((more & HWCAP2_BF16) != 0) {
      add_bf16_attention_kernels(set);
      add_bf16_prompt_kernels(set);
    }
  }
  if (dotprod) {
    AttentionKernels& set = sets.emplace_back(dotprod_attention_kernels());
    if (half) add_f16_attention_kernels(set);
  }
#elif defined(GYRE_HAVE_X86_KERNELS)
  if (__builtin_cpu_supports("avx512vnni") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0) {
    if (has_amx() && may_use_tiles()) {
      AttentionKernels& set = sets.emplace_back(amx_attention_kernels());
      add_avx512_attention_kernels(set);
      add_amx_prompt_kernels(set);
    }
    AttentionKernels& set = sets.emplace_back(vnni_attention_kernels());
    add_avx512_attention_kernels(set);
    add_latent_kernels(set);
  }
  if (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0)
    sets.push_back(avx2_attention_kernels());
#endif
  sets.push_back({});
  return sets;
}

const std::vector<AttentionKernels>& attention_kernel_sets() {
  // Never destroyed: other threads may compute while a process ends.
  static const auto& kSets =
      *new std::vector<AttentionKernels>(find_attention_kernel_sets(ask_for_tiles));
  return kSets;
}

const AttentionKernels& attention_kernels() { return *chosen(); }
void use_attention_kernels(const AttentionKernels& set) { chosen() = &set; }

}  // namespace gyre::cpu
