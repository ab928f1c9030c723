// The twelve copy functions of the reference library, each as the Gyre call that replaces it,
// compared with the index maps of the specification (section 2.2) as they are printed there; and
// the no-op and error rules of section 2.3 for each.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "expect_error.h"
#include "gyre/gyre.h"
#include "reference.h"
#include "tensor_bytes.h"

namespace gyre::test {
namespace {

// A: rows, wraps only if sliding. B: one token, head-major cache. C: many tokens, head-major cache,
// always a ring.
enum class Family : uint8_t { a, b, c };

struct Variant {
  const char* name;
  Family family;
  DType source, cache;
  bool dual = false;
  bool head_major_source = false;
};

constexpr Variant kVariants[] = {
    {"kv_cache_copy", Family::a, DType::bf16, DType::bf16},
    {"kv_cache_copy_f32", Family::a, DType::f32, DType::f32},
    {"kv_cache_copy_batch_f32", Family::b, DType::f32, DType::f32},
    {"kv_cache_copy_batch_f32_to_f16", Family::b, DType::f32, DType::f16},
    {"kv_cache_copy_batch_f32_kv_dual", Family::b, DType::f32, DType::f32, true},
    {"kv_cache_copy_batch_f32_to_f16_kv_dual", Family::b, DType::f32, DType::f16, true},
    {"kv_cache_copy_seq_f32", Family::c, DType::f32, DType::f32},
    {"kv_cache_copy_seq_f32_to_f16", Family::c, DType::f32, DType::f16},
    {"kv_cache_copy_seq_f32_dual", Family::c, DType::f32, DType::f32, true},
    {"kv_cache_copy_seq_f32_to_f16_dual", Family::c, DType::f32, DType::f16, true},
    {"kv_cache_copy_seq_bf16", Family::c, DType::bf16, DType::f32},
    {"kv_cache_copy_seq_bf16_to_bf16_head_major", Family::c, DType::bf16, DType::bf16, false, true},
};

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

constexpr uint64_t kC = 11;      // slots
constexpr uint64_t kG = 3;       // KV heads
constexpr uint64_t kD = 6;       // head dim
constexpr uint64_t kT = 9;       // tokens in the source
constexpr uint64_t kRow = 10;    // of family A
constexpr uint64_t kOffset = 2;  // src_tok_offset

class KvCopyParity : public testing::TestWithParam<Variant> {
 protected:
  const Variant& variant() const { return GetParam(); }
  uint64_t source_tokens() const { return variant().family == Family::b ? 1 : kT; }
  uint64_t source_elements() const {
    return source_tokens() * (variant().family == Family::a ? kRow : kG * kD);
  }
  uint64_t cache_elements() const { return kC * (variant().family == Family::a ? kRow : kG * kD); }

  Tensor random_source(uint32_t seed) const {
    std::mt19937 random(seed);
    Bytes bytes(source_elements() * size_bytes(variant().source));
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    const Tensor flat = device_.tensor(variant().source, {source_elements()});
    write_bytes(flat, bytes);
    return flat;
  }
  Tensor filled_cache(uint32_t seed) const {
    const Tensor flat = device_.tensor(variant().cache, {cache_elements()});
    write_bytes(flat, pattern_bytes(flat.bytes(), seed));
    return flat;
  }

  // What a caller of the reference would write instead of it.
  Tensor source_view(const Tensor& flat) const {
    if (variant().family == Family::a) return flat.reshape({kT, 1, kRow});
    if (variant().head_major_source) return flat.reshape({kG, kT, kD}).permute({1, 0, 2});
    return flat.reshape({source_tokens(), kG, kD});
  }
  Tensor cache_view(const Tensor& flat) const {
    if (variant().family == Family::a) return flat.reshape({kC, 1, kRow});
    return flat.reshape({kG, kC, kD}).permute({1, 0, 2});
  }

  void store(Bytes& cache, uint64_t to, const Bytes& source, uint64_t from) const {
    const uint32_t bits = reference::load_bits(variant().source, source.data(), from);
    reference::store_bits(variant().cache, cache.data(), to,
                          reference::convert(variant().source, variant().cache, bits));
  }
  void expect_map(Bytes& cache, const Bytes& source, const KvRange& options) const {
    const uint64_t tokens = options.tokens.value_or(source_tokens() - options.source_begin);
    for (uint64_t t = 0; t < tokens; ++t) {
      if (variant().family == Family::a) {
        const uint64_t pos =
            options.cache == CacheKind::ring ? (options.position + t) % kC : options.position + t;
        for (uint64_t e = 0; e < kRow; ++e) store(cache, pos * kRow + e, source, t * kRow + e);
        continue;
      }
      const uint64_t slot = (options.position + t) % kC;
      const uint64_t token = options.source_begin + t;
      for (uint64_t g = 0; g < kG; ++g) {
        for (uint64_t e = 0; e < kD; ++e) {
          const uint64_t from =
              variant().head_major_source ? (g * kT + token) * kD + e : (token * kG + g) * kD + e;
          store(cache, (g * kC + slot) * kD + e, source, from);
        }
      }
    }
  }

  void check(const KvRange& options) const {
    const Tensor k = random_source(1);
    const Tensor k_cache = filled_cache(2);
    KvCopyInputs inputs{.k = source_view(k), .k_cache = cache_view(k_cache)};
    Bytes expected_k = read_bytes(k_cache);
    expect_map(expected_k, read_bytes(k), options);
    Tensor v;
    Tensor v_cache;
    Bytes expected_v;
    if (variant().dual) {
      v = random_source(3);
      v_cache = filled_cache(4);
      inputs.v = source_view(v);
      inputs.v_cache = cache_view(v_cache);
      expected_v = read_bytes(v_cache);
      expect_map(expected_v, read_bytes(v), options);
    }
    Encoder encoder(device_);
    kv_copy(encoder, inputs, options);
    EXPECT_EQ(encoder.size(), 1u) << "K and V in one dispatch";
    encoder.submit().wait();
    EXPECT_EQ(read_bytes(k_cache), expected_k);
    if (variant().dual) {
      EXPECT_EQ(read_bytes(v_cache), expected_v);
    }
  }

  Device device_ = Device::open("cpu", {.threads = 2});
};

TEST_P(KvCopyParity, WritesWhatTheIndexMapSays) {
  const CacheKind kind = variant().family == Family::a ? CacheKind::linear : CacheKind::ring;
  for (uint64_t position = 0; position + source_tokens() <= kC; ++position) {
    check({.position = position, .cache = kind});
  }
}

TEST_P(KvCopyParity, WrapsWhereTheReferenceDoes) {
  for (uint64_t position = kC - 3; position < 3 * kC; ++position) {
    check({.position = position, .cache = CacheKind::ring});
  }
}

class KvCopySeqParity : public KvCopyParity {};  // only these have src_tok_offset

TEST_P(KvCopySeqParity, TakesASourceOffset) {
  check({.position = 1, .cache = CacheKind::ring, .source_begin = kOffset, .tokens = 4});
  // Sliding prefill: the last C of T tokens, at the position where they belong.
  check({.position = kOffset, .cache = CacheKind::ring, .source_begin = kOffset});
}

// Section 2.3, left column: nothing to do succeeds and writes nothing.
TEST_P(KvCopyParity, NothingToDoIsNotAnError) {
  const Tensor source = source_view(random_source(1));
  const Tensor flat_cache = filled_cache(2);
  const Tensor cache = cache_view(flat_cache);
  const Bytes before = read_bytes(flat_cache);
  Encoder encoder(device_);
  const auto copy = [&](const Tensor& k, const Tensor& to, const KvRange& options) {
    KvCopyInputs inputs{.k = k, .k_cache = to};
    if (variant().dual) {
      inputs.v = k;
      inputs.v_cache = device_.tensor(variant().cache, to.shape());
    }
    kv_copy(encoder, inputs, options);
  };
  copy(source, cache, {.tokens = 0});
  copy(source.slice(1, 0, 0), cache.slice(1, 0, 0), {});
  copy(source.slice(2, 0, 0), cache.slice(2, 0, 0), {});
  EXPECT_EQ(encoder.size(), 0u);
  encoder.submit().wait();
  EXPECT_EQ(read_bytes(flat_cache), before);
}

// Section 2.3, right column: a source that is too small; a position that leaves a cache that does
// not wrap.
TEST_P(KvCopyParity, TooLittleSourceOrRoomIsRefused) {
  const Tensor k = source_view(random_source(1));
  const Tensor flat_cache = filled_cache(2);
  Encoder encoder(device_);
  EXPECT_TRUE(refused({"asked for " + std::to_string(source_tokens() + 1)}, [&] {
    kv_copy(encoder, {.k = k, .k_cache = cache_view(flat_cache)}, {.tokens = source_tokens() + 1});
  }));
  EXPECT_TRUE(refused({"linear", "position " + std::to_string(kC)}, [&] {
    kv_copy(encoder, {.k = k, .k_cache = cache_view(flat_cache)}, {.position = kC});
  }));
  EXPECT_TRUE(refused({"elements"}, [&] {
    source_view(random_source(1).slice(0, 1, source_elements() - 1));
  })) << "a flat source with one element too few has no such shape";
  EXPECT_EQ(encoder.size(), 0u);
  EXPECT_EQ(read_bytes(flat_cache), pattern_bytes(flat_cache.bytes(), 2));
}

std::vector<Variant> seq_variants() {
  std::vector<Variant> variants;
  std::copy_if(std::begin(kVariants), std::end(kVariants), std::back_inserter(variants),
               [](const Variant& v) { return v.family == Family::c; });
  return variants;
}

std::string variant_name(const testing::TestParamInfo<Variant>& test) { return test.param.name; }

INSTANTIATE_TEST_SUITE_P(Reference, KvCopyParity, testing::ValuesIn(kVariants), variant_name);
INSTANTIATE_TEST_SUITE_P(Reference, KvCopySeqParity, testing::ValuesIn(seq_variants()),
                         variant_name);

}  // namespace
}  // namespace gyre::test
