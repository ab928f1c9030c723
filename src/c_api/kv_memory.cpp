#include "gyre/c/kv_memory.h"

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

gyre::KvPageShape kv_page_shape(const gyre_kv_page_shape* shape) {
  const gyre_kv_page_shape given = read(shape, "shape");
  gyre::KvPageShape made;
  made.k = kv_format_or(given.k, made.k, "shape.k");
  made.v = kv_format_or(given.v, made.v, "shape.v");
  made.kv_heads = given.kv_heads;
  made.head_dim = given.head_dim;
  made.v_head_dim = given.v_head_dim;
  made.page_tokens = or_default(given.page_tokens, made.page_tokens);
  made.signs_version = or_default(given.signs_version, made.signs_version);
  made.latent = given.latent != 0;
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
    if (scales.defined()) *tensor = new gyre_tensor{.value = scales};
  });
}

void gyre_kv_buffer_destroy(gyre_kv_buffer* buffer) { destroy(__func__, buffer, "buffer"); }

gyre_status gyre_kv_codes_shape(const gyre_kv_shape* shape, uint32_t* rank, uint64_t dims[6]) {
  return guard(__func__, [&] { give(gyre::kv_codes_shape(kv_shape(shape)), rank, dims); });
}

gyre_status gyre_kv_scales_shape(const gyre_kv_shape* shape, uint32_t* rank, uint64_t dims[6]) {
  return guard(__func__, [&] { give(gyre::kv_scales_shape(kv_shape(shape)), rank, dims); });
}

gyre_status gyre_kv_page_bytes(const gyre_kv_page_shape* shape, uint64_t* bytes) {
  return answer(__func__, bytes, "bytes",
                [&] { return gyre::kv_page_bytes(kv_page_shape(shape)); });
}

gyre_status gyre_kv_pages_allocate(const gyre_device* device, const gyre_kv_page_shape* shape,
                                   uint64_t pages, gyre_kv_pages** made) {
  return make(__func__, made, "made", [&] {
    return gyre::KvPages::allocate(deref(device, "device").value, kv_page_shape(shape), pages);
  });
}

gyre_status gyre_kv_pages_create(const gyre_kv_page_shape* shape, const gyre_tensor* bytes,
                                 gyre_kv_pages** made) {
  return make(__func__, made, "made", [&] {
    return gyre::KvPages{kv_page_shape(shape), deref(bytes, "bytes").value};
  });
}

gyre_status gyre_kv_pages_bytes(const gyre_kv_pages* pages, gyre_tensor** tensor) {
  return make(__func__, tensor, "tensor", [&] { return deref(pages, "pages").value.bytes; });
}

void gyre_kv_pages_destroy(gyre_kv_pages* pages) { destroy(__func__, pages, "pages"); }

gyre_status gyre_kv_write(gyre_encoder* encoder, const gyre_kv_write_inputs* inputs) {
  return guard(__func__, [&] {
    const gyre_kv_write_inputs given = read(inputs, "inputs");
    gyre::kv_write(deref(encoder, "encoder").value,
                   {.k = tensor(given.k),
                    .v = tensor(given.v),
                    .pages = kv_pages(given.pages),
                    .slots = tensor(given.slots),
                    .k_calibration = kv_calibration(given.k_calibration, "inputs.k_calibration"),
                    .v_calibration = kv_calibration(given.v_calibration, "inputs.v_calibration")});
  });
}

gyre_status gyre_kv_page_copy(gyre_encoder* encoder, const gyre_kv_page_copy_inputs* inputs) {
  return guard(__func__, [&] {
    const gyre_kv_page_copy_inputs given = read(inputs, "inputs");
    gyre::kv_page_copy(
        deref(encoder, "encoder").value,
        {.pages = kv_pages(given.pages), .from = tensor(given.from), .to = tensor(given.to)});
  });
}
