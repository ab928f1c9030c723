#include "gyre/c/prepare.h"

#include "c_api/convert.h"
#include "c_api/enums.h"
#include "c_api/handles.h"

using namespace gyre::c_api;

namespace {

gyre::ModelShape model_shape(const gyre_model_shape* shape) {
  const gyre_model_shape given = read(shape, "shape");
  gyre::ModelShape made;
  made.heads = given.heads;
  made.kv_heads = given.kv_heads;
  made.head_dim = given.head_dim;
  made.v_head_dim = given.v_head_dim;
  made.layers = kv_layers(given.layers, given.layer_count);
  made.context = given.context;
  made.step_tokens = or_default(given.step_tokens, made.step_tokens);
  made.dtype = dtype_or(given.dtype, made.dtype, "shape.dtype");
  if (given.out_dtype != 0) made.out_dtype = dtype(given.out_dtype, "shape.out_dtype");
  made.rope = rope_options(given.rope, given.no_rope, "shape.rope");
  made.norm = given.norm != 0;
  made.tree_mask = given.tree_mask != 0;
  made.use_cache = given.no_cache == 0;
  made.use_batch = given.no_batch == 0;
  made.use_pages = given.use_pages != 0;
  made.page_tokens = or_default(given.page_tokens, made.page_tokens);
  made.max_sequences = or_default(given.max_sequences, made.max_sequences);
  return made;
}

}  // namespace

gyre_status gyre_prepare(const gyre_device* device, const gyre_model_shape* shape,
                         void (*progress)(const gyre_prepare_progress* so_far, void* context),
                         void* context, uint64_t* kernels) {
  return guard(__func__, [&] {
    gyre::PrepareCallback callback;
    if (progress != nullptr) {
      callback = [&](const gyre::PrepareProgress& so_far) {
        const gyre_prepare_progress given{.size = sizeof given,
                                          .done = so_far.done,
                                          .all = so_far.all,
                                          .kernel = so_far.kernel.name.c_str(),
                                          .seconds = so_far.kernel.seconds,
                                          .compiled = so_far.kernel.compiled,
                                          .reserved = 0};
        progress(&given, context);
      };
    }
    const auto prepared =
        gyre::prepare(deref(device, "device").value, model_shape(shape), callback);
    if (kernels != nullptr) *kernels = prepared.size();
  });
}
