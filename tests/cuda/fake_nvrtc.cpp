// A libnvrtc.so.13 that compiles nothing, at once: a kernel's code is its name. For tests of what
// is compiled and when, with the fake driver or without one. Where kernels are emulated it refuses
// those that were not compiled for the host.
#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "cuda/nvrtc.h"
#include "cuda_host/host_kernels.h"

namespace {

struct Program {
  std::vector<std::string> names;
  std::string log;
};

using gyre::cuda::kNvrtcOutOfMemory;
using gyre::cuda::kNvrtcSuccess;
using gyre::cuda::NvrtcProgram;
using gyre::cuda::NvrtcResult;

constexpr NvrtcResult kCompilationFailed = 6;
constexpr int kArchs[] = {75, 80, 90, 121};

Program* of(NvrtcProgram program) { return reinterpret_cast<Program*>(program); }

}  // namespace

// Names and parameters are those of the table in cuda/nvrtc.h.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

const char* nvrtcGetErrorString(NvrtcResult) { return "said by the fake"; }
NvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = 13, *minor = 99;
  return kNvrtcSuccess;
}
NvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(kArchs));
  return kNvrtcSuccess;
}
NvrtcResult nvrtcGetSupportedArchs(int* archs) {
  std::copy(std::begin(kArchs), std::end(kArchs), archs);
  return kNvrtcSuccess;
}
NvrtcResult nvrtcCreateProgram(NvrtcProgram* program, const char*, const char*, int,
                               const char* const*, const char* const*) {
  *program = reinterpret_cast<NvrtcProgram>(new (std::nothrow) Program);
  return *program != nullptr ? kNvrtcSuccess : kNvrtcOutOfMemory;
}
NvrtcResult nvrtcDestroyProgram(NvrtcProgram* program) {
  delete of(*program);
  *program = nullptr;
  return kNvrtcSuccess;
}
NvrtcResult nvrtcAddNameExpression(NvrtcProgram program, const char* name) {
  try {
    of(program)->names.emplace_back(name);
  } catch (const std::bad_alloc&) {
    return kNvrtcOutOfMemory;
  }
  return kNvrtcSuccess;
}
NvrtcResult nvrtcCompileProgram(NvrtcProgram program, int, const char* const*) {
  using namespace gyre::cuda_host;
  if (!has_host_kernels() || find_host_kernel(of(program)->names.front()) != nullptr)
    return kNvrtcSuccess;
  of(program)->log = "it was not compiled for the host";
  return kCompilationFailed;
}
NvrtcResult nvrtcGetLoweredName(NvrtcProgram program, const char*, const char** name) {
  *name = of(program)->names.front().c_str();
  return kNvrtcSuccess;
}
NvrtcResult nvrtcGetCUBINSize(NvrtcProgram program, size_t* bytes) {
  *bytes = of(program)->names.front().size();
  return kNvrtcSuccess;
}
NvrtcResult nvrtcGetCUBIN(NvrtcProgram program, char* code) {
  std::memcpy(code, of(program)->names.front().data(), of(program)->names.front().size());
  return kNvrtcSuccess;
}
NvrtcResult nvrtcGetProgramLogSize(NvrtcProgram program, size_t* bytes) {
  *bytes = of(program)->log.size() + 1;
  return kNvrtcSuccess;
}
NvrtcResult nvrtcGetProgramLog(NvrtcProgram program, char* log) {
  std::memcpy(log, of(program)->log.c_str(), of(program)->log.size() + 1);
  return kNvrtcSuccess;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
