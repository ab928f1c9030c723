#include "version.h"

#include "gyre/version.h"
#include "simd_targets.h"

namespace gyre::tools {

std::string version_text() {
  return "gyre " + std::string(version()) +
         "\nbuilt by " GYRE_COMPILER ", " GYRE_BUILD_TYPE ", for " GYRE_PROCESSOR
         "; SIMD targets: " +
         bench::simd_targets();
}

}  // namespace gyre::tools
