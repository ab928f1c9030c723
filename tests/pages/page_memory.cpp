#include "pages/page_memory.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace gyre::test {
namespace {

constexpr KvLayout kLayout = KvLayout::head_major;

uint64_t aligned(uint64_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

uint64_t v_dim_of(const KvPageShape& shape) {
  return shape.v_head_dim != 0 ? shape.v_head_dim : shape.head_dim;
}

PageMemory::PageMemory(const KvPageShape& shape, uint64_t pages, uint64_t gap)
    : shape_(shape), pages_(pages), gap_(gap) {
  const KvMemory k = kv_memory(head_shape(KvRole::k), kLayout);
  const KvMemory v = kv_memory(head_shape(KvRole::v), kLayout);
  Part &of_k = parts_[0], &of_v = parts_[1];
  of_k = {0, k.codes.before.size(), 0, k.scales.before.size()};
  of_v = {aligned(of_k.codes_bytes), v.codes.before.size(), 0, v.scales.before.size()};
  of_k.scales = of_v.codes + aligned(of_v.codes_bytes);
  of_v.scales = of_k.scales + aligned(of_k.scales_bytes);
  head_bytes_ = of_v.scales + aligned(of_v.scales_bytes);
  bytes_ = pattern_bytes(pages * page_stride() - gap, 11);
}

KvShape PageMemory::head_shape(KvRole role) const {
  const bool v = role == KvRole::v;
  return {v ? shape_.v : shape_.k, role, 1, shape_.page_tokens,
          v ? v_dim_of(shape_) : shape_.head_dim};
}

std::vector<double> PageMemory::write(KvRole role, uint64_t slot, uint64_t head,
                                      const std::vector<float>& row) {
  const Part& part = parts_[role == KvRole::v ? 1 : 0];
  const uint64_t begin = slot / shape_.page_tokens * page_stride() + head * head_bytes_;
  const auto at = [&](uint64_t offset) {
    return bytes_.begin() + static_cast<ptrdiff_t>(begin + offset);
  };
  Bytes codes(at(part.codes), at(part.codes + part.codes_bytes));
  Bytes scales(at(part.scales), at(part.scales + part.scales_bytes));
  auto values =
      write_kv_row(head_shape(role), kLayout, {slot % shape_.page_tokens, 0}, row, {codes, scales});
  std::copy(codes.begin(), codes.end(), at(part.codes));
  std::copy(scales.begin(), scales.end(), at(part.scales));
  return values;
}

void PageMemory::spoil(uint64_t page) {
  const auto begin = bytes_.begin() + static_cast<ptrdiff_t>(page * page_stride());
  std::fill_n(begin, page_bytes(), std::byte{0xFF});
}

KvPages pages_of(const PageMemory& memory, const Tensor& flat) {
  return {memory.shape(),
          flat.strided({memory.pages(), memory.page_bytes()}, {memory.page_stride(), 1})};
}

std::vector<int64_t> slot_run(int64_t first, uint64_t count) {
  std::vector<int64_t> slots(count);
  std::iota(slots.begin(), slots.end(), first);
  return slots;
}

Block slot_block(DType dtype, const std::vector<int64_t>& slots) {
  if (dtype == DType::i64) return plain_block(dtype, slots);
  return plain_block(dtype, std::vector<int32_t>(slots.begin(), slots.end()));
}

std::vector<float> certain_row(const KvShape& shape, DType dtype, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> small(-6, 6);
  const bool mlx_native = class_of(shape.format) == FormatClass::mlx_native;
  for (int i = 0; i < 1000; ++i) {
    std::vector<float> row(shape.head_dim);
    for (float& x : row) {
      x = mlx_native ? static_cast<float>(small(random)) : normal(random);
      x = reference::rounded(dtype, x);
    }
    if (has_codes(shape, row)) return row;
  }
  throw std::logic_error("no row whose codes are certain");
}

}  // namespace gyre::test
