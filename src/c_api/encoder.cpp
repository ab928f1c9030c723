#include "gyre/c/encoder.h"

#include "c_api/handles.h"
#include "gyre/c/fence.h"
#include "gyre/c/graph.h"

using namespace gyre::c_api;

namespace {

const gyre::Encoder& value(const gyre_encoder* encoder) { return deref(encoder, "encoder").value; }

// The handle is made first: work that was submitted must not end in an error of its own.
template <class Submit>
void give_fence(gyre_fence** fence, const Submit& submit) {
  if (fence == nullptr) return static_cast<void>(submit());
  *fence = nullptr;
  auto made = std::make_unique<gyre_fence>();
  made->value = submit();
  *fence = made.release();
}

}  // namespace

gyre_status gyre_encoder_create(const gyre_device* device, gyre_encoder** encoder) {
  return make(__func__, encoder, "encoder",
              [&] { return gyre::Encoder(deref(device, "device").value); });
}

void gyre_encoder_destroy(gyre_encoder* encoder) { destroy(__func__, encoder, "encoder"); }

gyre_status gyre_encoder_size(const gyre_encoder* encoder, uint32_t* commands) {
  return answer(__func__, commands, "commands", [&] { return value(encoder).size(); });
}

gyre_status gyre_encoder_barriers(const gyre_encoder* encoder, uint32_t* barriers) {
  return answer(__func__, barriers, "barriers", [&] { return value(encoder).barriers(); });
}

gyre_status gyre_encoder_clear(gyre_encoder* encoder) {
  return guard(__func__, [&] { value(encoder).clear(); });
}

gyre_status gyre_encoder_submit(gyre_encoder* encoder, gyre_fence** fence) {
  return guard(__func__, [&] { give_fence(fence, [&] { return value(encoder).submit(); }); });
}

gyre_status gyre_encoder_submit_on(gyre_encoder* encoder, uint64_t stream, gyre_fence** fence) {
  return guard(__func__, [&] {
    deref(fence, "fence");
    give_fence(fence, [&] { return value(encoder).submit_on(stream); });
  });
}

gyre_status gyre_encoder_instantiate(gyre_encoder* encoder, gyre_graph** graph) {
  return make(__func__, graph, "graph", [&] { return value(encoder).instantiate(); });
}

gyre_status gyre_graph_replay(const gyre_graph* graph, gyre_fence** fence) {
  return guard(__func__,
               [&] { give_fence(fence, [&] { return deref(graph, "graph").value.replay(); }); });
}

gyre_status gyre_graph_size(const gyre_graph* graph, uint32_t* commands) {
  return answer(__func__, commands, "commands", [&] { return deref(graph, "graph").value.size(); });
}

void gyre_graph_destroy(gyre_graph* graph) { destroy(__func__, graph, "graph"); }

gyre_status gyre_fence_wait(const gyre_fence* fence) {
  return guard(__func__, [&] { deref(fence, "fence").value.wait(); });
}

gyre_status gyre_fence_done(const gyre_fence* fence, int32_t* done) {
  return answer(__func__, done, "done", [&] { return deref(fence, "fence").value.done(); });
}

void gyre_fence_destroy(gyre_fence* fence) { destroy(__func__, fence, "fence"); }
