#include "cpu/attention/isa/kernels.h"

#if defined(GYRE_HAVE_NEON)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#include "cpu/attention/isa/amx_machine.h"

namespace gyre::cpu {
namespace {

const AttentionKernels*& chosen() {
  static const AttentionKernels* set = attention_kernel_sets().data();
  return set;
}

}  // namespace

std::vector<AttentionKernels> find_attention_kernel_sets([[maybe_unused]] bool (*may_use_tiles)()) {
  std::vector<AttentionKernels> sets;
#if defined(GYRE_HAVE_NEON)
  constexpr unsigned long kHalf = HWCAP_ASIMDHP | HWCAP_ASIMDFHM;
  const unsigned long machine = getauxval(AT_HWCAP), machine2 = getauxval(AT_HWCAP2);
  const bool dotprod = (machine & HWCAP_ASIMDDP) != 0, half = (machine & kHalf) == kHalf;
  if (dotprod && half && (machine2 & HWCAP2_I8MM) != 0) {
    AttentionKernels& set = sets.emplace_back(i8mm_attention_kernels());
    add_f16_attention_kernels(set);
    if ((machine2 & HWCAP2_BF16) != 0) {
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
    const bool vbmi =
        __builtin_cpu_supports("avx512vbmi") != 0 && __builtin_cpu_supports("gfni") != 0;
    if (vbmi && has_amx() && may_use_tiles()) {
      AttentionKernels& set = sets.emplace_back(amx_attention_kernels());
      add_avx512_attention_kernels(set);
      add_amx_prompt_kernels(set);
    }
    if (vbmi) {
      AttentionKernels& set = sets.emplace_back(vbmi_attention_kernels());
      add_avx512_attention_kernels(set);
      add_latent_kernels(set);
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
