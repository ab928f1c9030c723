#pragma once
// Whether this machine has AMX's tiles, and whether this process may use them.

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace gyre::cpu {

inline bool has_amx() {
#if defined(__x86_64__)
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;  // leaf 7.0, edx
  constexpr unsigned kAvx512Bf16 = 1u << 5;                                 // leaf 7.1, eax
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & (kBf16 | kTile | kInt8)) != (kBf16 | kTile | kInt8)) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kAvx512Bf16) != 0;
#else
  return false;
#endif
}

// Whether this process may use AMX's tiles, after asking for it: the kernel keeps 8 KiB more of a
// thread then, and refuses if a signal stack is too small for that.
inline bool ask_for_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace gyre::cpu
