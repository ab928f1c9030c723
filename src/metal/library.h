#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "metal/driver.h"
#include "runtime/process.h"

namespace gyre::metal {

// A text and what was compiled from it, on its first use. That it does not compile is remembered.
// Thread-safe.
class LibraryText {
 public:
  LibraryText(const Driver& api, std::string name, std::string text)
      : api_(api), name_(std::move(name)), text_(std::move(text)) {}
  LibraryText(const LibraryText&) = delete;
  LibraryText& operator=(const LibraryText&) = delete;
  ~LibraryText();

  Library* compiled();  // throws compile_failed with the compiler's log, each time

 private:
  const Driver& api_;
  const std::string name_, text_;  // without a text: a file of src/metal/kernels
  const uint64_t process_ = process_generation();
  std::mutex mutex_;
  Library* library_ = nullptr;
  std::string error_;  // neither: not compiled yet
};

// The device's texts. Files stay: their pipelines differ in their function constants only. A source
// that is not the library's goes when no pipeline holds it any more. Thread-safe.
class LibraryCache {
 public:
  explicit LibraryCache(const Driver& api) : api_(api) {}
  LibraryCache(const LibraryCache&) = delete;
  LibraryCache& operator=(const LibraryCache&) = delete;

  // `name` is a file of src/metal/kernels, or what `text` is called.
  std::shared_ptr<LibraryText> find(const std::string& name, const std::string& text = {});

 private:
  using Key = std::pair<std::string, std::string>;  // a file, or a text

  const Driver& api_;
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<LibraryText>> entries_;
};

}  // namespace gyre::metal
