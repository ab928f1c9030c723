// kv_write's and kv_page_copy's CUDA text on the host: a list of slots leaves the bytes that
// kv_quantize and kv_copy, token by token, leave in a cache of as many slots.
#include <gtest/gtest.h>

#include <random>

#include "cuda/kernels.h"
#include "cuda_host/host_device.h"
#include "kv_codec/kv_codec_case.h"
#include "ops/kv_pages.h"
// After cuda_host.h
#include "cuda/kernels/kv_write.cu"

namespace gyre::test {
namespace {

constexpr uint64_t kHeads = 3, kPages = 5, kPageTokens = 24;

struct WriteCase {
  DType source;
  KvFormat k, v;
  uint64_t head_dim, v_head_dim;
  void (*run)(const abi::KvWriteParams& p, const uint64_t* args);
};

template <class Source, uint32_t kK, uint32_t kV, class Slot>
void run_write(const abi::KvWriteParams& p, const uint64_t* args) {
  launch_on_host(cuda::kv_write<Source, kK, kV, Slot>, cuda::launch_kv_write, &p, args, 7, 0);
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
  Tensor rows(uint64_t tokens, uint64_t head_dim, const std::string& seed) const {
    const auto values = kv_values(KvValues::everyday, tokens * kHeads, head_dim, seed);
    const Dims shape = {tokens, kHeads, head_dim};
    if (GetParam().source == DType::f32)
      return tensor_of<float>(cpu_, GetParam().source, values, shape);
    if (GetParam().source == DType::f16)
      return tensor_of<Half>(cpu_, GetParam().source, values, shape);
    return tensor_of<BFloat16>(cpu_, GetParam().source, values, shape);
  }

  void write(const Tensor& k, const Tensor& v, const KvPages& pages, uint64_t slots) const {
    const KvPageParts parts = page_parts(pages);
    abi::KvWriteParams p{};
    p.tokens = k.shape(0);
    p.heads = kHeads;
    p.pages = kPages;
    p.page_stride = parts.page_stride;
    p.page_tokens = kPageTokens;
    const auto stream = [](const Tensor& x, const abi::KvCacheLayout& cache) {
      const uint64_t each = x.dtype() == DType::f32 ? 4 : 2;
      return abi::KvQuantizeStream{x.stride(0) * each, x.stride(1) * each, cache};
    };
    p.stream[0] = stream(k, parts.k);
    p.stream[1] = stream(v, parts.v);
    const auto at = [](const Tensor& x) { return x.defined() ? x.address() : 0; };
    const uint64_t args[] = {k.address(), at(parts.k_codes), at(parts.k_scales),
                             v.address(), at(parts.v_codes), at(parts.v_scales),
                             slots};
    GetParam().run(p, args);
  }

  // One token to a slot of a cache, on the CPU.
  void write_one(const Tensor& x, uint64_t token, const KvBuffer& to, uint64_t slot) const {
    const Tensor row = x.slice(0, token, 1);
    const KvWriteOptions options{.position = slot};
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

  Device cpu_ = Device::open("cpu", {.threads = 1});
};

// Whole tiles, parts of them in any order, second chunks, a slot twice, and slots that are none.
TEST_P(KvWriteOnHost, LeavesWhatSingleWritesLeave) {
  const WriteCase& c = GetParam();
  const KvPages pages =
      KvPages::allocate(cpu_, {c.k, c.v, kHeads, c.head_dim, c.v_head_dim, kPageTokens}, kPages);
  constexpr uint64_t kSlots = kPages * kPageTokens;
  const KvBuffer k = KvBuffer::allocate(cpu_, {c.k, KvRole::k, kHeads, kSlots, c.head_dim});
  const KvBuffer v = KvBuffer::allocate(cpu_, {c.v, KvRole::v, kHeads, kSlots, c.v_head_dim});
  const std::vector<std::vector<int64_t>> lists = {
      {40, 41, 42, 43, 44, 45, 46, 47, 16, 17, 18, 0, 119, 30, -1, 90},
      {19, 20, 7, 5, 6, 5, 120, 1 << 20, -5, 112, 46, 41},
      {64, 65, -1, -1, 66, 1 << 20, 67, 70},  // skipped tokens do not part a tile
      {-1, -1}};
  for (uint64_t step = 0; step < lists.size(); ++step) {
    const std::vector<int64_t>& slots = lists[step];
    const uint64_t tokens = slots.size();
    const Tensor new_k = rows(tokens, c.head_dim, "k" + std::to_string(step));
    const Tensor new_v = rows(tokens, c.v_head_dim, "v" + std::to_string(step));
    const std::vector<int32_t> narrow(slots.begin(), slots.end());
    const bool wide = c.k != KvFormat::tq8;  // see the instances
    write(new_k, new_v, pages,
          wide ? reinterpret_cast<uint64_t>(slots.data())
               : reinterpret_cast<uint64_t>(narrow.data()));
    for (uint64_t t = 0; t < tokens; ++t) {
      if (slots[t] < 0 || static_cast<uint64_t>(slots[t]) >= kSlots) continue;
      write_one(new_k, t, k, static_cast<uint64_t>(slots[t]));
      write_one(new_v, t, v, static_cast<uint64_t>(slots[t]));
    }
    expect_same(pages, k, v);
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, KvWriteOnHost,
                         testing::Values(WriteCase{DType::f32, KvFormat::tq8, KvFormat::tq4, 128,
                                                   128, run_write<float, 21, 18, int32_t>},
                                         WriteCase{DType::f32, KvFormat::tq8, KvFormat::tq4, 80, 24,
                                                   run_write<float, 21, 18, int32_t>},
                                         WriteCase{DType::f16, KvFormat::tq4, KvFormat::tq4, 256,
                                                   128, run_write<cuda::Half, 18, 18, int64_t>},
                                         WriteCase{DType::bf16, KvFormat::tq5, KvFormat::tq3, 96,
                                                   576, run_write<cuda::BFloat16, 19, 17, int64_t>},
                                         WriteCase{DType::f16, KvFormat::f16, KvFormat::tq6, 64,
                                                   128, run_write<cuda::Half, 1, 20, int64_t>},
                                         WriteCase{DType::f32, KvFormat::bf16, KvFormat::f32, 24,
                                                   40, run_write<float, 2, 0, int64_t>},
                                         WriteCase{DType::f16, KvFormat::compat4, KvFormat::tq2, 64,
                                                   40, run_write<cuda::Half, 32, 16, int64_t>}));

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
