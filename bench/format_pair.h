#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gyre/format.h"

namespace gyre::bench {

// What keys and values are stored in.
struct FormatPair {
  KvFormat k = KvFormat::f16;
  KvFormat v = KvFormat::f16;

  std::string label() const;  // "tq8", or "tq8/tq4" where K and V differ
  bool compressed() const;    // K, V or both

  friend bool operator==(const FormatPair&, const FormatPair&) = default;
};

// What label() says; refuses names that are none.
FormatPair format_pair(std::string_view text);

// Refuses a format that is there twice, and one that cannot store the head dim. v_head_dim: 0 is
// head_dim.
void check_formats(std::string_view who, std::span<const FormatPair> formats, uint64_t head_dim,
                   uint64_t v_head_dim = 0);

}  // namespace gyre::bench
