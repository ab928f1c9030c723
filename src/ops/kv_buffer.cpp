#include <array>
#include <cmath>

#include "abi/kv_codec.h"
#include "gyre/format.h"
#include "ops/kv_layout.h"
#include "runtime/layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr KvFormatInfo native(KvFormat format, std::string_view name) {
  return {format,
          name,
          abi::kv_bits(static_cast<uint32_t>(format)),
          true,
          KvPacking::planes,
          KvScaleKind::u8e8,
          abi::kKvScaleBlock,
          abi::kKvTile,
          kKvSignsVersion};
}
constexpr KvFormatInfo mlx_native(KvFormat format, std::string_view name, uint32_t bits) {
  const KvPacking packing = bits == 4 ? KvPacking::nibbles : KvPacking::bytes;
  return {format, name, bits, true, packing, KvScaleKind::f32_norm, abi::kKvScaleBlock, 1, 0};
}
constexpr KvFormatInfo dense(KvFormat format, std::string_view name, uint32_t bits) {
  return {format, name, bits, false, KvPacking::dense, KvScaleKind::none, 0, 1, 0};
}

static_assert(kKvSignsVersion == abi::kKvSignsVersion);

constexpr auto kFormats = std::to_array<KvFormatInfo>({
    dense(KvFormat::f32, "f32", 32),
    dense(KvFormat::f16, "f16", 16),
    dense(KvFormat::bf16, "bf16", 16),
    native(KvFormat::tq2, "tq2"),
    native(KvFormat::tq3, "tq3"),
    native(KvFormat::tq4, "tq4"),
    native(KvFormat::tq5, "tq5"),
    native(KvFormat::tq6, "tq6"),
    native(KvFormat::tq8, "tq8"),
    mlx_native(KvFormat::mlx_native4, "mlx_native4", 4),
    mlx_native(KvFormat::mlx_native5, "mlx_native5", 8),
    mlx_native(KvFormat::mlx_native6, "mlx_native6", 8),
    mlx_native(KvFormat::mlx_native8, "mlx_native8", 8),
});

uint64_t tiles_of(const KvShape& shape) {
  return (shape.capacity + abi::kKvTile - 1) / abi::kKvTile;
}

DType dense_dtype(KvFormat format) {
  return format == KvFormat::f32 ? DType::f32
                                 : (format == KvFormat::f16 ? DType::f16 : DType::bf16);
}

}  // namespace

KvFormatInfo describe(KvFormat format) {
  for (const KvFormatInfo& info : kFormats) {
    if (info.format == format) return info;
  }
  fail(ErrorCode::invalid_argument, "kv_format: ", static_cast<uint32_t>(format),
       " is not a format");
}

std::string_view name(KvFormat format) { return describe(format).name; }

std::span<const KvFormat> kv_formats() {
  static const auto kAll = [] {
    std::array<KvFormat, kFormats.size()> all{};
    for (size_t i = 0; i < all.size(); ++i) all[i] = kFormats[i].format;
    return all;
  }();
  return kAll;
}

KvFormat kv_format(std::string_view name) {
  std::string known;
  for (const KvFormatInfo& info : kFormats) {
    if (info.name == name) return info.format;
    known += (known.empty() ? "" : ", ") + std::string(info.name);
  }
  fail(ErrorCode::invalid_argument, "kv_format: no format is called \"", name, "\"; known are ",
       known);
}

void check_kv_shape(const char* op, const KvShape& shape) {
  const KvFormatInfo info = describe(shape.format);
  require(shape.role == KvRole::k || shape.role == KvRole::v, op, ": ",
          static_cast<uint32_t>(shape.role), " is not a role");
  // Far from overflow: (2^40 slots + 7) * 2^16 heads * 2^10 coordinates * 4 bytes would be 2^68, so
  // both are bounded.
  require(shape.capacity <= uint64_t{1} << 36, op, ": capacity must be at most 2^36 slots, got ",
          shape.capacity);
  require(shape.kv_heads <= uint64_t{1} << 14, op, ": kv_heads must be at most 2^14, got ",
          shape.kv_heads);
  require(shape.head_dim <= abi::kKvMaxHeadDim, op, ": head_dim must be at most ",
          abi::kKvMaxHeadDim, ", got ", shape.head_dim);
  if (is_native(shape.format)) {
    require(shape.head_dim >= 16 && shape.head_dim % 8 == 0, op, ": ", info.name,
            " stores head dims from 16 in steps of 8, got ", shape.head_dim);
    require(shape.signs_version == info.signs_version, op, ": ", info.name,
            " has signs of version ", info.signs_version, ", got ", shape.signs_version);
  } else if (info.compressed) {
    const bool power_of_two = shape.head_dim != 0 && (shape.head_dim & (shape.head_dim - 1)) == 0;
    const bool four = shape.format == KvFormat::mlx_native4;
    require(power_of_two && shape.head_dim >= (four ? 4 : 256) &&
                shape.head_dim <= (four ? abi::kKvMaxHeadDim : 512),
            op, ": ", info.name,
            four ? " stores powers of two from 4 to 1024, got " : " stores 256 and 512, got ",
            shape.head_dim);
  }
  require(std::isfinite(shape.scale_factor) && shape.scale_factor > 0, op,
          ": scale_factor must be positive and finite, got ", shape.scale_factor);
  require(shape.scale_factor == 1 || (is_mlx_native(shape.format) && shape.head_dim == 512), op,
          ": a scale_factor is for the mlx-native formats at head_dim 512, got ",
          shape.scale_factor, " for ", info.name, " at ", shape.head_dim);
}

Dims kv_codes_shape(const KvShape& shape) {
  check_kv_shape("kv_codes_shape", shape);
  const KvFormatInfo info = describe(shape.format);
  if (!info.compressed) return {shape.kv_heads, shape.capacity, shape.head_dim};
  if (!is_native(shape.format))
    return {shape.kv_heads, shape.capacity, shape.head_dim * info.bits / 8};
  const uint64_t tile_bytes = shape.head_dim * info.bits;  // 8 tokens
  if (shape.role == KvRole::v) return {shape.kv_heads, tiles_of(shape), tile_bytes};
  return {shape.kv_heads, tiles_of(shape) * abi::kKvTile, tile_bytes / abi::kKvTile};
}

Dims kv_scales_shape(const KvShape& shape) {
  check_kv_shape("kv_scales_shape", shape);
  const KvFormatInfo info = describe(shape.format);
  if (!info.compressed) return {0};
  if (!is_native(shape.format))
    return {shape.kv_heads, shape.capacity, abi::kv_mlx_native_norms(shape.head_dim)};
  const uint64_t scales = abi::kv_scale_blocks(static_cast<uint32_t>(shape.head_dim)).count;
  return {shape.kv_heads, tiles_of(shape), scales, uint64_t{2} * abi::kKvTile};
}

KvBuffer KvBuffer::allocate(const Device& device, const KvShape& shape) try {
  check_kv_shape("kv_buffer", shape);
  const KvFormatInfo info = describe(shape.format);
  KvBuffer buffer{shape, {}, {}};
  buffer.codes =
      device.tensor(info.compressed ? DType::u8 : dense_dtype(shape.format), kv_codes_shape(shape));
  if (info.compressed) {
    buffer.scales =
        device.tensor(is_native(shape.format) ? DType::u8 : DType::f32, kv_scales_shape(shape));
  }
  return buffer;
} catch (const std::bad_alloc&) {
  out_of_memory("kv_buffer.allocate");
}

namespace {

// Any strides that keep a head's coordinates together: token-major and head-major caches.
void check_dense(const char* op, const char* what, const KvBuffer& buffer) {
  const DType dtype = dense_dtype(buffer.shape.format);
  const Dims shape = kv_codes_shape(buffer.shape);
  require(buffer.codes.defined(), op, ": ", what, " has no memory");
  require(buffer.codes.dtype() == dtype && buffer.codes.shape() == shape, op, ": ", what,
          " must be ", dtype, " ", shape, ", got ", buffer.codes.dtype(), " ",
          buffer.codes.shape());
  require(buffer.codes.stride(2) == 1, op, ": head_dim of ", what,
          " must be contiguous, got stride ", buffer.codes.stride(2));
  require(!buffer.scales.defined(), op, ": ", what, " is ", name(buffer.shape.format),
          " and has no scales");
}

}  // namespace

void check_kv_rows(const char* op, const char* what, const Tensor& rows, const KvShape& shape) {
  require(rows.defined(), op, ": ", what, " is undefined");
  require(rows.rank() == 3, op, ": ", what, " must be [tokens, kv_heads, head_dim], got shape ",
          rows.shape());
  require(is_float(rows.dtype()), op, ": ", what, " must be f32, f16 or bf16, got ", rows.dtype());
  require(rows.shape(1) == shape.kv_heads, op, ": ", what, " must have the cache's kv_heads ",
          shape.kv_heads, ", got ", rows.shape(1));
  require(rows.shape(2) == shape.head_dim, op, ": ", what, " must have the cache's head_dim ",
          shape.head_dim, ", got ", rows.shape(2));
  require(rows.stride(2) == 1, op, ": head_dim of ", what, " must be contiguous, got stride ",
          rows.stride(2));
}

void check_compressed(const char* op, const char* what, const KvBuffer& buffer) {
  require(describe(buffer.shape.format).compressed, op, ": ", what, " must be compressed, got ",
          name(buffer.shape.format), "; kv_copy writes dense caches");
}

void check_kv_buffer(const char* op, const char* what, const KvBuffer& buffer) {
  check_kv_shape(op, buffer.shape);
  if (!describe(buffer.shape.format).compressed) return check_dense(op, what, buffer);
  const DType scale_dtype = is_native(buffer.shape.format) ? DType::u8 : DType::f32;
  require(buffer.codes.defined() && buffer.scales.defined(), op, ": ", what, " has no memory");
  require(buffer.codes.dtype() == DType::u8 &&
              buffer.codes.shape() == kv_codes_shape(buffer.shape) && buffer.codes.is_contiguous(),
          op, ": codes of ", what, " must be contiguous u8 ", kv_codes_shape(buffer.shape),
          ", got ", buffer.codes.dtype(), " ", buffer.codes.shape());
  require(
      buffer.scales.dtype() == scale_dtype &&
          buffer.scales.shape() == kv_scales_shape(buffer.shape) && buffer.scales.is_contiguous(),
      op, ": scales of ", what, " must be contiguous ", scale_dtype, " ",
      kv_scales_shape(buffer.shape), ", got ", buffer.scales.dtype(), " ", buffer.scales.shape());
}

abi::KvCacheLayout kv_cache_layout(const KvBuffer& buffer) {
  const KvShape& shape = buffer.shape;
  abi::KvCacheLayout layout{};
  layout.format = static_cast<uint32_t>(shape.format);
  layout.role = static_cast<uint32_t>(shape.role);
  layout.head_dim = static_cast<uint32_t>(shape.head_dim);
  layout.scale_factor = shape.scale_factor;
  const uint64_t unit = size_bytes(buffer.codes.dtype());
  const bool rows = shape.role == KvRole::k || !is_native(shape.format);
  // Compressed memory is contiguous, but a tensor's stride means nothing where there is one entry,
  // and kernels take a tile's stride as its size.
  const bool compressed = buffer.scales.defined();
  const Dims codes = compressed ? contiguous_strides(buffer.codes.shape()) : buffer.codes.strides();
  layout.codes_head_stride = codes[0] * unit;
  layout.codes_tile_stride = codes[1] * unit * (rows ? abi::kKvTile : 1);
  if (!compressed) return layout;
  const Dims scales = contiguous_strides(buffer.scales.shape());
  layout.scales_head_stride = scales[0] * size_bytes(buffer.scales.dtype());
  layout.scales_tile_stride =
      is_native(shape.format) ? scales[1] : scales[1] * abi::kKvTile * sizeof(float);
  return layout;
}

}  // namespace gyre
