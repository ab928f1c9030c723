#include "metal/library.h"

#include "metal/sources.h"
#include "runtime/require.h"

namespace gyre::metal {

LibraryText::~LibraryText() {
  if (library_ != nullptr && process_ == process_generation()) api_.library_free(library_);
}

Library* LibraryText::compiled() {
  const std::lock_guard lock(mutex_);
  if (library_ == nullptr && error_.empty()) {
    const LibraryResult made = api_.library_make(text_.empty() ? kernel_text(name_) : text_);
    library_ = made.library;
    if (library_ == nullptr)
      error_ = made.error.empty() ? "the compiler gave no reason" : made.error;
  }
  if (library_ == nullptr) fail(ErrorCode::compile_failed, name_, ": ", error_);
  return library_;
}

std::shared_ptr<LibraryText> LibraryCache::find(const std::string& name, const std::string& text) {
  const std::lock_guard lock(mutex_);
  const Key key{text.empty() ? name : "", text};
  if (const auto found = entries_.find(key); found != entries_.end()) return found->second;
  // References come from here alone: of what has no other, there will be none.
  std::erase_if(entries_, [](const auto& entry) {
    return !entry.first.second.empty() && entry.second.use_count() == 1;
  });
  return entries_.emplace(key, std::make_shared<LibraryText>(api_, name, text)).first->second;
}

}  // namespace gyre::metal
