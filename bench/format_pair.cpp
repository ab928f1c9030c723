#include "format_pair.h"

#include <algorithm>

#include "did_you_mean.h"
#include "runtime/require.h"

namespace gyre::bench {
namespace {

KvFormat format_of(std::string_view text) {
  std::vector<std::string> names;
  for (const KvFormat format : kv_formats()) {
    if (name(format) == text) return format;
    names.emplace_back(name(format));
  }
  refuse_name("no cache format", text, names);
}

}  // namespace

std::string FormatPair::label() const {
  std::string label(name(k));
  if (k != v) label.append("/").append(name(v));
  return label;
}

bool FormatPair::compressed() const { return describe(k).compressed || describe(v).compressed; }

FormatPair format_pair(std::string_view text) {
  const size_t slash = text.find('/');
  const KvFormat k = format_of(text.substr(0, slash));
  return {k, slash == std::string_view::npos ? k : format_of(text.substr(slash + 1))};
}

void check_formats(std::string_view who, std::span<const FormatPair> formats, uint64_t head_dim,
                   uint64_t v_head_dim) {
  require(head_dim >= 16 && head_dim % 8 == 0, who, ": head_dim must be a multiple of 8 from 16, ",
          "got ", head_dim);
  for (size_t i = 0; i < formats.size(); ++i) {
    require(std::find(formats.begin(), formats.begin() + static_cast<ptrdiff_t>(i), formats[i]) ==
                formats.begin() + static_cast<ptrdiff_t>(i),
            who, ": the format ", formats[i].label(), " is given twice");
    kv_codes_shape({formats[i].k, KvRole::k, 1, 8, head_dim});
    kv_codes_shape({formats[i].v, KvRole::v, 1, 8, v_head_dim != 0 ? v_head_dim : head_dim});
  }
}

}  // namespace gyre::bench
