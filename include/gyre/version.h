#pragma once

#include "gyre/export.h"

// CMakeLists.txt has the version number; configuring fails where these differ from it. Plain C.
#define GYRE_VERSION_MAJOR 0
#define GYRE_VERSION_MINOR 2
#define GYRE_VERSION_PATCH 0

#ifdef __cplusplus
#include <string_view>

namespace gyre {

GYRE_API std::string_view version();  // of the library that is linked: "0.2.0"

}  // namespace gyre
#endif
