#include "cuda/context.h"

#include <algorithm>
#include <iterator>

#include "runtime/require.h"

namespace gyre::cuda {

bool ends_all_work(CuResult result) {
  constexpr CuResult kEnds[] = {kCuEccUncorrectable,
                                kCuIllegalAddress,
                                kCuLaunchTimeout,
                                kCuContextIsDestroyed,
                                kCuAssert,
                                kCuHardwareStackError,
                                kCuIllegalInstruction,
                                kCuMisalignedAddress,
                                kCuInvalidAddressSpace,
                                kCuInvalidPc,
                                kCuLaunchFailed};
  return std::find(std::begin(kEnds), std::end(kEnds), result) != std::end(kEnds);
}

int attribute(const Driver& driver, CuDevice device, CuDeviceAttribute which) {
  int value = 0;
  return driver.device_attribute(&value, which, device) == kCuSuccess ? value : 0;
}

CudaLimits limits_of(const Driver& driver, CuDevice device) {
  const auto get = [&](CuDeviceAttribute which) {
    return static_cast<uint32_t>(attribute(driver, device, which));
  };
  return {.multiprocessors = get(kCuMultiprocessors),
          .shared_bytes_per_block = get(kCuSharedBytesPerBlock),
          .shared_bytes_per_multiprocessor = get(kCuSharedBytesPerMultiprocessor),
          .arch = 10 * get(kCuCapabilityMajor) + get(kCuCapabilityMinor)};
}

Context::Context(int ordinal) : api_(driver()), ordinal_(ordinal) {
  check(api_.device_get(&device_, ordinal), "cuDeviceGet");
  limits_ = limits_of(api_, device_);
  check(api_.context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

Context::~Context() {
  if (!is_inherited()) api_.context_release(device_);
}

std::string Context::name() const { return join("cuda:", ordinal_); }

bool Context::has_pdl() const {
  constexpr uint32_t kFirstArch = 90;
  return limits_.arch >= kFirstArch && api_.graph_add_edges != nullptr &&
         api_.capture_info != nullptr;
}

void Context::require_same_process() const {
  if (is_inherited()) {
    fail(ErrorCode::device_lost, "cuda:", ordinal_,
         ": opened before fork(); CUDA works in a child only if its parent has not used it");
  }
}

void Context::check(CuResult result, const char* call) const {
  if (result == kCuSuccess) return;
  ErrorCode code = ErrorCode::unsupported;
  if (result == kCuOutOfMemory) code = ErrorCode::out_of_memory;
  if (ends_all_work(result)) code = ErrorCode::device_lost;
  fail(code, name(), ": ", call, ": ", api_.describe(result));
}

}  // namespace gyre::cuda
