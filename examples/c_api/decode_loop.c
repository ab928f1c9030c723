// A decode loop in C: the prompt in one piece, then one recorded step replayed for every token.
// Every query is 0, so that it sees all keys alike, and value i is i everywhere: each output is
// the mean of what the cache holds.
#include <gyre/gyre_c.h>
#include <stdio.h>
#include <stdlib.h>

enum { kLayers = 2, kHeads = 8, kKvHeads = 2, kDim = 64, kPrompt = 100, kSteps = 20 };

static void check(gyre_status status) {
  if (status == GYRE_OK) return;
  fprintf(stderr, "%s: %s\n", gyre_status_name(status), gyre_last_error());
  exit(1);
}

typedef struct Step {
  gyre_tensor *q, *k, *v, *out;
} Step;

static gyre_tensor* tensor(const gyre_device* device, uint64_t tokens, uint64_t heads) {
  const uint64_t shape[3] = {tokens, heads, kDim};
  gyre_tensor* made = NULL;
  check(gyre_tensor_create(device, GYRE_F32, 3, shape, &made));
  return made;
}

static Step make_step(const gyre_device* device, uint64_t tokens) {
  const Step step = {tensor(device, tokens, kHeads), tensor(device, tokens, kKvHeads),
                     tensor(device, tokens, kKvHeads), tensor(device, tokens, kHeads)};
  return step;
}

static void destroy_step(const Step* step) {
  gyre_tensor_destroy(step->q);
  gyre_tensor_destroy(step->k);
  gyre_tensor_destroy(step->v);
  gyre_tensor_destroy(step->out);
}

// Stands in for a model: the values of tokens first, first + 1, ...
static void fill(const Step* step, uint64_t first, uint64_t tokens) {
  void* data = NULL;
  check(gyre_tensor_data(step->v, &data));
  for (uint64_t i = 0; i < tokens * kKvHeads * kDim; ++i) {
    ((float*)data)[i] = (float)(first + i / (kKvHeads * kDim));
  }
}

static void record(const Step* step, const gyre_kv_cache* cache, gyre_encoder* encoder) {
  const gyre_rope_append_inputs append = {
      .size = sizeof append, .q = step->q, .q_out = step->q, .k = step->k, .v = step->v};
  const gyre_attend_inputs attend = {.size = sizeof attend, .q = step->q, .out = step->out};
  for (uint64_t layer = 0; layer < kLayers; ++layer) {
    check(gyre_kv_cache_rope_append(cache, encoder, layer, &append, NULL));
    check(gyre_kv_cache_attend(cache, encoder, layer, &attend, NULL));
  }
}

int main(void) {
  gyre_device* device = NULL;
  gyre_encoder* encoder = NULL;
  gyre_kv_cache* cache = NULL;
  gyre_graph* graph = NULL;
  check(gyre_device_open("cpu", NULL, &device));
  check(gyre_encoder_create(device, &encoder));
  const gyre_kv_layer layers[kLayers] = {{.size = sizeof layers[0], .v = GYRE_KV_F16},
                                         {.size = sizeof layers[0], .v = GYRE_KV_F16}};
  const gyre_kv_cache_options options = {.size = sizeof options,
                                         .kv_heads = kKvHeads,
                                         .head_dim = kDim,
                                         .capacity = 256,
                                         .layers = layers,
                                         .layer_count = kLayers};
  check(gyre_kv_cache_create(device, &options, &cache));

  const Step prompt = make_step(device, kPrompt), step = make_step(device, 1);
  fill(&prompt, 0, kPrompt);
  check(gyre_kv_cache_begin_step(cache, encoder, kPrompt));
  record(&prompt, cache, encoder);
  check(gyre_encoder_submit(encoder, NULL));

  record(&step, cache, encoder);
  check(gyre_encoder_instantiate(encoder, &graph));
  for (uint64_t token = kPrompt; token < kPrompt + kSteps; ++token) {
    fill(&step, token, 1);
    check(gyre_kv_cache_begin_step(cache, encoder, 1));
    check(gyre_encoder_submit(encoder, NULL));
    check(gyre_graph_replay(graph, NULL));
    check(gyre_device_wait(device));
  }

  float out[kHeads * kDim];
  uint64_t length = 0;
  check(gyre_kv_cache_length(cache, &length));
  check(gyre_tensor_read(step.out, out, sizeof out));
  printf("Gyre %s: %llu tokens, their mean is %.1f\n", gyre_version(), (unsigned long long)length,
         out[0]);

  gyre_graph_destroy(graph);
  destroy_step(&prompt);
  destroy_step(&step);
  gyre_kv_cache_destroy(cache);
  gyre_encoder_destroy(encoder);
  gyre_device_destroy(device);
  return 0;
}
