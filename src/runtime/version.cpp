#include "gyre/version.h"

#define GYRE_TEXT_OF(x) #x
#define GYRE_TEXT(x) GYRE_TEXT_OF(x)

namespace gyre {

std::string_view version() {
  return GYRE_TEXT(GYRE_VERSION_MAJOR) "." GYRE_TEXT(GYRE_VERSION_MINOR) "." GYRE_TEXT(
      GYRE_VERSION_PATCH);
}

}  // namespace gyre
