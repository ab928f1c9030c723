#include "cpu/attention_kernels.h"

#if defined(GYRE_HAVE_I8MM)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace gyre::cpu {
namespace {

AttentionKernels choose() {
#if defined(GYRE_HAVE_I8MM)
  constexpr unsigned long kHalf = HWCAP_ASIMDHP | HWCAP_ASIMDFHM | HWCAP_ASIMDDP;
  if ((getauxval(AT_HWCAP) & kHalf) == kHalf && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0)
    return i8mm_attention_kernels();
#elif defined(GYRE_HAVE_VNNI)
  if (__builtin_cpu_supports("avx512vnni") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0)
    return vnni_attention_kernels();
#endif
  return {};
}

}  // namespace

const AttentionKernels& attention_kernels() {
  static const AttentionKernels kKernels = choose();
  return kKernels;
}

}  // namespace gyre::cpu
