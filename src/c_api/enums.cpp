#include "c_api/enums.h"

namespace gyre::c_api {

// In C 0 is none, so that a field that was never set is not taken for f32.
DType dtype(gyre_dtype given, const char* name) {
  if (given < 1 || given > static_cast<gyre_dtype>(kDTypeCount))
    refuse(name, " is ", given, ", which is no gyre_dtype");
  return static_cast<DType>(given - 1);
}

gyre_dtype from_dtype(DType dtype) { return static_cast<gyre_dtype>(dtype) + 1; }

gyre_kv_format from_kv_format(KvFormat format) {
  const auto number = static_cast<gyre_kv_format>(format);
  return format <= KvFormat::bf16 ? number + 1 : number;
}

KvFormat kv_format(gyre_kv_format given, const char* name) {
  for (const KvFormat format : kv_formats()) {
    if (from_kv_format(format) == given) return format;
  }
  refuse(name, " is ", given, ", which is no gyre_kv_format");
}

}  // namespace gyre::c_api

using namespace gyre::c_api;

gyre_status gyre_kv_format_from_name(const char* name, gyre_kv_format* format) {
  return answer(__func__, format, "format",
                [&] { return from_kv_format(gyre::kv_format(&deref(name, "name"))); });
}

gyre_status gyre_kv_format_name(gyre_kv_format format, const char** name) {
  return answer(__func__, name, "name",
                [&] { return gyre::name(kv_format(format, "format")).data(); });
}
