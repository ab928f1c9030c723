// kv_write and kv_page_copy against pages that the reference writes.
#include "abi/write.h"
#include "gyre_test.h"
#include "op_case.h"
#include "pages/page_memory.h"

namespace gyre::test {
namespace {

using reference::KvSide;

struct KvWriteCase {
  std::string name = {};
  KvPageShape shape{KvFormat::tq8, KvFormat::tq4, 2, 64, 0, 16};
  DType source = DType::f32, slot_type = DType::i64;
  KvLayout layout = KvLayout::token_major;
  uint64_t pages = 4, gap = 0;
  std::vector<int64_t> slots = {};
};

constexpr int64_t kBeyond32Bits = int64_t{1} << 40;

KvShape row_shape(const KvPageShape& shape, KvRole role) {
  const bool v = role == KvRole::v;
  return {v ? shape.v : shape.k, role, shape.kv_heads, shape.page_tokens,
          v ? v_dim_of(shape) : shape.head_dim};
}

KvSide source_side(const KvWriteCase& c, KvRole role) {
  return {c.source, c.layout, c.slots.size(), c.shape.kv_heads, row_shape(c.shape, role).head_dim,
          0};
}

// Tokens in order, each over what its slot held.
Block write_rows(const KvWriteCase& c, KvRole role, std::mt19937& random, PageMemory& memory) {
  const KvSide side = source_side(c, role);
  Bytes bytes = pattern_bytes(side.elements() * size_bytes(side.dtype), 3);
  for (uint64_t t = 0; t < c.slots.size(); ++t) {
    for (uint64_t h = 0; h < side.heads; ++h) {
      const std::vector<float> row = certain_row(row_shape(c.shape, role), c.source, random);
      reference::store_row(side, bytes, t, h, row);
      const int64_t slot = c.slots[t];
      if (slot >= 0 && static_cast<uint64_t>(slot) < c.pages * c.shape.page_tokens)
        memory.write(role, static_cast<uint64_t>(slot), h, row);
    }
  }
  return plain_block(c.source, std::move(bytes));
}

OpRun make_run(const KvWriteCase& c) {
  std::mt19937 random = random_of(c.name);
  PageMemory memory(c.shape, c.pages, c.gap);
  Block pages = plain_block(DType::u8, memory.bytes());
  pages.aligned = true;
  OpRun run;
  run.blocks.push_back(write_rows(c, KvRole::k, random, memory));
  run.blocks.push_back(write_rows(c, KvRole::v, random, memory));
  pages.after = memory.bytes();
  run.blocks.push_back(std::move(pages));
  run.blocks.push_back(slot_block(c.slot_type, c.slots));
  run.commands =
      static_cast<uint32_t>((c.slots.size() + abi::kWriteMaxTokens - 1) / abi::kWriteMaxTokens);
  run.record = [c, memory](Encoder& encoder, std::span<const Tensor> t) {
    kv_write(encoder, {.k = kv_view(t[0], source_side(c, KvRole::k)),
                       .v = kv_view(t[1], source_side(c, KvRole::v)),
                       .pages = pages_of(memory, t[2]),
                       .slots = t[3]});
  };
  return run;
}

std::string text(const KvPageShape& s) {
  return str_cat(s.k, "/", s.v, " ", s.head_dim, "/", v_dim_of(s), " pages of ", s.page_tokens);
}

// Every format of K and of V, every pair of classes, dtypes, page sizes, gaps and layouts in turn.
std::vector<KvWriteCase> format_cases() {
  constexpr uint64_t kPageTokens[] = {8, 16, 64, 128};
  std::vector<KvWriteCase> cases;
  const auto add = [&](KvFormat k, KvFormat v) {
    const size_t i = cases.size();
    KvWriteCase c;
    // The norms of mlx-native formats are exact at 256.
    const bool wide = i % 4 == 3 && class_of(v) != FormatClass::mlx_native;
    c.shape = {k, v, 1 + i % 3, 256, wide ? uint64_t{512} : 0, kPageTokens[i % 4]};
    c.source = kFloats[i % 3];
    c.slot_type = i % 2 == 0 ? DType::i64 : DType::i32;
    c.layout = i % 5 == 4 ? KvLayout::padded : kPlainLayouts[i % 2];
    c.pages = 3;
    c.gap = i % 3 * 48;
    c.slots = slot_run(static_cast<int64_t>(c.shape.page_tokens) - 3, 11);
    c.name = str_cat(text(c.shape), " from ", c.source, " ", layout_name(c.layout));
    cases.push_back(c);
  };
  for (const KvFormat format : kv_formats()) {
    for (const FormatClass other : kFormatClasses) {
      add(format, format_of(other, cases.size()));
      add(format_of(other, cases.size()), format);
    }
  }
  return cases;
}

// Which slots in which order.
std::vector<KvWriteCase> slot_cases() {
  std::vector<KvWriteCase> cases;
  const auto add = [&](const std::string& what, std::vector<int64_t> slots) {
    for (const KvFormat v : {KvFormat::tq4, KvFormat::tq3, KvFormat::bf16, KvFormat::mlx_native4}) {
      KvWriteCase c;
      c.shape.v = v;
      c.slots = slots;
      const bool fits = std::all_of(slots.begin(), slots.end(), [](int64_t slot) {
        return slot == static_cast<int32_t>(slot);
      });
      c.slot_type = fits && cases.size() % 2 == 0 ? DType::i32 : DType::i64;
      c.name = str_cat(what, ", V ", v);
      cases.push_back(c);
    }
  };
  add("no tokens", {});
  add("one token", {5});
  add("the last slot", {63});
  add("nothing but padding", {-1, -1, -1});
  add("padding at the end", {17, 18, -1, -1});
  add("padding between sequences", {-1, 17, 18, -1, -1, 24, -1, 40, 41});
  add("padding inside a tile", {17, -1, 18, 1 << 20, 19, -1, 17, -1, 24, -1, 25});
  for (const int64_t skipped : {31, 100}) {
    std::vector<int64_t> slots(static_cast<size_t>(skipped) + 4, -1);
    slots.front() = 41, slots[1] = 42, slots[slots.size() - 2] = 43, slots.back() = 41;
    add(str_cat("padding of ", skipped, " inside a tile"), slots);
  }
  add("out of the pages", {63, 64, 65, kBeyond32Bits, int64_t{-1} << 63, (int64_t{1} << 62) + 3});
  add("a tile backwards", {7, 6, 5, 4, 3, 2, 1, 0});
  add("a slot twice, the later token stays", {9, 10, 9, 11, 11});
  add("a run longer than a tile", {1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 0});
  add("tokens of several sequences", {0, 17, 18, 40, 41, 42, 43, 44, 45, 46, 47, 48, 33, -1});
  add("sequences in turn", {0, 40, 17, 1, 41, 18, 2, 42, 19, 3, 43});
  add("a slot twice, far apart",
      {9, 40, 17, 10, 9, 41, 18, 11, 40, 12, 9,  33, 34, 35, 36, 37, 32, 9, 38,
       0, 1,  2,  3,  4, 5,  6,  7,  8,  10, 50, 51, 52, 53, 9,  54, 12, 55});
  add("whole pages", slot_run(16, 32));
  for (int64_t first = 0; first < 9; ++first) add("second chunks", slot_run(first, 9 - first));
  return cases;
}

// More tokens than a command looks through row by row: every format in either role, in any order,
// some slots twice, some that are none.
std::vector<int64_t> shuffled_slots(uint64_t count, uint64_t slots) {
  std::mt19937 random(static_cast<uint32_t>(count));
  std::vector<int64_t> list;
  for (uint64_t i = 0; i < count; ++i)
    list.push_back(static_cast<int64_t>(random() % (slots + slots / 8)) - 3);
  return list;
}
std::vector<KvWriteCase> many_cases() {
  std::vector<KvWriteCase> cases;
  for (const KvFormat format : kv_formats()) {
    if (class_of(format) == FormatClass::mlx_native) continue;  // never few
    for (const bool is_k : {true, false}) {
      KvWriteCase c;
      const KvFormat other = format_of(FormatClass::levels, cases.size());
      c.shape = {is_k ? format : other, is_k ? other : format, 1 + cases.size() % 2, 16, 24, 64};
      c.slots = shuffled_slots(abi::kWriteFewTokens + 1 + cases.size() % 5, 4 * 64);
      c.name = "many tokens " + text(c.shape);
      cases.push_back(c);
    }
  }
  KvWriteCase few = cases.front();  // the most that are few
  few.slots = shuffled_slots(abi::kWriteFewTokens, 4 * 64);
  few.name = "the most that are few " + text(few.shape);
  cases.push_back(few);
  KvWriteCase two = cases.front();
  two.shape = {KvFormat::tq4, KvFormat::tq4, 1, 16, 0, 512};
  two.slots = shuffled_slots(abi::kWriteMaxTokens + 200, 2 * 512);
  two.name = "two commands";
  cases.push_back(two);
  return cases;
}

// Cut into many tasks.
std::vector<KvWriteCase> long_cases() {
  std::vector<KvWriteCase> cases;
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq4, KvFormat::tq5}) {
    KvWriteCase c;
    c.shape = {format, format, 3, 128, 0, 64};
    c.slots = slot_run(5, 150);
    c.slots.insert(c.slots.begin() + 70, 3, -1);
    c.name = "many tasks " + text(c.shape);
    cases.push_back(c);
  }
  return cases;
}

struct PageCopyCase {
  std::string name;
  std::vector<int32_t> from, to;
  uint64_t gap = 0, page_tokens = 16;
};

OpRun make_run(const PageCopyCase& c) {
  PageMemory memory({KvFormat::tq5, KvFormat::f16, 3, 64, 80, c.page_tokens}, 7, c.gap);
  Block pages = plain_block(DType::u8, memory.bytes());
  pages.aligned = true;
  const auto is_page = [](int32_t page) { return page >= 0 && page < 7; };
  for (size_t i = 0; i < c.from.size(); ++i) {
    if (!is_page(c.from[i]) || !is_page(c.to[i])) continue;
    const auto at = [&](Bytes& bytes, int32_t page) {
      return bytes.begin() +
             static_cast<ptrdiff_t>(page) * static_cast<ptrdiff_t>(memory.page_stride());
    };
    std::copy_n(at(pages.before, c.from[i]), memory.page_bytes(), at(pages.after, c.to[i]));
  }
  OpRun run;
  run.blocks = {std::move(pages), plain_block(DType::i32, c.from), plain_block(DType::i32, c.to)};
  run.commands = c.from.empty() ? 0 : 1;
  run.record = [memory](Encoder& encoder, std::span<const Tensor> t) {
    kv_page_copy(encoder, {.pages = pages_of(memory, t[0]), .from = t[1], .to = t[2]});
  };
  return run;
}

OpCase make_case(const KvWriteCase& c) {
  return kernel_case("kv_write", c.name, [c] { return make_run(c); });
}
OpCase make_case(const PageCopyCase& c) {
  return kernel_case("kv_page_copy", c.name, [c] { return make_run(c); });
}

}  // namespace

std::vector<OpCase> kv_write_cases() {
  return make_cases<KvWriteCase>({format_cases(), slot_cases(), many_cases(), long_cases()});
}

std::vector<OpCase> kv_page_copy_cases() {
  return make_cases<PageCopyCase>({{
      {"none", {}, {}},
      {"one", {2}, {5}},
      {"several, with gaps", {0, 3, 6}, {1, 2, 5}, 160},
      {"one page to two", {4, 4}, {0, 6}, 16},
      {"pages that are not there", {-1, 2, 7, 3, 1 << 30, 5}, {1, -5, 0, 7, 4, 6}},
      {"onto itself", {3, 1}, {3, 2}},
      {"many tasks", {0, 1, 2}, {6, 5, 4}, 32, 1024},
  }});
}

}  // namespace gyre::test
