#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "op_case.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHuge = ~uint64_t{0};

KvBuffer make_cache(FilledTensors& tensors, const KvShape& shape) {
  const KvFormatInfo info = describe(shape.format);
  const Dims codes = kv_codes_shape(shape);
  if (!info.compressed) {
    const DType dtype = shape.format == KvFormat::f32
                            ? DType::f32
                            : (shape.format == KvFormat::f16 ? DType::f16 : DType::bf16);
    return {shape, tensors.make(dtype, codes), {}};
  }
  return {shape, tensors.make(DType::u8, codes),
          tensors.make(info.scale == KvScaleKind::f32_norm ? DType::f32 : DType::u8,
                       kv_scales_shape(shape))};
}

// A call that would be fine, for either op; each refusal changes one thing about it.
struct Call {
  AttentionInputs in;
  AttentionOptions options;
  Tensor partial;
};

Call good_call(FilledTensors& t) {
  return {{.q = t.make(DType::f32, {3, 4, 64}),
           .k_cache = make_cache(t, {KvFormat::tq4, KvRole::k, 2, 9, 64}),
           .v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 2, 9, 80}),
           .out = t.make(DType::f32, {3, 4, 80}),
           .lse = t.make(DType::f32, {3, 4}),
           .sinks = t.make(DType::f32, {4}),
           .slopes = t.make(DType::f32, {4}),
           .tree = t.make(DType::u8, {3, 3})},
          {.length = 7, .ring_start = 8},
          t.make(DType::f32, {2, 3, 4, 82})};
}

using Change = void (*)(Call&, FilledTensors&);

enum class Form : uint8_t { whole, partial };

Refusal refusal(Form form, std::string name, std::vector<std::string> message, Change change) {
  message.emplace_back(form == Form::whole ? "attention: " : "attention_partial: ");
  return {std::move(name), std::move(message),
          [change, form](Encoder& encoder, FilledTensors& tensors) {
            Call c = good_call(tensors);
            change(c, tensors);
            if (form == Form::whole) return attention(encoder, c.in, c.options);
            attention_partial(
                encoder, {c.in.q, c.in.k_cache, c.in.v_cache, c.partial, c.in.slopes, c.in.tree},
                c.options);
          }};
}

struct Rule {
  const char* name;
  std::vector<std::string> message;
  Change change;
};

using C = Call;
using T = FilledTensors;

std::vector<Rule> query_rules() {
  return {
      {"no q", {"q is undefined"}, [](C& c, T&) { c.in.q = {}; }},
      {"q of rank 2",
       {"q must be [tokens, heads, head_dim]", "[12, 64]"},
       [](C& c, T&) {
         c.in.q = c.in.q.reshape({12, 64});
       }},
      {"q of u8",
       {"q must be f32, f16 or bf16", "got u8"},
       [](C& c, T& t) {
         c.in.q = t.make(DType::u8, {3, 4, 64});
       }},
      {"head_dim of q",
       {"q must have the head_dim of k_cache: 64", "got 56"},
       [](C& c, T&) { c.in.q = c.in.q.slice(2, 0, 56); }},
      {"q with gaps",
       {"head_dim of q must be contiguous", "stride 2"},
       [](C& c, T& t) {
         c.in.q = t.make(DType::f32, {1536}).strided({3, 4, 64}, {512, 128, 2});
       }},
      {"heads not a multiple",
       {"heads must be a multiple of kv_heads 2", "got 3"},
       [](C& c, T&) { c.in.q = c.in.q.slice(1, 0, 3); }},
      {"no heads",
       {"heads must be a multiple of kv_heads 2", "got 0"},
       [](C& c, T&) { c.in.q = c.in.q.slice(1, 0, 0); }},
      // One element everywhere: such shapes cost no memory.
      {"more tokens than can be counted",
       {"at most 2^32 query tokens", std::to_string((uint64_t{1} << 32) + 1)},
       [](C& c, T&) {
         c.in.q = c.in.q.strided({(uint64_t{1} << 32) + 1, 4, 64}, {0, 64, 1});
       }},
      {"more heads than can be counted",
       {"at most 2^20 heads", std::to_string((uint64_t{1} << 20) + 2)},
       [](C& c, T&) {
         c.in.q = c.in.q.strided({3, (uint64_t{1} << 20) + 2, 64}, {64, 0, 1});
       }},
      {"q of another device",
       {"q lives on another device"},
       [](C& c, T&) {
         c.in.q = Device::open("cpu", {.threads = 1}).tensor(DType::f32, {3, 4, 64});
       }},
  };
}

std::vector<Rule> cache_rules() {
  return {
      {"k_cache without memory",
       {"k_cache has no memory"},
       [](C& c, T&) { c.in.k_cache.codes = {}; }},
      {"k_cache without scales",
       {"k_cache has no memory"},
       [](C& c, T&) { c.in.k_cache.scales = {}; }},
      {"v_cache without memory",
       {"v_cache has no memory"},
       [](C& c, T&) { c.in.v_cache.codes = {}; }},
      {"dense cache with scales",
       {"v_cache is f16 and has no scales"},
       [](C& c, T&) { c.in.v_cache.scales = c.in.k_cache.scales; }},
      {"k_cache of role v",
       {"k_cache must have role k"},
       [](C& c, T& t) {
         c.in.k_cache = make_cache(t, {KvFormat::tq4, KvRole::v, 2, 9, 64});
       }},
      {"v_cache of role k",
       {"v_cache must have role v"},
       [](C& c, T&) { c.in.v_cache.shape.role = KvRole::k; }},
      {"unknown role",
       {"7 is not a role"},
       [](C& c, T&) { c.in.v_cache.shape.role = static_cast<KvRole>(7); }},
      {"dense head_dim below 16",
       {"head_dim of v_cache", "multiple of 8 from 16", "got 8"},
       [](C& c, T& t) {
         c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 2, 9, 8});
       }},
      {"dense head_dim in between",
       {"head_dim of v_cache", "multiple of 8 from 16", "got 84"},
       [](C& c, T& t) {
         c.in.v_cache = make_cache(t, {KvFormat::f32, KvRole::v, 2, 9, 84});
       }},
      {"head_dim past 1024",
       {"head_dim must be at most 1024", "got 1032"},
       [](C& c, T&) { c.in.k_cache.shape.head_dim = 1032; }},
      {"no KV heads",
       {"k_cache has no heads"},
       [](C& c, T& t) {
         c.in.k_cache = make_cache(t, {KvFormat::tq4, KvRole::k, 0, 9, 64});
         c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 0, 9, 80});
       }},
      {"kv_heads of v_cache",
       {"kv_heads of k_cache: 2", "got 4"},
       [](C& c, T& t) {
         c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 4, 9, 80});
       }},
      {"capacity of v_cache",
       {"capacity of k_cache: 9", "got 10"},
       [](C& c, T& t) {
         c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 2, 10, 80});
       }},
      {"capacity past the memory",
       {"v_cache must be f16 [2, 10, 80]", "got f16 [2, 9, 80]"},
       [](C& c, T&) { c.in.v_cache.shape.capacity = 10; }},
      {"huge capacity",
       {"capacity must be at most 2^36", std::to_string(kHuge)},
       [](C& c, T&) { c.in.k_cache.shape.capacity = kHuge; }},
      {"dense codes of another dtype",
       {"v_cache must be bf16", "got f16"},
       [](C& c, T&) { c.in.v_cache.shape.format = KvFormat::bf16; }},
      {"codes of another format",
       {"codes of k_cache", "[2, 16, 64]", "got u8 [2, 16, 32]"},
       [](C& c, T&) { c.in.k_cache.shape.format = KvFormat::tq8; }},
      {"dense codes with gaps",
       {"head_dim of v_cache must be contiguous", "stride 2"},
       [](C& c, T& t) {
         c.in.v_cache.codes = t.make(DType::f16, {2880}).strided({2, 9, 80}, {1440, 160, 2});
       }},
      {"v_cache of another device",
       {"v_codes lives on another device"},
       [](C& c, T&) {
         c.in.v_cache.codes = Device::open("cpu", {.threads = 1}).tensor(DType::f16, {2, 9, 80});
       }},
  };
}

std::vector<Rule> option_rules() {
  return {
      {"length past the capacity",
       {"length must be at most the capacity 9", "got 10"},
       [](C& c, T&) { c.options.length = 10; }},
      // Slots 9 to 15 have memory, the rest of a tile; they are no slots.
      {"huge length",
       {"length must be at most the capacity 9", "got " + std::to_string(kHuge)},
       [](C& c, T&) { c.options.length = kHuge; }},
      {"ring_start at the capacity",
       {"ring_start must be below the capacity 9", "got 9"},
       [](C& c, T&) { c.options.ring_start = 9; }},
      {"huge ring_start",
       {"ring_start must be below the capacity 9", "got " + std::to_string(kHuge)},
       [](C& c, T&) { c.options.ring_start = kHuge; }},
      {"scale is infinite",
       {"scale must be finite", "got inf"},
       [](C& c, T&) { c.options.scale = std::numeric_limits<float>::infinity(); }},
      {"scale is NaN", {"scale must be finite", "nan"}, [](C& c, T&) { c.options.scale = NAN; }},
      {"soft_cap is negative",
       {"soft_cap must be finite and not negative", "got -1"},
       [](C& c, T&) { c.options.soft_cap = -1; }},
      {"soft_cap is infinite",
       {"soft_cap must be finite", "got inf"},
       [](C& c, T&) { c.options.soft_cap = std::numeric_limits<float>::infinity(); }},
      {"soft_cap is NaN",
       {"soft_cap must be finite", "nan"},
       [](C& c, T&) { c.options.soft_cap = NAN; }},
      {"slopes of another size",
       {"slopes must be contiguous f32 [4]", "got f32 [3]"},
       [](C& c, T&) { c.in.slopes = c.in.slopes.slice(0, 0, 3); }},
      {"slopes of another dtype",
       {"slopes must be contiguous f32 [4]", "got f16"},
       [](C& c, T& t) { c.in.slopes = t.make(DType::f16, {4}); }},
      {"slopes with gaps",
       {"slopes must be contiguous", "strides [2]"},
       [](C& c, T& t) { c.in.slopes = t.make(DType::f32, {8}).strided({4}, {2}); }},
      {"slopes of rank 2",
       {"slopes must be contiguous f32 [4]", "got f32 [4, 1]"},
       [](C& c, T& t) {
         c.in.slopes = t.make(DType::f32, {4, 1});
       }},
      {"tree of other sizes",
       {"tree must be u8 [3, 3]", "got u8 [3, 4]"},
       [](C& c, T& t) {
         c.in.tree = t.make(DType::u8, {3, 4});
       }},
      {"tree of another dtype",
       {"tree must be u8 [3, 3]", "got i32"},
       [](C& c, T& t) {
         c.in.tree = t.make(DType::i32, {3, 3});
       }},
      {"tree on its side",
       {"tree must be u8 [3, 3] with contiguous rows", "strides [1, 3]"},
       [](C& c, T&) {
         c.in.tree = c.in.tree.permute({1, 0});
       }},
      {"tree with more queries than keys",
       {"with a tree the queries must be in the cache", "3 queries", "length 2"},
       [](C& c, T&) { c.options.length = 2; }},
  };
}

// What one tensor gives another when both lie in `memory`.
Tensor piece(T& t, const Tensor& memory, DType dtype, const Dims& shape) {
  return t.device().wrap(address_of(memory), dtype, shape);
}

// Puts the written tensor and each input in turn into the same memory.
template <class Written>
std::vector<Rule> overlap_rules(const char* message, Written) {
  return {
      {"written is q",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.q = piece(t, memory, DType::f32, {3, 4, 64});
         Written::set(c, t, memory);
       }},
      {"written is k's codes",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.k_cache.codes = piece(t, memory, DType::u8, {2, 16, 32});
         Written::set(c, t, memory);
       }},
      {"written is k's scales",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.k_cache.scales = piece(t, memory, DType::u8, kv_scales_shape(c.in.k_cache.shape));
         Written::set(c, t, memory);
       }},
      {"written is v's codes",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.v_cache.codes = piece(t, memory, DType::f16, {2, 9, 80});
         Written::set(c, t, memory);
       }},
      {"written is v's scales",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.v_cache = make_cache(t, {KvFormat::tq3, KvRole::v, 2, 9, 80});
         c.in.v_cache.scales = piece(t, memory, DType::u8, kv_scales_shape(c.in.v_cache.shape));
         Written::set(c, t, memory);
       }},
      {"written is slopes",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.slopes = piece(t, memory, DType::f32, {4});
         Written::set(c, t, memory);
       }},
      {"written is tree",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.tree = piece(t, memory, DType::u8, {3, 3});
         Written::set(c, t, memory);
       }},
  };
}

struct WriteOut {
  static void set(C& c, T& t, const Tensor& m) { c.in.out = piece(t, m, DType::f32, {3, 4, 80}); }
};
struct WriteLse {
  static void set(C& c, T& t, const Tensor& m) { c.in.lse = piece(t, m, DType::f32, {3, 4}); }
};
struct WritePartial {
  static void set(C& c, T& t, const Tensor& m) {
    c.partial = piece(t, m, DType::f32, {2, 3, 4, 82});
  }
};

std::vector<Rule> output_rules() {
  return {
      {"no out", {"out is undefined"}, [](C& c, T&) { c.in.out = {}; }},
      {"out of u8",
       {"out must be f32, f16 or bf16", "got u8"},
       [](C& c, T& t) {
         c.in.out = t.make(DType::u8, {3, 4, 80});
       }},
      {"out with K's head_dim",
       {"out must have shape [3, 4, 80]", "got [3, 4, 64]"},
       [](C& c, T& t) {
         c.in.out = t.make(DType::f32, {3, 4, 64});
       }},
      {"out with gaps",
       {"head_dim of out must be contiguous", "stride 2"},
       [](C& c, T& t) {
         c.in.out = t.make(DType::f32, {1920}).strided({3, 4, 80}, {640, 160, 2});
       }},
      {"heads of out in one place",
       {"strides [320, 0, 1] make elements of out share memory"},
       [](C& c, T&) {
         c.in.out = c.in.out.strided({3, 4, 80}, {320, 0, 1});
       }},
      {"sinks of another size",
       {"sinks must be contiguous f32 [4]", "got f32 [5]"},
       [](C& c, T& t) { c.in.sinks = t.make(DType::f32, {5}); }},
      {"sinks of another dtype",
       {"sinks must be contiguous f32 [4]", "got bf16"},
       [](C& c, T& t) { c.in.sinks = t.make(DType::bf16, {4}); }},
      {"lse of another dtype",
       {"lse must be f32 [3, 4]", "got f16"},
       [](C& c, T& t) {
         c.in.lse = t.make(DType::f16, {3, 4});
       }},
      {"lse of other sizes",
       {"lse must be f32 [3, 4]", "got f32 [4, 3]"},
       [](C& c, T& t) {
         c.in.lse = t.make(DType::f32, {4, 3});
       }},
      {"lse in one place",
       {"strides [0, 1] make elements of lse share memory"},
       [](C& c, T&) {
         c.in.lse = c.in.lse.strided({3, 4}, {0, 1});
       }},
      {"lse in out",
       {"lse and out share memory"},
       [](C& c, T&) {
         c.in.lse = c.in.out.strided({3, 4}, {4, 1}, 948);
       }},
      {"out is sinks",
       {"out shares memory with an input"},
       [](C& c, T&) { c.in.sinks = c.in.out.strided({4}, {1}, 956); }},
      {"lse is sinks",
       {"lse shares memory with an input"},
       [](C& c, T&) { c.in.sinks = c.in.lse.strided({4}, {1}, 8); }},
      {"read-only out",
       {"out is written", "read-only"},
       [](C& c, T& t) {
         const void* memory = address_of(c.in.out);
         c.in.out = t.device().wrap(memory, DType::f32, {3, 4, 80});
       }},
      {"read-only lse",
       {"lse is written", "read-only"},
       [](C& c, T& t) {
         const void* memory = address_of(c.in.lse);
         c.in.lse = t.device().wrap(memory, DType::f32, {3, 4});
       }},
      {"out of another device",
       {"out lives on another device"},
       [](C& c, T&) {
         c.in.out = Device::open("cpu", {.threads = 1}).tensor(DType::f32, {3, 4, 80});
       }},
  };
}

std::vector<Rule> partial_rules() {
  return {
      {"no partial", {"partial is undefined"}, [](C& c, T&) { c.partial = {}; }},
      {"no splits",
       {"partial must have shape [1, 3, 4, 82]", "got [0, 3, 4, 82]"},
       [](C& c, T&) { c.partial = c.partial.slice(0, 0, 0); }},
      {"partial of f16",
       {"partial must be contiguous f32", "got f16"},
       [](C& c, T& t) {
         c.partial = t.make(DType::f16, {2, 3, 4, 82});
       }},
      {"partial of rank 3",
       {"partial must be contiguous f32 [splits, tokens, heads, v_head_dim + 2]", "[6, 4, 82]"},
       [](C& c, T&) {
         c.partial = c.partial.reshape({6, 4, 82});
       }},
      {"partial with gaps",
       {"partial must be contiguous", "strides [984, 328, 82, 1]"},
       [](C& c, T&) { c.partial = c.partial.slice(1, 0, 2); }},
      {"tokens of partial",
       {"partial must have shape [2, 3, 4, 82]", "got [2, 2, 4, 82]"},
       [](C& c, T& t) {
         c.partial = t.make(DType::f32, {2, 2, 4, 82});
       }},
      {"partial without room for the state",
       {"partial must have shape [2, 3, 4, 82]", "got [2, 3, 4, 80]"},
       [](C& c, T& t) {
         c.partial = t.make(DType::f32, {2, 3, 4, 80});
       }},
      {"read-only partial",
       {"partial is written", "read-only"},
       [](C& c, T& t) {
         const void* memory = address_of(c.partial);
         c.partial = t.device().wrap(memory, DType::f32, {2, 3, 4, 82});
       }},
  };
}

std::vector<Refusal> made(Form form, const std::vector<std::vector<Rule>>& lists) {
  std::vector<Refusal> all;
  for (const auto& list : lists) {
    for (const Rule& rule : list)
      all.push_back(refusal(form, rule.name, rule.message, rule.change));
  }
  return all;
}

}  // namespace

std::vector<Refusal> attention_refusals() {
  return made(Form::whole, {query_rules(), cache_rules(), option_rules(), output_rules(),
                            overlap_rules("out shares memory with an input", WriteOut()),
                            overlap_rules("lse shares memory with an input", WriteLse())});
}

std::vector<Refusal> attention_partial_refusals() {
  return made(Form::partial,
              {query_rules(), cache_rules(), option_rules(), partial_rules(),
               overlap_rules("partial shares memory with an input", WritePartial())});
}

}  // namespace gyre::test
