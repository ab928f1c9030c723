// Many rows over K and V that tensor cores take: what a GPU's attention_many_rows has a variant
// for, few (up to 64 rows, split), many, and prompts over so many levels that a command ahead
// unpacks them, at every head dim and pair of format classes.
#include "attention/attention_op_case.h"
#include "kv_copy/kv_copy_case.h"

namespace gyre::test {
namespace {

constexpr uint64_t kDims[] = {64, 80, 96, 112, 128, 160, 192, 256};

// Which the kernel's operands hold: levels under one scale, in whole groups.
bool takes(KvFormat format, uint64_t dim, bool values) {
  if (class_of(format) != FormatClass::levels) return true;
  const bool thirds = format == KvFormat::tq3 || format == KvFormat::tq5;
  return (dim & (dim - 1)) == 0 && (values || dim >= 128 || !thirds);
}

// Queries have K's own type, over levels any type.
DType queries_of(KvFormat k, size_t i) {
  if (k == KvFormat::f16) return kFloats[1 + i % 2];
  return k == KvFormat::bf16 ? DType::bf16 : kFloats[i % 3];
}

enum class Rows : uint8_t { few, many, prompt };

void add_case(KvFormat k, KvFormat v, uint64_t dim, Rows rows, size_t i,
              std::vector<OpCase>& cases) {
  AttentionOpCase c{.k = k, .v = v};
  c.k_dim = dim;
  c.v_dim = dim == 192 ? 128 : dim;
  if (!takes(k, c.k_dim, false) || !takes(v, c.v_dim, true)) return;
  constexpr uint64_t kFew[] = {20, 17, 32}, kMany[] = {34, 65, 40};
  c.kv_heads = 1 + i % 2;
  c.heads = 2 * c.kv_heads;
  c.tokens = rows == Rows::few ? kFew[i % 3] : kMany[i % 3];
  c.length = c.tokens + (rows == Rows::prompt ? 230 : 90) + 37 * (i % 5);
  c.capacity = c.length + 1 + i % 8;
  c.ring_start = i % 3 == 0 ? 0 : c.capacity / 2;
  c.q = queries_of(k, i);
  c.out = kFloats[i / 2 % 3];
  c.window = i % 4 == 1 ? (rows == Rows::prompt ? 240 : 61) : 0;
  c.soft_cap = i % 7 == 2 ? 20.0f : 0.0f;
  c.alibi_slopes = i % 5 == 3;
  c.sink_logits = i % 2 == 0;
  c.tree_mask = i % 6 == 5;
  c.causal = i % 11 != 5;
  c.lse = i % 3 != 1;
  c.aligned = true;
  c.commands = std::nullopt;
  c.only_with = "attention_many_rows";
  c.name = str_cat(c.k_dim, "/", c.v_dim, ", ", c.tokens * 2, " rows of ", c.length, " #", i);
  cases.push_back(make_case(c));
}

constexpr Rows kFewAndMany[] = {Rows::few, Rows::many};
constexpr FormatClass kClasses[] = {FormatClass::f16, FormatClass::bf16, FormatClass::levels};

}  // namespace

std::vector<OpCase> attention_rows_cases() {
  std::vector<OpCase> cases;
  size_t i = 0;
  for (const uint64_t dim : kDims) {
    for (const FormatClass k : kClasses) {
      for (const FormatClass v : kClasses) {
        for (const Rows rows : kFewAndMany)
          add_case(format_of(k, i), format_of(v, i / 3), dim, rows, i, cases), ++i;
        // Not every format of levels has this dim.
        if (k == FormatClass::levels || v == FormatClass::levels) {
          for (const Rows rows : kFewAndMany)
            add_case(k == FormatClass::levels ? KvFormat::tq4 : format_of(k, 0),
                     v == FormatClass::levels ? KvFormat::tq8 : format_of(v, 0), dim, rows, i,
                     cases),
                ++i;
        }
      }
    }
  }
  for (const KvFormat format : native_formats()) {
    for (const Rows rows : kFewAndMany) add_case(format, format, 128, rows, i, cases), ++i;
  }
  for (const uint64_t dim : {64, 128, 256}) {
    for (const KvFormat format : native_formats())
      add_case(format, format, dim, Rows::prompt, i, cases), ++i;
    add_case(KvFormat::tq4, KvFormat::tq8, dim, Rows::prompt, i, cases), ++i;
  }
  return cases;
}

}  // namespace gyre::test
