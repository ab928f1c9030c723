#include "isa/kernels.h"

#include <atomic>

#include "cpu/attention/isa/amx_machine.h"
#if defined(GYRE_HAVE_NEON)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace gyre::ggml {
namespace {

const MatrixKernels* find_matrix_kernels() {
#if defined(GYRE_HAVE_X86_KERNELS)
  static const MatrixKernels kAmx = amx_matrix_kernels();
  if (__builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
      __builtin_cpu_supports("avx512vl") != 0 && cpu::has_amx() && cpu::ask_for_tiles())
    return &kAmx;
#endif
  return nullptr;
}

const LevelKernels* find_level_kernels() {
#if defined(GYRE_HAVE_NEON)
  static const LevelKernels kDotprod = dotprod_level_kernels();
  if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) return &kDotprod;
#endif
  return nullptr;
}

std::atomic<bool> in_use{true};

}  // namespace

const MatrixKernels* matrix_kernels() {
  static const MatrixKernels* const kFound = find_matrix_kernels();
  return in_use.load(std::memory_order_relaxed) ? kFound : nullptr;
}

const LevelKernels* level_kernels() {
  static const LevelKernels* const kFound = find_level_kernels();
  return in_use.load(std::memory_order_relaxed) ? kFound : nullptr;
}

void use_isa_kernels(bool use) { in_use.store(use, std::memory_order_relaxed); }

}  // namespace gyre::ggml
