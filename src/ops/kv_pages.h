#pragma once
// Where the parts of a page lie.

#include "abi/write.h"
#include "gyre/write.h"

namespace gyre {

class Recording;

void check_page_shape(const char* op, const KvPageShape& shape);
void check_pages(const char* op, const KvPages& pages);

// Four views of the same pages, each from its part of the first KV head of page 0 to the end of
// the last page; undefined for dense formats' scales.
struct KvPageParts {
  Tensor k_codes, k_scales, v_codes, v_scales;
  abi::KvCacheLayout k{}, v{};  // inside a page
  uint64_t page_stride = 0;     // bytes
};

KvPageParts page_parts(const KvPages& pages);

// What kv_write checks, its params, and its commands.
abi::WriteParams checked_write(const char* op, const KvWriteInputs& in, KvPageParts& parts);
void dispatch_write(Recording& recording, const Device& device, const KvWriteInputs& in,
                    const KvPageParts& parts, abi::WriteParams params);

}  // namespace gyre
