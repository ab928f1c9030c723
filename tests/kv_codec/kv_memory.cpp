#include "kv_codec/kv_memory.h"

#include <algorithm>
#include <bit>

#include "kv_codec/kv_mlx_native_reference.h"
#include "numbers.h"

namespace gyre::test {
namespace {

using reference::KvSide;

KvSide side_of(const KvShape& shape, KvLayout layout) {
  const uint64_t stream = shape.role == KvRole::v ? 1 : 0;
  return {kv_dtype(shape.format), layout, shape.capacity, shape.kv_heads, shape.head_dim, stream};
}

std::vector<double> write_dense(const KvSide& side, const KvRowPlace& at,
                                const std::vector<float>& row, const KvBytes& memory) {
  reference::store_row(side, memory.codes, at.slot, at.head, row);
  return reference::load_row<double>(side, memory.codes, at.slot, at.head);
}

std::vector<double> write_native(const KvShape& shape, const KvRowPlace& at,
                                 const std::vector<float>& row, const KvBytes& memory) {
  const reference::KvPlaces places = places_of(shape);
  const reference::KvCodes encoded = reference::kv_feedback(places.coder, row);
  reference::kv_store(places, at.slot, encoded, memory.codes.data() + at.head * places.head_bytes(),
                      memory.scales.data() + at.head * places.scale_head_bytes());
  return reference::kv_restored(reference::kv_rotated(places.coder, encoded));
}

const std::vector<double>& codebook_of(KvFormat format) {
  static const std::vector<double> kBooks[] = {
      reference::mlx_native_codebook(4), reference::mlx_native_codebook(5),
      reference::mlx_native_codebook(6), reference::mlx_native_codebook(8)};
  const auto bits = static_cast<size_t>(name(format).back() - '0');
  return kBooks[bits == 8 ? 3 : bits - 4];
}

std::vector<double> write_mlx_native(const KvShape& shape, const KvRowPlace& at,
                                     const std::vector<float>& row, const KvBytes& memory) {
  const std::vector<float> norms = reference::mlx_native_norms(row);
  const std::vector<double>& book = codebook_of(shape.format);
  const std::vector<uint32_t> codes =
      reference::mlx_native_codes(row, norms, book, shape.scale_factor);
  const uint64_t place = at.head * shape.capacity + at.slot;
  const uint64_t packed = describe(shape.format).packing == KvPacking::nibbles ? 2 : 1;
  for (uint64_t j = 0; j < row.size(); ++j) {
    std::byte& byte = memory.codes[place * row.size() / packed + j / packed];
    if (packed == 2 && j % 2 == 1) {
      byte = (byte & std::byte{15}) | static_cast<std::byte>(codes[j] << 4);
    } else {
      byte = static_cast<std::byte>(codes[j]);
    }
  }
  for (uint64_t i = 0; i < norms.size(); ++i) {
    reference::store_value(DType::f32, memory.scales.data(), place * norms.size() + i, norms[i]);
  }
  return reference::mlx_native_restored(codes, norms, book, shape.scale_factor);
}

}  // namespace

std::vector<double> write_kv_row(const KvShape& shape, KvLayout layout, const KvRowPlace& at,
                                 const std::vector<float>& row, const KvBytes& bytes) {
  switch (class_of(shape.format)) {
    case FormatClass::levels:
      return write_native(shape, at, row, bytes);
    case FormatClass::mlx_native:
      return write_mlx_native(shape, at, row, bytes);
    default:
      return write_dense(side_of(shape, layout), at, row, bytes);
  }
}

DType kv_dtype(KvFormat format) {
  if (format == KvFormat::f16) return DType::f16;
  return format == KvFormat::bf16 ? DType::bf16 : DType::f32;
}

KvMemory kv_memory(const KvShape& shape, KvLayout layout) {
  KvMemory memory;
  memory.codes.dtype = memory.scales.dtype = DType::u8;
  if (!describe(shape.format).compressed) {
    const KvSide side = side_of(shape, layout);
    memory.codes.dtype = side.dtype;
    memory.codes.before.resize(side.elements() * size_bytes(side.dtype));
  } else {
    if (class_of(shape.format) == FormatClass::mlx_native) memory.scales.dtype = DType::f32;
    memory.codes.before.resize(elements_of(kv_codes_shape(shape)));
    memory.scales.before.resize(elements_of(kv_scales_shape(shape)) *
                                size_bytes(memory.scales.dtype));
  }
  memory.codes.after = memory.codes.before;
  memory.scales.after = memory.scales.before;
  return memory;
}

KvMemory kv_memory(const KvShape& shape, KvLayout layout,
                   const std::function<std::vector<float>(uint64_t slot)>& row_of) {
  KvMemory memory = kv_memory(shape, layout);
  memory.codes.before = pattern_bytes(memory.codes.before.size(), 5);
  memory.scales.before = pattern_bytes(memory.scales.before.size(), 6);
  for (uint64_t slot = 0; slot < shape.capacity; ++slot) {
    for (uint64_t head = 0; head < shape.kv_heads; ++head) {
      const auto values = write_kv_row(shape, layout, {slot, head}, row_of(slot),
                                       {memory.codes.before, memory.scales.before});
      memory.values.insert(memory.values.end(), values.begin(), values.end());
    }
  }
  memory.codes.after = memory.codes.before;
  memory.scales.after = memory.scales.before;
  return memory;
}

void expect_kv_row(const KvShape& shape, KvLayout layout, const KvRowPlace& at,
                   const std::vector<float>& row, KvMemory& memory) {
  write_kv_row(shape, layout, at, row, {memory.codes.after, memory.scales.after});
}

bool has_codes(const KvShape& shape, const std::vector<float>& row) {
  if (class_of(shape.format) != FormatClass::mlx_native) return true;
  const std::vector<double>& book = codebook_of(shape.format);
  const reference::MlxNativeRow found = reference::mlx_native_normalize(row, shape.scale_factor);
  return std::none_of(found.normalized.begin(), found.normalized.end(),
                      [&](double value) { return reference::mlx_native_index(book, value).near; });
}

std::vector<float> normal_row(const KvShape& shape, DType dtype, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> row(shape.head_dim);
  do {
    for (float& x : row) x = reference::rounded(dtype, normal(random));
  } while (!has_codes(shape, row));
  return row;
}

KvBuffer kv_buffer(const KvShape& shape, KvLayout layout, const Tensor& codes,
                   const Tensor& scales) {
  if (!describe(shape.format).compressed)
    return {shape, kv_view(codes, side_of(shape, layout)).permute({1, 0, 2}), {}};
  return {shape, codes.reshape(kv_codes_shape(shape)), scales.reshape(kv_scales_shape(shape))};
}

}  // namespace gyre::test
