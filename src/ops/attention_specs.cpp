// What attention's kernels are called with: traces and lists.
#include <array>
#include <vector>

#include "ops/attention_latent.h"
#include "ops/attention_spec.h"
#include "ops/table.h"
#include "runtime/require.h"

namespace gyre {

std::string attention_shape(const void* params) {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  if (p.table.page_tokens != 0) {
    return join("sequences=", p.table.sequences, " tokens=", p.tokens, " heads=", p.heads, "/",
                p.kv_heads, " head_dim=", p.k.head_dim, "/", p.v.head_dim,
                " length<=", p.table.max_kv_length, " page=", p.table.page_tokens);
  }
  return join("tokens=", p.tokens, " heads=", p.heads, "/", p.kv_heads, " head_dim=", p.k.head_dim,
              "/", p.v.head_dim, " length=", p.length, " splits=", p.splits);
}

std::string attention_schedule_shape(const void* params) {
  const auto& p = *static_cast<const abi::AttentionScheduleParams*>(params);
  return join("sequences=", p.call.table.sequences, " tokens=", p.call.tokens,
              " kv_heads=", p.call.kv_heads, " rows=", p.rows, " blocks=", p.blocks);
}

std::string attention_merge_shape(const void* params) {
  const auto& p = *static_cast<const abi::AttentionMergeParams*>(params);
  return join("splits=", p.splits, " tokens=", p.tokens, " heads=", p.heads,
              " head_dim=", p.head_dim);
}

std::span<const uint64_t> attention_specs() {
  return spec_list([](auto add) {
    for (const DType q : kFloats) {
      for (const KvFormat k : kv_formats()) {
        for (const KvFormat v : kv_formats()) {
          for (const DType out : kFloats) {
            for (const bool paged : {false, true}) {
              add(make_spec(q, k, v, out, paged));
              if (is_latent_format(k) && is_latent_format(v))
                add(make_spec(q, k, v, out, paged, true));
            }
          }
        }
      }
    }
  });
}

std::span<const uint64_t> attention_merge_specs() {
  return spec_list([](auto add) {
    for (const DType out : kFloats) add(make_merge_spec(out));
  });
}

}  // namespace gyre
