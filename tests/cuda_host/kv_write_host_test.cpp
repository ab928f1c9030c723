// kv_write's and kv_page_copy's CUDA text on the host: a list of slots leaves the bytes that
// kv_quantize and kv_copy, token by token, leave in a cache of as many slots. Kernels for few
// tokens take every list, those for many some pairs of formats.
#include <gtest/gtest.h>

#include <random>
#include <span>
#include <type_traits>

#include "cuda/kernels.h"
#include "cuda_host/host_device.h"
#include "kv_codec/kv_codec_case.h"
#include "ops/kv_pages.h"
// After cuda_host.h
#include "cuda/kernels/cache.cu"
#include "cuda/kernels/write.cu"

namespace gyre::test {
namespace {

constexpr uint64_t kHeads = 3, kPages = 5, kPageTokens = 24;

struct WriteCase {
  DType source;
  KvFormat k, v;
  uint64_t head_dim, v_head_dim;
  bool wide;  // slots of 64 bits
  void (*run)(const abi::WriteParams& p, const uint64_t* args);
};

template <class Source>
constexpr DType dtype_of() {
  if (sizeof(Source) == 4) return DType::f32;
  return std::is_same_v<Source, cuda::Half> ? DType::f16 : DType::bf16;
}

template <class Source, uint32_t kK, uint32_t kV, class Slot>
void run_tiles(const abi::WriteParams& p, const uint64_t* args) {
  launch_on_host(cuda::kv_write<Source, kK, kV, Slot>, cuda::launch_write, &p, args, 9, 0);
}
template <class Source, uint32_t kK, uint32_t kV, class Slot, uint32_t kQuads>
void run_rows(const abi::WriteParams& p, const uint64_t* args) {
  abi::WriteSpec spec{};
  spec.lane_quads = kQuads;
  launch_on_host(cuda::kv_write_rows<Source, kK, kV, Slot, kQuads>, cuda::launch_write, &p, args, 9,
                 spec_key(spec));
}

template <class T>
Tensor tensor_of(const Device& device, DType dtype, const std::vector<float>& values,
                 const Dims& shape) {
  const Tensor tensor = device.tensor(dtype, shape);
  const std::vector<T> rounded(values.begin(), values.end());
  tensor.write_from(std::span<const T>(rounded));
  return tensor;
}

class KvWriteOnHost : public testing::TestWithParam<WriteCase> {
 protected:
  Tensor rows(uint64_t tokens, uint64_t head_dim, KvValues kind, const std::string& seed) const {
    const auto values = kv_values(kind, tokens * kHeads, head_dim, seed);
    const Dims shape = {tokens, kHeads, head_dim};
    if (GetParam().source == DType::f32)
      return tensor_of<float>(cpu_, GetParam().source, values, shape);
    if (GetParam().source == DType::f16)
      return tensor_of<Half>(cpu_, GetParam().source, values, shape);
    return tensor_of<BFloat16>(cpu_, GetParam().source, values, shape);
  }

  void write(const Tensor& k, const Tensor& v, const KvPages& pages, uint64_t slots) const {
    const KvPageParts parts = page_parts(pages);
    abi::WriteParams p{};
    p.tokens = k.shape(0);
    p.heads = kHeads;
    p.streams = 2;
    p.where = abi::kWriteSlots;
    p.pages = {kPages, parts.page_stride, kPageTokens, GetParam().wide ? 8u : 4u};
    const auto stream = [](const Tensor& x, const abi::KvCacheLayout& cache) {
      const uint64_t each = x.dtype() == DType::f32 ? 4 : 2;
      return abi::WriteStream{x.stride(0) * each, x.stride(1) * each, cache, 0, 0, 0};
    };
    p.stream[0] = stream(k, parts.k);
    p.stream[1] = stream(v, parts.v);
    const auto at = [](const Tensor& x) { return x.defined() ? x.address() : 0; };
    const uint64_t args[] = {slots, k.address(), at(parts.k_codes), at(parts.k_scales),
                             0,     v.address(), at(parts.v_codes), at(parts.v_scales),
                             0};
    GetParam().run(p, args);
  }

  // One token to a slot of a cache, on the CPU.
  void write_one(const Tensor& x, uint64_t token, const KvBuffer& to, uint64_t slot) const {
    const Tensor row = x.slice(0, token, 1);
    const KvRange options{.position = slot};
    Encoder encoder(cpu_);
    if (describe(to.shape.format).compressed) {
      KvQuantizeInputs in;
      (to.shape.role == KvRole::k ? in.k : in.v) = row;
      (to.shape.role == KvRole::k ? in.k_cache : in.v_cache) = to;
      kv_quantize(encoder, in, options);
    } else {
      kv_copy(encoder, {.k = row, .k_cache = to.codes.permute({1, 0, 2})}, options);
    }
    encoder.submit().wait();
  }

  static const uint8_t* bytes(const Tensor& x) {
    return reinterpret_cast<const uint8_t*>(x.address());
  }
  // Bytes of every tile in pages are those of the cache.
  static void expect_half(const KvPages& pages, const Tensor& part, uint64_t page_stride,
                          uint64_t head_stride, uint64_t tile_stride, const Tensor& cache,
                          uint64_t cache_head_bytes) {
    constexpr uint64_t kTiles = kPageTokens / abi::kKvTile;
    if (!part.defined()) return;
    for (uint64_t tile = 0; tile < kPages * kTiles; ++tile) {
      for (uint64_t head = 0; head < kHeads; ++head) {
        const uint8_t* const got = bytes(part) + tile / kTiles * page_stride + head * head_stride +
                                   tile % kTiles * tile_stride;
        const uint8_t* const expected = bytes(cache) + head * cache_head_bytes + tile * tile_stride;
        EXPECT_TRUE(std::equal(got, got + tile_stride, expected))
            << name(pages.shape.k) << " tile " << tile << " head " << head;
      }
    }
  }
  static void expect_same(const KvPages& pages, const KvBuffer& k, const KvBuffer& v) {
    const KvPageParts parts = page_parts(pages);
    const auto check = [&](const abi::KvCacheLayout& layout, const Tensor& codes,
                           const Tensor& scales, const KvBuffer& cache) {
      expect_half(pages, codes, parts.page_stride, layout.codes_head_stride,
                  layout.codes_tile_stride, cache.codes, cache.codes.bytes() / kHeads);
      expect_half(pages, scales, parts.page_stride, layout.scales_head_stride,
                  layout.scales_tile_stride, cache.scales,
                  cache.scales.defined() ? cache.scales.bytes() / kHeads : 0);
    };
    check(parts.k, parts.k_codes, parts.k_scales, k);
    check(parts.v, parts.v_codes, parts.v_scales, v);
  }

  void SetUp() override { cuda_host::pdl_wait_joins_block = true; }
  void TearDown() override {
    early_args = 0;
    cuda_host::pdl_wait_joins_block = false;
  }

  Device cpu_ = Device::open("cpu", {.threads = 1});
};

std::vector<std::vector<int64_t>> slot_lists() {
  std::vector<std::vector<int64_t>> lists = {
      {40, 41, 42, 43, 44, 45, 46, 47, 16, 17, 18, 0, 119, 30, -1, 90},
      {19, 20, 7, 5, 6, 5, 120, 1 << 20, -5, 112, 46, 41},
      {64, 65, -1, -1, 66, 1 << 20, 67, 70},
      {71},
      {8, 40, 9, 41, 10, 42, 8, 43, 9, 9},  // tiles of two tokens in turn, slots twice
      {-1, -1}};
  std::mt19937 random(5);
  for (const size_t tokens : {33u, 290u}) {  // more than lanes, more than threads of a block
    std::vector<int64_t>& list = lists.emplace_back(tokens);
    for (int64_t& slot : list) slot = static_cast<int64_t>(random() % 130) - 5;
  }
  return lists;
}

// What the command ahead writes is there at pdl_wait, and not before.
class Arriving {
 public:
  explicit Arriving(std::span<std::byte> memory) : memory_(memory) {
    saved_.assign(memory.begin(), memory.end());
    std::fill(memory.begin(), memory.end(), std::byte{0});
  }
  void arrive() const { std::copy(saved_.begin(), saved_.end(), memory_.begin()); }

 private:
  std::span<std::byte> memory_;
  std::vector<std::byte> saved_;
};
std::span<std::byte> memory_of(const Tensor& x) {
  return {reinterpret_cast<std::byte*>(x.address()), x.bytes()};
}

// Every other list comes late: then nothing may be read early. Otherwise the rows come late.
TEST_P(KvWriteOnHost, LeavesWhatSingleWritesLeave) {
  const WriteCase& c = GetParam();
  const KvPages pages =
      KvPages::allocate(cpu_, {c.k, c.v, kHeads, c.head_dim, c.v_head_dim, kPageTokens}, kPages);
  constexpr uint64_t kSlots = kPages * kPageTokens;
  const KvBuffer k = KvBuffer::allocate(cpu_, {c.k, KvRole::k, kHeads, kSlots, c.head_dim});
  const KvBuffer v = KvBuffer::allocate(cpu_, {c.v, KvRole::v, kHeads, kSlots, c.v_head_dim});
  constexpr KvValues kKinds[] = {KvValues::everyday, KvValues::extreme, KvValues::subnormal};
  uint64_t step = 0;
  for (std::vector<int64_t> slots : slot_lists()) {
    const uint64_t tokens = slots.size();
    const KvValues kind = kKinds[step % 3];
    const Tensor new_k = rows(tokens, c.head_dim, kind, "k" + std::to_string(step));
    const Tensor new_v = rows(tokens, c.v_head_dim, kind, "v" + std::to_string(step));
    for (uint64_t t = 0; t < tokens; ++t) {
      if (slots[t] < 0 || static_cast<uint64_t>(slots[t]) >= kSlots) continue;
      write_one(new_k, t, k, static_cast<uint64_t>(slots[t]));
      write_one(new_v, t, v, static_cast<uint64_t>(slots[t]));
    }
    std::vector<int32_t> narrow(slots.begin(), slots.end());
    const bool late_list = step++ % 2 == 0;
    early_args = late_list ? 0 : ~0u;
    std::vector<Arriving> arriving;
    if (late_list) {
      arriving.emplace_back(c.wide ? std::as_writable_bytes(std::span(slots))
                                   : std::as_writable_bytes(std::span(narrow)));
    } else {
      arriving.emplace_back(memory_of(new_k)), arriving.emplace_back(memory_of(new_v));
    }
    cuda_host::at_first_pdl_wait = [&] {
      for (const Arriving& part : arriving) part.arrive();
    };
    write(new_k, new_v, pages,
          c.wide ? reinterpret_cast<uint64_t>(slots.data())
                 : reinterpret_cast<uint64_t>(narrow.data()));
    expect_same(pages, k, v);
  }
}

template <class Source, uint32_t kK, uint32_t kV, bool kWide>
WriteCase tiles(uint64_t head_dim, uint64_t v_head_dim) {
  using Slot = std::conditional_t<kWide, int64_t, int32_t>;
  return {dtype_of<Source>(),
          static_cast<KvFormat>(kK),
          static_cast<KvFormat>(kV),
          head_dim,
          v_head_dim,
          kWide,
          run_tiles<Source, kK, kV, Slot>};
}
template <class Source, uint32_t kK, uint32_t kV, bool kWide, uint32_t kQuads>
WriteCase few(uint64_t head_dim, uint64_t v_head_dim) {
  using Slot = std::conditional_t<kWide, int64_t, int32_t>;
  return {dtype_of<Source>(),
          static_cast<KvFormat>(kK),
          static_cast<KvFormat>(kV),
          head_dim,
          v_head_dim,
          kWide,
          run_rows<Source, kK, kV, Slot, kQuads>};
}

constexpr uint32_t kF32 = 0, kF16 = 1, kBf16 = 2, kTq2 = 16, kTq3 = 17, kTq4 = 18, kTq5 = 19,
                   kTq6 = 20, kTq8 = 21, kMlxNative4 = 32;
using cuda::BFloat16;
using cuda::Half;

INSTANTIATE_TEST_SUITE_P(Many, KvWriteOnHost,
                         testing::Values(tiles<float, kTq8, kTq4, false>(128, 128),
                                         tiles<float, kTq8, kTq4, false>(80, 24),
                                         tiles<Half, kTq4, kTq4, true>(256, 128),
                                         tiles<BFloat16, kTq5, kTq3, true>(96, 576),
                                         tiles<Half, kF16, kTq6, true>(64, 128),
                                         tiles<float, kBf16, kF32, true>(24, 40),
                                         tiles<Half, kMlxNative4, kTq2, true>(64, 40)));

// Every format in either role, one and several scale blocks, rows that end inside a group.
INSTANTIATE_TEST_SUITE_P(
    Few, KvWriteOnHost,
    testing::Values(
        few<Half, kTq4, kTq4, true, 1>(128, 128), few<Half, kTq4, kTq4, true, 1>(64, 16),
        few<Half, kTq4, kTq4, true, 1>(80, 96), few<Half, kTq4, kTq4, true, 1>(112, 104),
        few<float, kTq8, kTq4, false, 1>(128, 40), few<float, kTq8, kTq4, false, 1>(72, 120),
        few<BFloat16, kTq5, kTq3, true, 1>(96, 24), few<BFloat16, kTq5, kTq3, true, 1>(88, 128),
        few<Half, kTq2, kTq6, true, 1>(40, 112), few<Half, kTq6, kTq2, false, 1>(104, 80),
        few<float, kTq3, kTq5, true, 1>(128, 88), few<float, kTq3, kTq8, true, 1>(112, 128),
        few<Half, kTq4, kTq4, true, 2>(256, 192), few<Half, kTq4, kTq4, true, 2>(160, 256),
        few<BFloat16, kTq8, kTq3, false, 2>(256, 200), few<float, kTq6, kTq5, true, 2>(248, 136),
        few<float, kTq3, kTq2, true, 2>(192, 256), few<Half, kTq4, kTq4, true, 4>(512, 512),
        few<Half, kTq4, kTq4, true, 4>(320, 448), few<BFloat16, kTq5, kTq6, true, 4>(504, 384),
        few<float, kTq2, kTq8, false, 4>(392, 512), few<Half, kF16, kBf16, true, 1>(128, 24),
        few<float, kF16, kF32, false, 2>(256, 136), few<BFloat16, kBf16, kTq4, true, 4>(512, 64)));

TEST(KvPageCopyOnHost, CopiesPagesThatAreThere) {
  constexpr uint64_t kBytes = 80 << 10, kStride = kBytes + 32, kCount = 6;
  std::vector<uint8_t> pages(kCount * kStride);
  std::mt19937 random(1);
  for (uint8_t& x : pages) x = static_cast<uint8_t>(random());
  std::vector<uint8_t> expected = pages;
  const std::vector<int32_t> from = {4, 0, -1, 1, 6, 2}, to = {1, 3, 2, -7, 5, 1 << 30};
  for (const auto& [a, b] : {std::pair{4, 1}, {0, 3}})
    std::copy_n(&pages[a * kStride], kBytes, &expected[b * kStride]);
  const abi::KvPageCopyParams p{from.size(), kCount, kStride, kBytes};
  const uint64_t args[] = {reinterpret_cast<uint64_t>(pages.data()),
                           reinterpret_cast<uint64_t>(from.data()),
                           reinterpret_cast<uint64_t>(to.data())};
  launch_on_host(cuda::kv_page_copy, cuda::launch_kv_page_copy, &p, args, 3, 0);
  EXPECT_TRUE(pages == expected);
}

}  // namespace
}  // namespace gyre::test
