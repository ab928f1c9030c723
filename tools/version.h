#pragma once

#include <string>

namespace gyre::tools {

// What --version prints: how it was built, and for which processors.
std::string version_text();

}  // namespace gyre::tools
