#pragma once

#include <string>

namespace gyre::tools {

std::string version();  // of the project: 0.1.0

// What --version prints: how it was built, and for which processors.
std::string version_text();

}  // namespace gyre::tools
