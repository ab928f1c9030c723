#pragma once
// Tensors of any dtype as plain bytes, for tests that compare bit for bit.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "gyre/tensor.h"
#include "runtime/storage.h"

namespace gyre::test {

using Bytes = std::vector<std::byte>;

// Calls `action` with a value of the C++ type that holds `dtype`.
template <class Action>
auto with_type(DType dtype, const Action& action) {
  switch (dtype) {
    case DType::f32:
      return action(float{});
    case DType::f16:
      return action(Half{});
    case DType::bf16:
      return action(BFloat16{});
    case DType::u8:
      return action(uint8_t{});
    case DType::i32:
      return action(int32_t{});
    case DType::u32:
      return action(uint32_t{});
    case DType::i64:
      break;
  }
  return action(int64_t{});
}

// Where the device finds the elements: what Device::wrap takes, also if the host cannot look there.
inline void* address_of(const Tensor& tensor) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  return reinterpret_cast<void*>(storage_of(tensor)->address() + tensor.byte_offset());
}

inline void write_bytes(const Tensor& tensor, std::span<const std::byte> bytes) {
  with_type(tensor.dtype(), [&](auto type) {
    std::vector<decltype(type)> values(bytes.size() / sizeof(type));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(type));
    tensor.write_from(std::span<const decltype(type)>(values));
  });
}

inline Bytes read_bytes(const Tensor& tensor) {
  return with_type(tensor.dtype(), [&](auto type) {
    std::vector<decltype(type)> values(tensor.elements());
    tensor.read_to(std::span<decltype(type)>(values));
    Bytes bytes(values.size() * sizeof(type));
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  });
}

// Recognisable contents: differs between neighbours, between seeds, and from zero.
inline Bytes pattern_bytes(uint64_t count, uint32_t seed) {
  Bytes bytes(count);
  for (uint64_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>((i * 37 + seed * 101 + 11) % 251 + 1);
  }
  return bytes;
}

}  // namespace gyre::test
