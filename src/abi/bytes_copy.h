#pragma once
// bytes_copy: rows of bytes, as they are. kv_page_copy: whole pages.
#include "abi/types.h"

namespace gyre::abi {

struct BytesCopySpec {
  uint8_t unused[8];
};

struct BytesCopyParams {
  uint64_t bytes;  // of a row
  uint64_t rows;
  uint64_t from_stride, to_stride;  // bytes from a row to the next
};

struct KvPageCopySpec {
  uint8_t unused[8];
};

struct KvPageCopyParams {
  uint64_t count;
  uint64_t pages;
  uint64_t page_stride;
  uint64_t page_bytes;
};

}  // namespace gyre::abi
