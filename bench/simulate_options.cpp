#include <limits>

#include "gyre/pages.h"
#include "runtime/require.h"
#include "simulate.h"

namespace gyre::bench {

uint64_t pool_pages(const SimulateOptions& o, const FormatPair& formats) {
  const uint64_t page = o.layers * kv_page_bytes({.k = formats.k,
                                                  .v = formats.v,
                                                  .kv_heads = o.kv_heads,
                                                  .head_dim = o.head_dim,
                                                  .page_tokens = o.page_tokens});
  const uint64_t pages = o.memory / page;
  constexpr uint64_t kMaxTokens = std::numeric_limits<int32_t>::max(), kMiB = 1 << 20;
  require(pages != 0, "simulate: --memory of ", o.memory / kMiB,
          " MiB holds no page: ", o.page_tokens, " tokens of ", o.layers, " layers in ",
          formats.label(), " have ", page, " bytes");
  require(pages <= kMaxTokens / o.page_tokens, "simulate: --memory of ", o.memory / kMiB,
          " MiB holds ", pages, " pages of ", o.page_tokens, " tokens in ", formats.label(),
          ", a pool has at most ", kMaxTokens / o.page_tokens);
  return pages;
}

double SimulateResult::hit_rate() const {
  return prompt_tokens == 0 ? 0
                            : static_cast<double>(hit_tokens) / static_cast<double>(prompt_tokens);
}

double SimulateResult::tokens_per_second() const {
  const uint64_t computed = prompt_tokens - hit_tokens + answer_tokens;
  return busy_seconds > 0 ? static_cast<double>(computed) / busy_seconds : 0;
}

void check(const SimulateOptions& o) {
  const auto within = [](const char* flag, uint64_t value, uint64_t limit) {
    require(value != 0 && value <= limit, "simulate: ", flag, " must be from 1 to ", limit,
            ", got ", value);
  };
  within("--heads", o.heads, 1 << 14);
  within("--kv-heads", o.kv_heads, 1 << 14);
  within("--head-dim", o.head_dim, 1024);
  within("--layers", o.layers, 1024);
  within("--users", o.users, 4096);
  within("--step", o.step_tokens, 1 << 16);
  require(o.page_tokens != 0 && o.page_tokens <= 1024 && o.page_tokens % 8 == 0,
          "simulate: --page must be a multiple of 8 from 8 to 1024, got ", o.page_tokens);
  const auto at_most = [](const char* flag, double value, double limit) {
    require(value >= 0 && value <= limit, "simulate: ", flag, " must be from 0 to ", limit,
            ", got ", value);
  };
  at_most("--step-ms", o.step_ms, 1e6);
  at_most("--token-us", o.token_us, 1e6);
  for (const double rate : o.kv_gbps)
    require(rate >= 1e-3 && rate <= 1e6, "simulate: --kv-gbps must be from 0.001 to 1e+06, got ",
            rate);
  require(o.kv_gbps.size() <= 1 || o.kv_gbps.size() == o.formats.size(),
          "simulate: --kv-gbps must have one number, or one for each of ", o.formats.size(),
          " formats, got ", o.kv_gbps.size());
  require(o.heads % o.kv_heads == 0, "simulate: --heads must be a multiple of --kv-heads, got ",
          o.heads, " and ", o.kv_heads);
  require(o.users <= o.step_tokens, "simulate: --users must be at most --step, a token each; got ",
          o.users, " and ", o.step_tokens);
  check_formats("simulate", o.formats, o.head_dim);
  for (const FormatPair& formats : o.formats) pool_pages(o, formats);
}

}  // namespace gyre::bench
