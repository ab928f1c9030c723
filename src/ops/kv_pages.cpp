#include "ops/kv_pages.h"

#include "abi/kv_codec.h"
#include "ops/attention_latent.h"
#include "ops/kv_layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr uint64_t kMaxPageTokens = 1024;
constexpr uint64_t kAlignment = 16;  // of a page and of each of its parts

constexpr uint64_t align(uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Bytes of 8 tokens of one head.
struct TileBytes {
  uint64_t codes, scales;
};

TileBytes tile_bytes(KvFormat format, uint64_t head_dim) {
  const KvFormatInfo info = describe(format);
  const uint64_t codes = head_dim * info.bits;  // 8 tokens, 8 bits
  switch (info.scale) {
    case KvScaleKind::none:
      return {codes, 0};
    case KvScaleKind::u8e8:
      return {codes, abi::kv_scale_blocks(static_cast<uint32_t>(head_dim)).count *
                         sizeof(uint16_t) * abi::kKvTile};
    case KvScaleKind::f32_norm:
      return {codes, abi::kv_mlx_native_norms(head_dim) * sizeof(float) * abi::kKvTile};
  }
  return {};
}

// Offsets in the bytes of one head, and how many there are.
struct HeadParts {
  TileBytes k, v;
  uint64_t v_codes, k_scales, v_scales, bytes;
};

uint64_t value_dim(const KvPageShape& shape) {
  return shape.v_head_dim != 0 ? shape.v_head_dim : shape.head_dim;
}

HeadParts head_parts(const KvPageShape& shape) {
  HeadParts parts{};
  parts.k = tile_bytes(shape.k, shape.head_dim);
  parts.v = tile_bytes(shape.v, value_dim(shape));
  const uint64_t tiles = shape.page_tokens / abi::kKvTile;
  parts.v_codes = align(tiles * parts.k.codes);
  parts.k_scales = parts.v_codes + align(tiles * parts.v.codes);
  parts.v_scales = parts.k_scales + align(tiles * parts.k.scales);
  parts.bytes = parts.v_scales + align(tiles * parts.v.scales);
  return parts;
}

abi::KvCacheLayout layout_of(KvFormat format, KvRole role, uint64_t head_dim, const TileBytes& tile,
                             uint64_t head_bytes) {
  abi::KvCacheLayout layout{};
  layout.format = static_cast<uint32_t>(format);
  layout.role = static_cast<uint32_t>(role);
  layout.head_dim = static_cast<uint32_t>(head_dim);
  layout.scale_factor = 1;
  layout.codes_head_stride = head_bytes;
  layout.codes_tile_stride = tile.codes;
  layout.scales_head_stride = tile.scales != 0 ? head_bytes : 0;
  layout.scales_tile_stride = tile.scales;
  return layout;
}

}  // namespace

void check_page_shape(const char* op, const KvPageShape& shape) {
  require(shape.page_tokens != 0 && shape.page_tokens % abi::kKvTile == 0 &&
              shape.page_tokens <= kMaxPageTokens,
          op, ": page_tokens must be a multiple of ", abi::kKvTile, " from ", abi::kKvTile, " to ",
          kMaxPageTokens, ", got ", shape.page_tokens);
  require(shape.kv_heads != 0, op, ": kv_heads must be given");
  const auto check = [&](KvFormat format, KvRole role, uint64_t head_dim) {
    check_kv_shape(
        op, {format, role, shape.kv_heads, shape.page_tokens, head_dim, shape.signs_version});
    require(head_dim >= 16 && head_dim % 8 == 0, op,
            ": head dims must be multiples of 8 from 16, got ", head_dim);
  };
  check(shape.k, KvRole::k, shape.head_dim);
  check(shape.v, KvRole::v, value_dim(shape));
  if (shape.latent)
    check_latent_shape(op, {shape.k, shape.v, shape.kv_heads, shape.head_dim, value_dim(shape)});
}

uint64_t kv_page_bytes(const KvPageShape& shape) {
  check_page_shape("kv_page_bytes", shape);
  return shape.kv_heads * head_parts(shape).bytes;
}

KvPages KvPages::allocate(const Device& device, const KvPageShape& shape, uint64_t pages) try {
  check_page_shape("kv_pages", shape);
  require(pages <= uint64_t{1} << 31, "kv_pages: at most 2^31 pages, got ", pages);
  return {shape, device.tensor(DType::u8, {pages, kv_page_bytes(shape)})};
} catch (const std::bad_alloc&) {
  out_of_memory("kv_pages.allocate");
}

void check_pages(const char* op, const KvPages& pages) {
  check_page_shape(op, pages.shape);
  const Tensor& bytes = pages.bytes;
  require(bytes.defined(), op, ": pages have no memory");
  const uint64_t each = kv_page_bytes(pages.shape);
  require(bytes.dtype() == DType::u8 && bytes.rank() == 2 && bytes.shape(1) == each, op,
          ": pages must be u8 [pages, ", each, "], got ", bytes.dtype(), " ", bytes.shape());
  require(bytes.shape(0) != 0 && bytes.shape(0) <= uint64_t{1} << 31, op,
          ": from 1 to 2^31 pages, got ", bytes.shape(0));
  require(bytes.stride(1) == 1 && (bytes.shape(0) == 1 || bytes.stride(0) % kAlignment == 0) &&
              bytes.is_injective(),
          op, ": pages must be contiguous, apart and a multiple of ", kAlignment,
          " bytes from one to the next, got strides ", bytes.strides());
  require(bytes.address() % kAlignment == 0, op, ": pages must begin at a multiple of ", kAlignment,
          " bytes");
}

KvPageParts page_parts(const KvPages& pages) {
  const HeadParts head = head_parts(pages.shape);
  const uint64_t count = pages.bytes.shape(0);
  KvPageParts parts;
  parts.page_stride = count == 1 ? pages.bytes.shape(1) : pages.bytes.stride(0);
  const auto from = [&](uint64_t offset) {
    return pages.bytes.slice(1, offset, pages.bytes.shape(1) - offset);
  };
  parts.k_codes = from(0);
  parts.v_codes = from(head.v_codes);
  if (head.k.scales != 0) parts.k_scales = from(head.k_scales);
  if (head.v.scales != 0) parts.v_scales = from(head.v_scales);
  parts.k = layout_of(pages.shape.k, KvRole::k, pages.shape.head_dim, head.k, head.bytes);
  parts.v = layout_of(pages.shape.v, KvRole::v, value_dim(pages.shape), head.v, head.bytes);
  return parts;
}

}  // namespace gyre
