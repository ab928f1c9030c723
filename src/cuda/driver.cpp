#include "cuda/driver.h"

#include "cuda/library.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

constexpr int kOldestVersion = 12000;  // graph nodes in their second form, kernels in C++20

std::string version_text(int version) { return join(version / 1000, ".", version % 1000 / 10); }

std::string load(Driver& driver, const Library& library) {
  if (!library.found()) return "the NVIDIA driver is not installed (libcuda.so.1 was not found)";
  if (!library.find("cuDriverGetVersion", driver.driver_version) ||
      driver.driver_version(&driver.version) != kCuSuccess || driver.version < kOldestVersion) {
    return join("the NVIDIA driver is too old: it knows CUDA ", version_text(driver.version),
                ", Gyre needs ", version_text(kOldestVersion));
  }
#define GYRE_CUDA_LOAD(member, function, params) \
  if (!library.find(#function, driver.member))   \
    return join("the NVIDIA driver has no function ", #function);
  GYRE_CUDA_DRIVER(GYRE_CUDA_LOAD)
#undef GYRE_CUDA_LOAD
  library.find("cuGraphAddDependencies_v2", driver.graph_add_edges);
  library.find("cuStreamGetCaptureInfo_v3", driver.capture_info);
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
  static const Driver kLoaded = [] {
    const std::string names[] = {"libcuda.so.1"};
    Driver made;
    made.reason = load(made, Library::open(names));
    return made;
  }();
  return kLoaded;
}

}  // namespace gyre::cuda
