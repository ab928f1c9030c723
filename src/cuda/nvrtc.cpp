#include "cuda/nvrtc.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "cuda/library.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

constexpr int kOldestMajor = 12;  // the first that compiles C++20
constexpr int kNewestMajor = 13;

// What the loader knows first, then where toolkits are put.
std::vector<std::string> library_names(int newest_major) {
  std::vector<std::string> folders = {""};
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    const char* const path = std::getenv(variable);
    if (path != nullptr && *path != '\0') folders.emplace_back(path);
  }
  folders.emplace_back("/usr/local/cuda");
  for (int major = newest_major; major >= kOldestMajor; --major)
    folders.push_back(join("/usr/local/cuda-", major));
  folders.emplace_back("/opt/cuda");
  std::vector<std::string> names;
  for (int major = newest_major; major >= kOldestMajor; --major) {
    for (const std::string& folder : folders) {
      const std::string file = join("libnvrtc.so.", major);
      if (folder.empty()) {
        names.push_back(file);
        continue;
      }
      for (const char* sub : {"/lib64/", "/lib/", "/targets/x86_64-linux/lib/"})
        names.push_back(join(folder, sub, file));
    }
  }
  return names;
}

std::string load(Nvrtc& nvrtc, const Library& library, int newest_major) {
  if (!library.found()) {
    return join("CUDA's compiler library NVRTC was not found (libnvrtc.so.", newest_major,
                newest_major > kOldestMajor ? join(" to .", kOldestMajor) : "",
                "); install it or set CUDA_HOME");
  }
#define GYRE_CUDA_LOAD(member, function, params) \
  if (!library.find(#function, nvrtc.member))    \
    return join(library.name(), " has no function ", #function);
  GYRE_CUDA_NVRTC(GYRE_CUDA_LOAD)
#undef GYRE_CUDA_LOAD
  if (!library.find("nvrtcGetErrorString", nvrtc.error_text))
    return join(library.name(), " has no function nvrtcGetErrorString");
  int count = 0;
  if (nvrtc.version(&nvrtc.major, &nvrtc.minor) != kNvrtcSuccess ||
      nvrtc.arch_count(&count) != kNvrtcSuccess || count <= 0)
    return join(library.name(), " does not answer");
  std::vector<int> archs(static_cast<size_t>(count));
  nvrtc.archs(archs.data());
  const auto [oldest, newest] = std::minmax_element(archs.begin(), archs.end());
  nvrtc.oldest_arch = static_cast<uint32_t>(*oldest);
  nvrtc.newest_arch = static_cast<uint32_t>(*newest);
  return "";
}

Nvrtc open(int newest_major) {
  Nvrtc made;
  made.reason = load(made, Library::open(library_names(newest_major)), newest_major);
  return made;
}

}  // namespace

std::string Nvrtc::version_text() const { return join(major, ".", minor); }

const Nvrtc& nvrtc(int driver_version) {
  // Drivers run what compilers of their own or an older major version make.
  static const Nvrtc kNewest = open(kNewestMajor);
  const int driver_major = driver_version == 0 ? kNewestMajor : driver_version / 1000;
  if (kNewest.major <= driver_major) return kNewest;
  static const Nvrtc kFitting = open(driver_major);
  return kFitting;
}

}  // namespace gyre::cuda
