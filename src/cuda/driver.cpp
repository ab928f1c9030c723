#include "cuda/driver.h"

#include "cuda/library.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

constexpr int kOldestVersion = 12000;  // graph nodes in their second form, kernels in C++20

std::string version_text(int version) { return join(version / 1000, ".", version % 1000 / 10); }

std::string load(Driver& driver, const Library& library) {
  if (!library.found()) return "the NVIDIA driver is not installed (libcuda.so.1 was not found)";
  if (void* const version = library.symbol("cuDriverGetVersion"); version != nullptr)
    reinterpret_cast<CuResult (*)(int*)>(version)(&driver.version);
  const std::string too_old =
      join("the NVIDIA driver is too old: it knows CUDA ", version_text(driver.version),
           ", Gyre needs ", version_text(kOldestVersion));
  if (driver.version < kOldestVersion) return too_old;
#define GYRE_CUDA_LOAD(member, function, params)                                   \
  driver.member = reinterpret_cast<CuResult(*) params>(library.symbol(#function)); \
  if (driver.member == nullptr) return join("the NVIDIA driver has no function ", #function);
  GYRE_CUDA_DRIVER(GYRE_CUDA_LOAD)
#undef GYRE_CUDA_LOAD
  const CuResult result = driver.init(0);
  if (result == kCuNoDevice) return "the NVIDIA driver sees no GPU";
  if (result != kCuSuccess)
    return join("the NVIDIA driver does not start: ", driver.describe(result));
  return "";
}

}  // namespace

std::string Driver::describe(CuResult result) const {
  const char *error = nullptr, *text = nullptr;
  if (error_name != nullptr) error_name(result, &error);
  if (error_text != nullptr) error_text(result, &text);
  if (error == nullptr) return join("CUDA error ", result);
  return text == nullptr ? std::string(error) : join(error, " (", text, ")");
}

const Driver& driver() {
  static const Driver loaded = [] {
    const std::string names[] = {"libcuda.so.1"};
    Driver made;
    made.reason = load(made, Library::open(names));
    return made;
  }();
  return loaded;
}

}  // namespace gyre::cuda
