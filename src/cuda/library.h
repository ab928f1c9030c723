#pragma once

#include <span>
#include <string>

namespace gyre::cuda {

// A shared library opened at run time. Never closed: CUDA's libraries do not unload cleanly.
class Library {
 public:
  // Takes the first name that can be opened.
  static Library open(std::span<const std::string> names);

  bool found() const { return handle_ != nullptr; }
  const std::string& name() const { return name_; }
  // False: it has none.
  template <class Function>
  bool find(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(symbol(name));
    return function != nullptr;
  }

 private:
  void* symbol(const char* name) const;

  void* handle_ = nullptr;
  std::string name_;
};

}  // namespace gyre::cuda
