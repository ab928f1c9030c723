// A decode loop over a KvCache: a graph that is replayed gives what steps recorded one by one give,
// over a fork, a snapshot and handles that are gone before the work is submitted.
#include "check.h"

enum { kLayers = 2, kHeads = 4, kKvHeads = 2, kDim = 64, kPrompt = 19, kSteps = 12 };

typedef struct Step {
  gyre_tensor *q, *k, *v, *out;
} Step;

static Step make_step(const gyre_device* device, uint64_t tokens) {
  const Step step = {floats(device, tokens, kHeads, kDim), floats(device, tokens, kKvHeads, kDim),
                     floats(device, tokens, kKvHeads, kDim), floats(device, tokens, kHeads, kDim)};
  return step;
}

static void fill_step(const Step* step, uint32_t seed) {
  fill(step->q, seed);
  fill(step->k, seed + 1);
  fill(step->v, seed + 2);
}

static void record(const Step* step, const gyre_kv_cache* cache, gyre_encoder* encoder) {
  const gyre_rope_append_inputs append = {
      .size = sizeof append, .q = step->q, .q_out = step->q, .k = step->k, .v = step->v};
  const gyre_attend_inputs attend = {.size = sizeof attend, .q = step->q, .out = step->out};
  for (uint64_t layer = 0; layer < kLayers; ++layer) {
    OK(gyre_kv_cache_rope_append(cache, encoder, layer, &append, NULL));
    OK(gyre_kv_cache_attend(cache, encoder, layer, &attend, NULL));
  }
}

static void destroy_step(Step* step) {
  gyre_tensor_destroy(step->q);
  gyre_tensor_destroy(step->k);
  gyre_tensor_destroy(step->v);
  gyre_tensor_destroy(step->out);
}

static gyre_kv_cache* make_cache(const gyre_device* device) {
  const gyre_kv_layer layers[kLayers] = {{.size = sizeof layers[0]},
                                         {.size = sizeof layers[0], .k = GYRE_KV_F16, .tail = 0}};
  const gyre_kv_cache_options options = {.size = sizeof options,
                                         .kv_heads = kKvHeads,
                                         .head_dim = kDim,
                                         .capacity = 64,
                                         .layers = layers,
                                         .layer_count = kLayers,
                                         .step_tokens = 32};
  gyre_kv_cache* cache = NULL;
  OK(gyre_kv_cache_create(device, &options, &cache));
  return cache;
}

static void prompt(const gyre_device* device, gyre_kv_cache* cache, gyre_encoder* encoder) {
  Step step = make_step(device, kPrompt);
  fill_step(&step, 1);
  OK(gyre_kv_cache_begin_step(cache, encoder, kPrompt));
  record(&step, cache, encoder);
  destroy_step(&step);  // the list holds what it uses
  submit(encoder);
}

// The last output, by a graph or step by step.
static void generate(const gyre_device* device, gyre_kv_cache* cache, gyre_encoder* encoder,
                     int by_graph, float* last) {
  Step step = make_step(device, 1);
  gyre_graph* graph = NULL;
  if (by_graph) {
    uint32_t commands = 0;
    record(&step, cache, encoder);
    OK(gyre_encoder_instantiate(encoder, &graph));
    OK(gyre_graph_size(graph, &commands));
    CHECK(commands >= 2 * kLayers);
  }
  for (uint32_t i = 0; i < kSteps; ++i) {
    fill_step(&step, 100 + i);
    OK(gyre_kv_cache_begin_step(cache, encoder, 1));
    if (by_graph) {
      gyre_fence* fence = NULL;
      OK(gyre_encoder_submit(encoder, NULL));
      OK(gyre_graph_replay(graph, &fence));
      OK(gyre_fence_wait(fence));
      gyre_fence_destroy(fence);
    } else {
      record(&step, cache, encoder);
      submit(encoder);
    }
  }
  OK(gyre_tensor_read(step.out, last, kHeads * kDim * sizeof *last));
  destroy_step(&step);
  gyre_graph_destroy(graph);
}

static void expect_length(const gyre_kv_cache* cache, uint64_t expected) {
  uint64_t length = 0;
  OK(gyre_kv_cache_length(cache, &length));
  CHECK(length == expected);
}

static void test_describe(gyre_kv_cache* cache) {
  uint64_t layers = 0, bytes = 0, sum = 0;
  OK(gyre_kv_cache_layer_count(cache, &layers));
  CHECK(layers == kLayers);
  for (uint64_t layer = 0; layer < layers; ++layer) {
    gyre_kv_layer_info info = {.size = sizeof info};
    OK(gyre_kv_cache_describe(cache, layer, &info));
    CHECK(info.k == (layer == 0 ? GYRE_KV_TQ8 : GYRE_KV_F16) && info.v == GYRE_KV_TQ4);
    CHECK(info.slots == 64 && strlen(info.kernel) > 0);
    sum += info.bytes;
  }
  OK(gyre_kv_cache_bytes(cache, &bytes));
  CHECK(sum > 0 && bytes >= sum);
}

static void test_policy(void) {
  const gyre_kv_policy policy = {
      .size = sizeof policy, .edge_layers = 1, .edge_format = GYRE_KV_F16};
  gyre_kv_layer layers[4] = {{.size = sizeof layers[0]},
                             {.size = sizeof layers[0]},
                             {.size = sizeof layers[0]},
                             {.size = 0}};
  REFUSED(gyre_kv_layers(4, &policy, layers), "gyre_kv_layers: layers");
  CHECK(layers[0].k == 0);
  layers[3].size = sizeof layers[0];
  OK(gyre_kv_layers(4, &policy, layers));
  for (int i = 0; i < 4; ++i) {
    CHECK(layers[i].size == sizeof layers[0]);
    CHECK(layers[i].k == (i == 0 || i == 3 ? GYRE_KV_F16 : GYRE_KV_TQ8));
  }
}

static void spoil_last_byte(const char* path) {
  FILE* const file = fopen(path, "r+b");
  CHECK(file != NULL && fseek(file, -1, SEEK_END) == 0);
  const int byte = fgetc(file);
  CHECK(fseek(file, -1, SEEK_END) == 0 && fputc(byte ^ 1, file) != EOF && fclose(file) == 0);
}

static void test_snapshot(const gyre_device* device, gyre_kv_cache* cache, gyre_encoder* encoder,
                          const float* expected, const char* path) {
  float last[kHeads * kDim];
  OK(gyre_kv_cache_save(cache, path));
  gyre_kv_snapshot_info info = {.size = sizeof info};
  OK(gyre_kv_snapshot_inspect(path, &info));
  CHECK(info.length == kPrompt && info.layer_count == kLayers && info.head_dim == kDim);
  CHECK(info.calibration == 0);
  OK(gyre_kv_snapshot_verify(path));
  spoil_last_byte(path);
  OK(gyre_kv_snapshot_inspect(path, &info));
  REFUSED_AS(GYRE_IO, gyre_kv_snapshot_verify(path), path);
  spoil_last_byte(path);
  gyre_kv_cache* loaded = make_cache(device);
  OK(gyre_kv_cache_load(loaded, path));
  CHECK(remove(path) == 0);
  expect_length(loaded, kPrompt);
  generate(device, loaded, encoder, 1, last);
  CHECK(same_bits(last, expected, sizeof last));
  gyre_kv_cache_destroy(loaded);
  REFUSED_AS(GYRE_IO, gyre_kv_cache_load(cache, path), path);
  expect_length(cache, kPrompt);
}

int main(int argc, char** argv) {
  CHECK(argc == 2);  // a path for the snapshot
  gyre_device* device = NULL;
  gyre_encoder* encoder = NULL;
  OK(gyre_device_open("cpu", NULL, &device));
  OK(gyre_encoder_create(device, &encoder));
  gyre_kv_cache* cache = make_cache(device);
  test_describe(cache);
  test_policy();

  prompt(device, cache, encoder);
  expect_length(cache, kPrompt);
  gyre_kv_cache* fork = NULL;
  gyre_kv_layer_info larger = {.size = sizeof larger};
  OK(gyre_kv_cache_fork(cache, encoder, 96, &fork));
  OK(gyre_kv_cache_describe(fork, 0, &larger));
  CHECK(larger.slots == 96);
  submit(encoder);

  float by_graph[kHeads * kDim], by_steps[kHeads * kDim];
  generate(device, fork, encoder, 1, by_graph);
  expect_length(fork, kPrompt + kSteps);
  expect_length(cache, kPrompt);
  test_snapshot(device, cache, encoder, by_graph, argv[1]);
  generate(device, cache, encoder, 0, by_steps);
  CHECK(same_bits(by_graph, by_steps, sizeof by_graph));
  CHECK(isfinite(by_graph[0]) && by_graph[0] != 0);

  // Truncated to the prompt, the same tokens give the same again.
  OK(gyre_kv_cache_rollback(cache, encoder, kSteps));
  submit(encoder);
  generate(device, cache, encoder, 1, by_graph);
  CHECK(same_bits(by_graph, by_steps, sizeof by_graph));
  OK(gyre_kv_cache_clear(cache, encoder));
  expect_length(cache, 0);
  submit(encoder);

  // Recorded, and everything but the encoder gone before it is submitted.
  gyre_kv_cache_destroy(fork);
  fork = make_cache(device);
  prompt(device, fork, encoder);
  Step step = make_step(device, 1);
  fill_step(&step, 7);
  OK(gyre_kv_cache_begin_step(fork, encoder, 1));
  record(&step, fork, encoder);
  gyre_kv_cache_destroy(fork);
  gyre_kv_cache_destroy(cache);
  gyre_device_destroy(device);
  gyre_tensor* out = step.out;
  step.out = NULL;
  destroy_step(&step);
  submit(encoder);
  gyre_encoder_destroy(encoder);
  CHECK(isfinite(values(out)[0]) && values(out)[0] != 0);
  gyre_tensor_destroy(out);
  return 0;
}
