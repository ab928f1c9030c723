#include "metal/library.h"

#include "metal/sources.h"
#include "runtime/require.h"

namespace gyre::metal {

LibraryCache::~LibraryCache() {
  for (const auto& [key, entry] : entries_) {
    if (entry.library != nullptr) api_.library_free(entry.library);
  }
}

Library* LibraryCache::get(const std::string& name, const std::string& text) {
  Entry* entry = nullptr;
  {
    const std::lock_guard lock(mutex_);
    entry = &entries_[{text.empty() ? name : "", text}];
  }
  const std::lock_guard lock(entry->mutex);
  if (entry->library == nullptr && entry->error.empty()) {
    const LibraryResult made = api_.library_make(text.empty() ? kernel_text(name) : text);
    entry->library = made.library;
    if (made.library == nullptr)
      entry->error = made.error.empty() ? "the compiler gave no reason" : made.error;
  }
  if (entry->library == nullptr) fail(ErrorCode::compile_failed, name, ": ", entry->error);
  return entry->library;
}

}  // namespace gyre::metal
