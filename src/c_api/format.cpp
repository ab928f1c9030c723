#include "gyre/c/format.h"

#include <algorithm>

#include "c_api/convert.h"
#include "c_api/enums.h"
#include "c_api/handles.h"
#include "c_api/structs.h"

using namespace gyre::c_api;

namespace {

gyre::KvShape kv_shape(const gyre_kv_shape* shape) {
  const gyre_kv_shape given = read(shape, "shape");
  gyre::KvShape made;
  made.format = kv_format_or(given.format, made.format, "shape.format");
  made.role = same_number(given.role, {gyre::KvRole::k, gyre::KvRole::v}, "shape.role");
  made.kv_heads = given.kv_heads;
  made.capacity = given.capacity;
  made.head_dim = given.head_dim;
  made.signs_version = or_default(given.signs_version, made.signs_version);
  made.scale_factor = or_default(given.scale_factor, made.scale_factor);
  return made;
}

void give(const gyre::Dims& made, uint32_t* rank, uint64_t* dims) {
  deref(dims, "dims");
  deref(rank, "rank") = made.size();
  std::copy(made.begin(), made.end(), dims);
}

}  // namespace

gyre_status gyre_kv_buffer_allocate(const gyre_device* device, const gyre_kv_shape* shape,
                                    gyre_kv_buffer** buffer) {
  return make(__func__, buffer, "buffer", [&] {
    return gyre::KvBuffer::allocate(deref(device, "device").value, kv_shape(shape));
  });
}

gyre_status gyre_kv_buffer_create(const gyre_kv_shape* shape, const gyre_tensor* codes,
                                  const gyre_tensor* scales, gyre_kv_buffer** buffer) {
  return make(__func__, buffer, "buffer", [&] {
    return gyre::KvBuffer{kv_shape(shape), deref(codes, "codes").value, tensor(scales)};
  });
}

gyre_status gyre_kv_buffer_codes(const gyre_kv_buffer* buffer, gyre_tensor** tensor) {
  return make(__func__, tensor, "tensor", [&] { return deref(buffer, "buffer").value.codes; });
}

gyre_status gyre_kv_buffer_scales(const gyre_kv_buffer* buffer, gyre_tensor** tensor) {
  return guard(__func__, [&] {
    deref(tensor, "tensor") = nullptr;
    const gyre::Tensor& scales = deref(buffer, "buffer").value.scales;
    if (scales.defined()) *tensor = new gyre_tensor{{.value = scales}};
  });
}

void gyre_kv_buffer_destroy(gyre_kv_buffer* buffer) { destroy(__func__, buffer, "buffer"); }

gyre_status gyre_kv_codes_shape(const gyre_kv_shape* shape, uint32_t* rank, uint64_t dims[6]) {
  return guard(__func__, [&] { give(gyre::kv_codes_shape(kv_shape(shape)), rank, dims); });
}

gyre_status gyre_kv_scales_shape(const gyre_kv_shape* shape, uint32_t* rank, uint64_t dims[6]) {
  return guard(__func__, [&] { give(gyre::kv_scales_shape(kv_shape(shape)), rank, dims); });
}
