#include "kv_codec/kv_memory.h"

#include <bit>

#include "kv_codec/kv_compat_reference.h"

namespace gyre::test {
namespace {

using reference::KvSide;

KvSide side_of(const KvShape& shape, KvLayout layout) {
  const uint64_t stream = shape.role == KvRole::v ? 1 : 0;
  return {kv_dtype(shape.format), layout, shape.capacity, shape.kv_heads, shape.head_dim, stream};
}

bool is_native(KvFormat format) { return describe(format).scale == KvScaleKind::u8e8; }

template <class Write>
void for_each_row(const KvShape& shape, const std::function<std::vector<float>(uint64_t)>& row_of,
                  const Write& write) {
  for (uint64_t slot = 0; slot < shape.capacity; ++slot) {
    for (uint64_t head = 0; head < shape.kv_heads; ++head) write(slot, head, row_of(slot));
  }
}

void fill_dense(const KvSide& side, uint64_t slot, uint64_t head, const std::vector<float>& row,
                KvMemory& memory) {
  for (uint64_t e = 0; e < row.size(); ++e) {
    const uint32_t bits =
        reference::convert(DType::f32, side.dtype, std::bit_cast<uint32_t>(row[e]));
    const uint64_t at = side.index(slot, head, e);
    reference::store_bits(side.dtype, memory.codes.before.data(), at, bits);
    memory.values.push_back(reference::load_value(side.dtype, memory.codes.before.data(), at));
  }
}

void fill_native(const reference::KvPlaces& places, uint64_t slot, uint64_t head,
                 const std::vector<float>& row, KvMemory& memory) {
  const reference::KvCodes encoded = reference::kv_encode(places.coder, row);
  reference::kv_store(places, slot, encoded,
                      memory.codes.before.data() + head * places.head_bytes(),
                      memory.scales.before.data() + head * places.scale_head_bytes());
  const auto values = reference::kv_restored(reference::kv_rotated(places.coder, encoded));
  memory.values.insert(memory.values.end(), values.begin(), values.end());
}

uint32_t compat_bits(KvFormat format) {
  if (format == KvFormat::compat4) return 4;
  if (format == KvFormat::compat5) return 5;
  return format == KvFormat::compat6 ? 6 : 8;
}

const std::vector<double>& codebook_of(KvFormat format) {
  static const std::vector<double> kBooks[] = {
      reference::compat_codebook(4), reference::compat_codebook(5), reference::compat_codebook(6),
      reference::compat_codebook(8)};
  const uint32_t bits = compat_bits(format);
  return kBooks[bits == 8 ? 3 : bits - 4];
}

void fill_compat(const KvShape& shape, uint64_t slot, uint64_t head, const std::vector<float>& row,
                 KvMemory& memory) {
  const reference::CompatRow found = reference::compat_normalize(row);
  const std::vector<float> norms(found.norms.begin(), found.norms.end());
  const std::vector<double>& book = codebook_of(shape.format);
  const std::vector<uint32_t> codes = reference::compat_codes(row, norms, book);
  const uint64_t at = head * shape.capacity + slot;
  for (uint64_t j = 0; j < row.size(); ++j) {
    const uint64_t packed = shape.format == KvFormat::compat4 ? 2 : 1;
    std::byte& byte = memory.codes.before[at * row.size() / packed + j / packed];
    if (packed == 2 && j % 2 == 1) {
      byte = (byte & std::byte{15}) | static_cast<std::byte>(codes[j] << 4);
    } else {
      byte = static_cast<std::byte>(codes[j]);
    }
  }
  for (uint64_t i = 0; i < norms.size(); ++i)
    reference::store_bits(DType::f32, memory.scales.before.data(), at * norms.size() + i,
                          std::bit_cast<uint32_t>(norms[i]));
  const auto values = reference::compat_restored(codes, norms, book);
  memory.values.insert(memory.values.end(), values.begin(), values.end());
}

}  // namespace

DType kv_dtype(KvFormat format) {
  if (format == KvFormat::f16) return DType::f16;
  return format == KvFormat::bf16 ? DType::bf16 : DType::f32;
}

KvMemory kv_memory(const KvShape& shape, KvLayout layout,
                   const std::function<std::vector<float>(uint64_t slot)>& row_of) {
  KvMemory memory;
  if (!describe(shape.format).compressed) {
    const KvSide side = side_of(shape, layout);
    memory.codes.dtype = side.dtype;
    memory.codes.before = pattern_bytes(side.elements() * size_bytes(side.dtype), 4);
    for_each_row(shape, row_of, [&](uint64_t slot, uint64_t head, const std::vector<float>& row) {
      fill_dense(side, slot, head, row, memory);
    });
  } else if (is_native(shape.format)) {
    const reference::KvPlaces places = places_of(shape);
    memory.codes.dtype = memory.scales.dtype = DType::u8;
    memory.codes.before = pattern_bytes(shape.kv_heads * places.head_bytes(), 5);
    memory.scales.before = pattern_bytes(shape.kv_heads * places.scale_head_bytes(), 6);
    for_each_row(shape, row_of, [&](uint64_t slot, uint64_t head, const std::vector<float>& row) {
      fill_native(places, slot, head, row, memory);
    });
  } else {
    memory.codes.dtype = DType::u8;
    memory.scales.dtype = DType::f32;
    const auto elements = [](const Dims& dims) { return dims[0] * dims[1] * dims[2]; };
    memory.codes.before = pattern_bytes(elements(kv_codes_shape(shape)), 5);
    memory.scales.before = pattern_bytes(elements(kv_scales_shape(shape)) * sizeof(float), 6);
    for_each_row(shape, row_of, [&](uint64_t slot, uint64_t head, const std::vector<float>& row) {
      fill_compat(shape, slot, head, row, memory);
    });
  }
  memory.codes.after = memory.codes.before;
  memory.scales.after = memory.scales.before;
  return memory;
}

KvBuffer kv_buffer(const KvShape& shape, KvLayout layout, const Tensor& codes,
                   const Tensor& scales) {
  if (!describe(shape.format).compressed)
    return {shape, kv_view(codes, side_of(shape, layout)).permute({1, 0, 2}), {}};
  return {shape, codes.reshape(kv_codes_shape(shape)), scales.reshape(kv_scales_shape(shape))};
}

}  // namespace gyre::test
