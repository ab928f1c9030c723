#pragma once
// What tests ask of the fake driver (fake_cuda.cpp).

#include <dlfcn.h>

#include <cstdint>
#include <type_traits>

#include "cuda/driver.h"
#include "cuda/kernel.h"

namespace gyre::test {

// Null where the driver is not the fake one.
struct Fake {
  void (*fail)(uint64_t nth, uint64_t count, cuda::CuResult result) = nullptr;
  void (*fail_wait)(cuda::CuResult result) = nullptr;  // the next one for an event
  void (*break_gpu)(cuda::CuResult result) = nullptr;  // for good
  uint64_t (*calls)() = nullptr;
  uint64_t (*kernels_run)() = nullptr;
  uint64_t (*unseen)() = nullptr;  // work that nobody has waited for
  int64_t (*modules)() = nullptr;  // that are loaded
  uint64_t (*early_unloads)() = nullptr;
  // EarlyBits::early of the graph instantiated last; the highest bit: it follows by a programmatic
  // edge.
  uint32_t (*early_args)(uint64_t node) = nullptr;
  // A bit for each launch onto a stream that nobody captures, the last one lowest: it may begin
  // before the kernel ahead has ended.
  uint32_t (*overlaps)() = nullptr;
  void (*own)(uint64_t address, uint64_t bytes) = nullptr;  // the test's memory is the device's
  bool (*has_kernel)(const char* name) = nullptr;           // compiled for the host
  uint64_t (*launches)(const char* name) = nullptr;         // of emulated kernels named like that
  // For devices that are opened from now on; null: as it was.
  void (*limits)(const cuda::CudaLimits* limits) = nullptr;

  Fake() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return;
    const auto find = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    };
    find("gyre_fake_cuda_fail", fail);
    find("gyre_fake_cuda_fail_wait", fail_wait);
    find("gyre_fake_cuda_break", break_gpu);
    find("gyre_fake_cuda_calls", calls);
    find("gyre_fake_cuda_kernels_run", kernels_run);
    find("gyre_fake_cuda_unseen", unseen);
    find("gyre_fake_cuda_modules", modules);
    find("gyre_fake_cuda_early_unloads", early_unloads);
    find("gyre_fake_cuda_early_args", early_args);
    find("gyre_fake_cuda_overlaps", overlaps);
    find("gyre_fake_cuda_own", own);
    find("gyre_fake_cuda_has_kernel", has_kernel);
    find("gyre_fake_cuda_launches", launches);
    find("gyre_fake_cuda_limits", limits);
  }
};

inline const Fake& fake() {
  static const Fake kFake;
  return kFake;
}

// A stream of the caller's.
inline uint64_t foreign_stream() {
  static cuda::CuStream stream = [] {
    cuda::CuStream made = nullptr;
    cuda::driver().stream_create(&made, cuda::kCuStreamNonBlocking);
    return made;
  }();
  return reinterpret_cast<uintptr_t>(stream);
}

}  // namespace gyre::test
