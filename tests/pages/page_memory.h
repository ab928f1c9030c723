#pragma once
// Pages as bytes, laid out from docs/kv_formats.md and written by the reference.

#include "gyre_test.h"
#include "kv_codec/kv_memory.h"

namespace gyre::test {

uint64_t v_dim_of(const KvPageShape& shape);

class PageMemory {
 public:
  // Filled with a pattern; `gap` bytes, a multiple of 16, lie between pages.
  PageMemory(const KvPageShape& shape, uint64_t pages, uint64_t gap);

  const KvPageShape& shape() const { return shape_; }
  uint64_t pages() const { return pages_; }
  uint64_t page_bytes() const { return shape_.kv_heads * head_bytes_; }
  uint64_t page_stride() const { return page_bytes() + gap_; }
  Bytes& bytes() { return bytes_; }

  // Returns what the row then holds.
  std::vector<double> write(KvRole role, uint64_t slot, uint64_t head,
                            const std::vector<float>& row);

  // Fills a page with the bytes of NaNs and infinities.
  void spoil(uint64_t page);

 private:
  struct Part {
    uint64_t codes, codes_bytes, scales, scales_bytes;  // in the bytes of a head
  };
  KvShape head_shape(KvRole role) const;

  KvPageShape shape_;
  uint64_t pages_, gap_;
  Part parts_[2] = {};  // K, V
  uint64_t head_bytes_ = 0;
  Bytes bytes_;
};

// Pages over those bytes, a flat tensor.
KvPages pages_of(const PageMemory& memory, const Tensor& flat);

// `count` slots from `first` on.
std::vector<int64_t> slot_run(int64_t first, uint64_t count);
Block slot_block(DType dtype, const std::vector<int64_t>& slots);

// A row that `dtype` holds, whose codes are not in doubt and whose norm does not depend on the
// order of summation.
std::vector<float> certain_row(const KvShape& shape, DType dtype, std::mt19937& random);

}  // namespace gyre::test
