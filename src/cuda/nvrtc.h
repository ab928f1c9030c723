#pragma once
// The part of NVRTC, CUDA's compiler library, that Gyre uses; see driver.h.

#include <cstddef>
#include <cstdint>
#include <string>

namespace gyre::cuda {

using NvrtcResult = int;
using NvrtcProgram = struct NvrtcProgramTag*;

constexpr NvrtcResult kNvrtcSuccess = 0;
constexpr NvrtcResult kNvrtcOutOfMemory = 1;

// member, symbol, parameters
#define GYRE_CUDA_NVRTC(F)                                                                     \
  F(version, nvrtcVersion, (int* major, int* minor))                                           \
  F(arch_count, nvrtcGetNumSupportedArchs, (int* count))                                       \
  F(archs, nvrtcGetSupportedArchs, (int* archs))                                               \
  F(create, nvrtcCreateProgram,                                                                \
    (NvrtcProgram*, const char* source, const char* name, int count, const char* const* texts, \
     const char* const* names))                                                                \
  F(destroy, nvrtcDestroyProgram, (NvrtcProgram*))                                             \
  F(compile, nvrtcCompileProgram, (NvrtcProgram, int count, const char* const* options))       \
  F(cubin_size, nvrtcGetCUBINSize, (NvrtcProgram, size_t*))                                    \
  F(cubin, nvrtcGetCUBIN, (NvrtcProgram, char*))                                               \
  F(log_size, nvrtcGetProgramLogSize, (NvrtcProgram, size_t*))                                 \
  F(log, nvrtcGetProgramLog, (NvrtcProgram, char*))                                            \
  F(add_name, nvrtcAddNameExpression, (NvrtcProgram, const char*))                             \
  F(lowered_name, nvrtcGetLoweredName, (NvrtcProgram, const char* expression, const char** name))

struct Nvrtc {
// NOLINTNEXTLINE(bugprone-macro-parentheses)
#define GYRE_CUDA_MEMBER(member, symbol, params) NvrtcResult(*member) params = nullptr;
  GYRE_CUDA_NVRTC(GYRE_CUDA_MEMBER)
#undef GYRE_CUDA_MEMBER
  const char* (*error_text)(NvrtcResult) = nullptr;

  int major = 0, minor = 0;
  uint32_t oldest_arch = 0, newest_arch = 0;  // 80, 121
  std::string reason;                         // why it cannot be used; empty: it can

  std::string version_text() const;
};

// Opened on first use. `driver_version` (see Driver) picks the library that fits the driver: an
// older driver does not load what a newer compiler makes. 0: any.
const Nvrtc& nvrtc(int driver_version);

}  // namespace gyre::cuda
