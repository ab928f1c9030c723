#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "metal/driver.h"

namespace gyre::metal {

// The device's compiled texts. A file is compiled on its first use and kept: its pipelines differ
// in their function constants only. Thread-safe.
class LibraryCache {
 public:
  explicit LibraryCache(const Driver& api) : api_(api) {}
  LibraryCache(const LibraryCache&) = delete;
  LibraryCache& operator=(const LibraryCache&) = delete;
  ~LibraryCache();

  // `name` is a file of src/metal/kernels, or what `text` is called: a source that is not the
  // library's. Throws compile_failed with the compiler's log, each time.
  Library* get(const std::string& name, const std::string& text = {});

 private:
  struct Entry {
    std::mutex mutex;
    Library* library = nullptr;
    std::string error;  // neither: not compiled yet
  };

  const Driver& api_;
  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, Entry> entries_;  // by file, or by text
};

}  // namespace gyre::metal
