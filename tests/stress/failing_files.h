#pragma once
// System calls of the file layer that fail where a test wants them to.

#include <cstdint>

#include "files/calls.h"

namespace gyre::test {

// While it lives, call `at` (counted from 0) fails with `error`; EINTR is what every call answers
// the first time, where it may.
class FailingFiles {
 public:
  FailingFiles(uint64_t at, int error);
  FailingFiles(const FailingFiles&) = delete;
  FailingFiles& operator=(const FailingFiles&) = delete;
  ~FailingFiles();

  uint64_t calls() const;
  bool renamed() const;         // whether a rename succeeded
  uint64_t open_files() const;  // opened and not closed
  uint64_t bytes_read() const;
};

}  // namespace gyre::test
