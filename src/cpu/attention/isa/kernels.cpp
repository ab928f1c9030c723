#include "cpu/attention/isa/kernels.h"

#if defined(GYRE_HAVE_NEON)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace gyre::cpu {
namespace {

std::vector<AttentionKernels> find_sets() {
  std::vector<AttentionKernels> sets;
#if defined(GYRE_HAVE_NEON)
  constexpr unsigned long kHalf = HWCAP_ASIMDHP | HWCAP_ASIMDFHM;
  const unsigned long machine = getauxval(AT_HWCAP), more = getauxval(AT_HWCAP2);
  const bool dotprod = (machine & HWCAP_ASIMDDP) != 0, half = (machine & kHalf) == kHalf;
  if (dotprod && half && (more & HWCAP2_I8MM) != 0) {
    AttentionKernels& set = sets.emplace_back(i8mm_attention_kernels());
    add_f16_attention_kernels(set);
    if ((more & HWCAP2_BF16) != 0) add_bf16_attention_kernels(set);
  }
  if (dotprod) {
    AttentionKernels& set = sets.emplace_back(dotprod_attention_kernels());
    if (half) add_f16_attention_kernels(set);
  }
#elif defined(GYRE_HAVE_X86_KERNELS)
  if (__builtin_cpu_supports("avx512vnni") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0)
    sets.push_back(vnni_attention_kernels());
  if (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0)
    sets.push_back(avx2_attention_kernels());
#endif
  sets.push_back({});
  return sets;
}

const AttentionKernels*& chosen() {
  static const AttentionKernels* set = attention_kernel_sets().data();
  return set;
}

}  // namespace

const std::vector<AttentionKernels>& attention_kernel_sets() {
  static const std::vector<AttentionKernels> kSets = find_sets();
  return kSets;
}

const AttentionKernels& attention_kernels() { return *chosen(); }
void use_attention_kernels(const AttentionKernels& set) { chosen() = &set; }

}  // namespace gyre::cpu
