#pragma once
// KV formats by the loops that kernels have for them. Lists walk kv_formats(), so that a new format
// is in every test that asks for its class.

#include <stdexcept>

#include "gyre_test.h"

namespace gyre::test {

enum class FormatClass : uint8_t { f32, f16, bf16, levels, mlx_native };
constexpr FormatClass kFormatClasses[] = {FormatClass::f32, FormatClass::f16, FormatClass::bf16,
                                          FormatClass::levels, FormatClass::mlx_native};

inline std::string_view name(FormatClass format_class) {
  constexpr std::string_view kNames[] = {"f32", "f16", "bf16", "levels", "mlx_native"};
  return kNames[static_cast<size_t>(format_class)];
}

inline FormatClass class_of(KvFormat format) {
  if (format == KvFormat::f32) return FormatClass::f32;
  if (format == KvFormat::f16) return FormatClass::f16;
  if (format == KvFormat::bf16) return FormatClass::bf16;
  const KvFormatInfo info = describe(format);
  if (info.scale == KvScaleKind::u8e8) return FormatClass::levels;
  if (info.scale == KvScaleKind::f32_norm) return FormatClass::mlx_native;
  throw std::logic_error("no format class for " + std::string(info.name));
}

inline std::vector<KvFormat> formats_of(FormatClass format_class) {
  std::vector<KvFormat> formats;
  for (const KvFormat format : kv_formats()) {
    if (class_of(format) == format_class) formats.push_back(format);
  }
  return formats;
}

// The formats of a class in their order, by index modulo their number.
inline KvFormat format_of(FormatClass format_class, size_t index) {
  const std::vector<KvFormat> formats = formats_of(format_class);
  return formats[index % formats.size()];
}

// tq2 to tq8.
inline const std::vector<KvFormat>& native_formats() {
  static const std::vector<KvFormat> kFormats = formats_of(FormatClass::levels);
  return kFormats;
}

// Whether the format stores rows of this size.
inline bool stores(KvFormat format, uint64_t head_dim) {
  const bool power_of_two = (head_dim & (head_dim - 1)) == 0;
  switch (class_of(format)) {
    case FormatClass::levels:
      return head_dim >= 16 && head_dim % 8 == 0;
    case FormatClass::mlx_native:
      if (describe(format).packing != KvPacking::nibbles) return head_dim == 256 || head_dim == 512;
      return power_of_two && head_dim >= 4 && head_dim <= 1024;
    default:
      return true;
  }
}

}  // namespace gyre::test
