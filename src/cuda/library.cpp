#include "cuda/library.h"

#include <dlfcn.h>

namespace gyre::cuda {

Library Library::open(std::span<const std::string> names) {
  Library library;
  for (const std::string& name : names) {
    library.handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library.handle_ == nullptr) continue;
    library.name_ = name;
    break;
  }
  return library;
}

void* Library::symbol(const char* name) const {
  return handle_ == nullptr ? nullptr : dlsym(handle_, name);
}

}  // namespace gyre::cuda
