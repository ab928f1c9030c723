#pragma once
// What the ops that write to a cache have in common: kv_quantize, kv_append, kv_write, rope_append.

#include <span>
#include <vector>

#include "abi/write.h"
#include "gyre/format.h"
#include "gyre/tensor.h"

namespace gyre {

struct WriteTypes {
  DType source = DType::f32;
  uint64_t k_format = 0, v_format = 0;  // KvFormat
  uint64_t calibrated = 0, slot_bytes = 0, lane_quads = 0;
};
abi::WriteSpec write_spec(const WriteTypes& types);
// Every Spec of a kernel: all sources, pairs of these formats, and pairs of calibrated rows.
struct WriteListing {
  std::span<const KvFormat> formats;
  std::vector<uint64_t> slot_bytes = {0};
  bool few_rows = false;
};
std::vector<uint64_t> write_specs(const WriteListing& listing);
// Every value of a Spec's lane_quads, for listings.
std::vector<uint64_t> lane_quads_of(KvFormat k, KvFormat v);

// v has the tokens and the dtype of k.
void check_rows_pair(const char* op, const Tensor& k, const Tensor& v);

// Without sink tokens and tail.
abi::WriteStream write_stream(const Tensor& source, const abi::KvCacheLayout& cache);

}  // namespace gyre
