#include "gyre/c/pages.h"

#include "c_api/convert.h"
#include "c_api/enums.h"
#include "c_api/handles.h"
#include "c_api/structs.h"

using namespace gyre::c_api;

namespace {

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

}  // namespace

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

gyre_status gyre_kv_page_copy(gyre_encoder* encoder, const gyre_kv_page_copy_inputs* inputs) {
  return guard(__func__, [&] {
    const gyre_kv_page_copy_inputs given = read(inputs, "inputs");
    gyre::kv_page_copy(
        deref(encoder, "encoder").value,
        {.pages = kv_pages(given.pages), .from = tensor(given.from), .to = tensor(given.to)});
  });
}
