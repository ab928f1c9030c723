#pragma once
// attention_many_rows in two commands over the same arguments: the one that attends names, in the
// last byte of its Spec, the `gpu` of the one that goes ahead of it. Host only.
#include "abi/attention.h"

namespace gyre::abi {

// 0: no command goes ahead.
constexpr uint8_t rows_ahead(const AttentionRowsSpec& spec) { return spec.unused; }
constexpr AttentionRowsSpec with_rows_ahead(AttentionRowsSpec spec, uint32_t gpu) {
  spec.unused = static_cast<uint8_t>(gpu);
  return spec;
}
constexpr AttentionRowsSpec rows_spec_ahead(AttentionRowsSpec spec) {
  spec.gpu = rows_ahead(spec);
  spec.unused = 0;
  return spec;
}

}  // namespace gyre::abi
