// Two sequences that were forked from a prompt: each continues as if it were alone. Then prefixes,
// pages as bytes, files, and handles that go in any order.
#include <pthread.h>

#include "check.h"

enum { kHeads = 4, kKvHeads = 2, kDim = 64, kPrompt = 40, kSteps = 5, kPageTokens = 16 };

typedef struct Server {
  gyre_device* device;
  gyre_encoder* encoder;
  gyre_kv_pool* pool;
  gyre_kv_batch* batch;
} Server;

static Server make_server(void) {
  Server s = {NULL, NULL, NULL, NULL};
  const gyre_kv_layer layer = {.size = sizeof layer};
  const gyre_kv_pool_options pool = {.size = sizeof pool,
                                     .kv_heads = kKvHeads,
                                     .head_dim = kDim,
                                     .layers = &layer,
                                     .layer_count = 1,
                                     .pages = 32,
                                     .page_tokens = kPageTokens};
  const gyre_kv_batch_options batch = {.size = sizeof batch, .max_sequences = 4, .max_tokens = 64};
  OK(gyre_device_open("cpu", NULL, &s.device));
  OK(gyre_encoder_create(s.device, &s.encoder));
  OK(gyre_kv_pool_create(s.device, &pool, &s.pool));
  OK(gyre_kv_batch_create(s.pool, &batch, &s.batch));
  return s;
}

static gyre_kv_sequence* sequence(const Server* s) {
  gyre_kv_sequence* made = NULL;
  OK(gyre_kv_pool_sequence(s->pool, &made));
  return made;
}

// One step; row i of the batch is filled by seeds[i], so that it does not depend on the others.
static void step(const Server* s, const gyre_kv_step* steps, uint64_t count, const uint32_t* seeds,
                 float* out) {
  REFUSED(gyre_kv_batch_begin_step(s->batch, s->encoder, steps, 1ull << 40), "steps: at most 4, got");
  OK(gyre_kv_batch_begin_step(s->batch, s->encoder, steps, count));
  uint64_t rows = 0;
  OK(gyre_kv_batch_tokens(s->batch, &rows));
  gyre_tensor* q = floats(s->device, rows, kHeads, kDim);
  gyre_tensor* k = floats(s->device, rows, kKvHeads, kDim);
  gyre_tensor* v = floats(s->device, rows, kKvHeads, kDim);
  gyre_tensor* result = floats(s->device, rows, kHeads, kDim);
  gyre_tensor* all[] = {q, k, v};
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint32_t i = 0; i < 3; ++i) {
      gyre_tensor* part = NULL;
      OK(gyre_tensor_slice(all[i], 0, row, 1, &part));
      fill(part, seeds[row] * 3 + i);
      gyre_tensor_destroy(part);
    }
  }
  const gyre_rope_append_inputs append = {
      .size = sizeof append, .q = q, .q_out = q, .k = k, .v = v};
  const gyre_attend_inputs attend = {.size = sizeof attend, .q = q, .out = result};
  OK(gyre_kv_batch_rope_append(s->batch, s->encoder, 0, &append, NULL));
  OK(gyre_kv_batch_attend(s->batch, s->encoder, 0, &attend, NULL));
  submit(s->encoder);
  if (out != NULL) OK(gyre_tensor_read(result, out, rows * kHeads * kDim * sizeof *out));
  gyre_tensor* made[] = {q, k, v, result};
  for (int i = 0; i < 4; ++i) gyre_tensor_destroy(made[i]);
}

static gyre_kv_sequence* prompt(const Server* s) {
  gyre_kv_sequence* made = sequence(s);
  uint32_t seeds[kPrompt];
  for (uint32_t i = 0; i < kPrompt; ++i) seeds[i] = i;
  const gyre_kv_step whole = {
      .size = sizeof whole, .sequence = made, .tokens = kPrompt, .is_prefill = 1};
  step(s, &whole, 1, seeds, NULL);
  return made;
}

// The last rows of one sequence that continues with seeds first, first + 1, ...
static void alone(const Server* s, gyre_kv_sequence* sequence, uint32_t first, float* out) {
  const gyre_kv_step one = {.size = sizeof one, .sequence = sequence, .tokens = 1};
  for (uint32_t i = first; i < first + kSteps; ++i) step(s, &one, 1, &i, out);
}

static void test_forks(const Server* s) {
  enum { kRow = kHeads * kDim };
  float both[2 * kRow], first[kRow], second[kRow];
  gyre_kv_sequence* a = prompt(s);
  gyre_kv_sequence* b = NULL;
  OK(gyre_kv_sequence_fork(a, &b));
  gyre_kv_group_info group = {.size = sizeof group};
  OK(gyre_kv_pool_describe_group(s->pool, 0, &group));
  CHECK(strcmp(group.name, "all keys") == 0 && group.layer_count == 1 && group.layers[0] == 0);
  CHECK(group.used == 3 && group.shared == 3 && group.pages == 32);

  const gyre_kv_step steps[2] = {{.size = sizeof steps[0], .sequence = a, .tokens = 1},
                                 {.size = sizeof steps[0], .sequence = b, .tokens = 1}};
  for (uint32_t i = 0; i < kSteps; ++i) {
    const uint32_t seeds[2] = {1000 + i, 2000 + i};
    step(s, steps, 2, seeds, both);
  }
  gyre_kv_pool_info info = {.size = sizeof info};
  OK(gyre_kv_pool_describe(s->pool, &info));
  CHECK(info.sequences == 2 && info.group_count == 1 && info.used_bytes < info.bytes);
  gyre_kv_sequence_destroy(a);
  gyre_kv_sequence_destroy(b);

  gyre_kv_sequence* c = prompt(s);
  alone(s, c, 1000, first);
  OK(gyre_kv_sequence_rollback(c, kSteps));
  alone(s, c, 2000, second);
  CHECK(same_bits(both, first, sizeof first));
  CHECK(same_bits(both + kRow, second, sizeof second));
  CHECK(!same_bits(first, second, sizeof first));
  gyre_kv_sequence_destroy(c);
}

static void test_prefixes_and_pages(const Server* s, const char* path) {
  int32_t tokens[kPrompt];
  for (int32_t i = 0; i < kPrompt; ++i) tokens[i] = i;
  uint64_t length = 0, pages = 9;
  gyre_kv_sequence* a = prompt(s);
  OK(gyre_kv_pool_publish(s->pool, a, tokens, kPrompt));
  gyre_kv_sequence* found = NULL;
  OK(gyre_kv_pool_match(s->pool, tokens, kPrompt, &found));
  OK(gyre_kv_sequence_length(found, &length));
  CHECK(length == kPrompt / kPageTokens * kPageTokens);
  gyre_kv_sequence_destroy(found);
  OK(gyre_kv_pool_save_prefixes(s->pool, path));
  OK(gyre_kv_pool_forget(s->pool));
  OK(gyre_kv_pool_match(s->pool, tokens, kPrompt, &found));
  OK(gyre_kv_sequence_length(found, &length));
  CHECK(length == 0);
  REFUSED(gyre_kv_pool_load_prefixes(s->pool, path, NULL), "pages is NULL");
  gyre_kv_pool_info info = {.size = sizeof info};
  OK(gyre_kv_pool_describe(s->pool, &info));
  CHECK(info.prefixes == 0);  // refused before anything is loaded
  OK(gyre_kv_pool_load_prefixes(s->pool, path, &pages));
  CHECK(pages == kPrompt / kPageTokens);

  const void* data = NULL;
  uint64_t bytes = 0;
  gyre_bytes *page = NULL, *again = NULL;
  OK(gyre_kv_pool_export_page(s->pool, a, 0, &page));
  bytes = 7;
  REFUSED(gyre_bytes_get(page, NULL, &bytes), "data is NULL");
  CHECK(bytes == 7);
  OK(gyre_bytes_get(page, &data, &bytes));
  REFUSED_AS(GYRE_IO, gyre_kv_pool_import_page(s->pool, found, data, bytes - 1), "kv_pool");
  OK(gyre_kv_pool_import_page(s->pool, found, data, bytes));
  OK(gyre_kv_sequence_length(found, &length));
  CHECK(length == kPageTokens);
  OK(gyre_kv_pool_export_page(s->pool, found, 0, &again));
  const void* copy = NULL;
  uint64_t copied = 0;
  OK(gyre_bytes_get(again, &copy, &copied));
  CHECK(copied == bytes && same_bits(copy, data, bytes));
  gyre_bytes_destroy(page);
  gyre_bytes_destroy(again);

  OK(gyre_kv_sequence_clear(found));
  gyre_kv_sequence_destroy(found);
  OK(gyre_kv_pool_save(s->pool, a, path));
  OK(gyre_kv_pool_load(s->pool, path, &found));
  CHECK(remove(path) == 0);
  float expected[kHeads * kDim], got[kHeads * kDim];
  alone(s, a, 1000, expected);
  alone(s, found, 1000, got);
  CHECK(same_bits(expected, got, sizeof got));
  gyre_kv_sequence_destroy(a);
  gyre_kv_sequence_destroy(found);
}

// A recorded step serves every step within the batch's bounds.
static void test_graph(const Server* s) {
  gyre_tensor* q = floats(s->device, 64, kHeads, kDim);
  gyre_tensor* k = floats(s->device, 64, kKvHeads, kDim);
  gyre_tensor* out = floats(s->device, 64, kHeads, kDim);
  fill(q, 1);
  fill(k, 2);
  const gyre_attend_inputs attend = {.size = sizeof attend, .q = q, .out = out};
  OK(gyre_kv_batch_record(s->batch));
  gyre_tensor* positions = NULL;
  OK(gyre_kv_batch_positions(s->batch, 0, &positions));
  gyre_tensor_info info = {.size = sizeof info};
  OK(gyre_tensor_get_info(positions, &info));
  CHECK(info.dtype == GYRE_I32 && info.shape[0] == 64);
  gyre_tensor_destroy(positions);
  OK(gyre_kv_batch_append(s->batch, s->encoder, 0, k, k));
  OK(gyre_kv_batch_attend(s->batch, s->encoder, 0, &attend, NULL));
  gyre_graph* graph = NULL;
  OK(gyre_encoder_instantiate(s->encoder, &graph));
  OK(gyre_kv_batch_end_step(s->batch, GYRE_STEP_CHECKED));

  gyre_kv_sequence* a = sequence(s);
  const gyre_kv_step five = {.size = sizeof five, .sequence = a, .tokens = 5};
  for (int i = 0; i < 3; ++i) {
    OK(gyre_kv_batch_begin_step(s->batch, s->encoder, &five, 1));
    OK(gyre_encoder_submit(s->encoder, NULL));
    OK(gyre_graph_replay(graph, NULL));
    OK(gyre_kv_batch_end_step(s->batch, GYRE_STEP_CHECKED));
  }
  OK(gyre_device_wait(s->device));
  uint64_t length = 0;
  OK(gyre_kv_sequence_length(a, &length));
  CHECK(length == 15 && values(out)[0] != 0);

  // A step that did not happen.
  OK(gyre_kv_batch_begin_step(s->batch, s->encoder, &five, 1));
  OK(gyre_encoder_clear(s->encoder));
  OK(gyre_kv_batch_rollback(s->batch));
  OK(gyre_kv_sequence_length(a, &length));
  CHECK(length == 15);
  gyre_kv_sequence_destroy(a);
  gyre_graph_destroy(graph);
  gyre_tensor_destroy(q);
  gyre_tensor_destroy(k);
  gyre_tensor_destroy(out);
}

static void test_refusals(const Server* s) {
  gyre_kv_sequence* a = sequence(s);
  gyre_kv_step steps[2] = {{.size = sizeof steps[0], .sequence = a, .tokens = 1},
                           {.size = sizeof steps[0], .sequence = a, .tokens = 1}};
  REFUSED(gyre_kv_batch_begin_step(s->batch, s->encoder, steps, 2),
          "kv_batch.begin_step: a sequence is there twice");
  steps[1].sequence = NULL;
  REFUSED(gyre_kv_batch_begin_step(s->batch, s->encoder, steps, 2),
          "gyre_kv_batch_begin_step: steps.sequence is NULL");
  steps[1].size = 24;
  REFUSED(gyre_kv_batch_begin_step(s->batch, s->encoder, steps, 2), "steps[1].size is 24");
  steps[0].tokens = 0;
  REFUSED(gyre_kv_batch_begin_step(s->batch, s->encoder, steps, 1), "kv_batch.begin_step: from 1 to");
  REFUSED(gyre_kv_batch_begin_step(s->batch, s->encoder, NULL, 1), "steps is NULL");
  REFUSED(gyre_kv_batch_begin_step(s->batch, s->encoder, NULL, 0), "kv_batch.begin_step: from 1 to");
  gyre_kv_group_info group = {.size = sizeof group};
  REFUSED(gyre_kv_pool_describe_group(s->pool, 1, &group), "there are 1 groups, got group 1");
  OK(gyre_kv_pool_describe_group(s->pool, 0, &group));
  REFUSED(gyre_kv_pool_describe_group(s->pool, 0, NULL), "info is NULL");
  CHECK(strcmp(group.name, "all keys") == 0);  // a refused call leaves what was handed out
  gyre_kv_sequence_destroy(a);
}

// What a call hands out stays, however often and by whom the pool is described again.
static void* describe_often(void* given) {
  gyre_kv_pool* const pool = given;
  for (int i = 0; i < 20000; ++i) {
    gyre_kv_group_info group = {.size = sizeof group};
    if (gyre_kv_pool_describe_group(pool, 0, &group) != GYRE_OK) {
      CHECK(strstr(gyre_last_error(), "another thread") != NULL);
      continue;
    }
    CHECK(strcmp(group.name, "all keys") == 0 && group.layers[0] == 0);
  }
  return NULL;
}

static void test_threads(const Server* s) {
  gyre_kv_group_info group = {.size = sizeof group};
  OK(gyre_kv_pool_describe_group(s->pool, 0, &group));
  const char* const name = group.name;
  pthread_t other;
  CHECK(pthread_create(&other, NULL, describe_often, s->pool) == 0);
  describe_often(s->pool);
  CHECK(pthread_join(other, NULL) == 0);
  CHECK(strcmp(name, "all keys") == 0);
}

int main(int argc, char** argv) {
  CHECK(argc == 2);  // a path for files
  const Server s = make_server();
  test_forks(&s);
  test_prefixes_and_pages(&s, argv[1]);
  test_graph(&s);
  test_refusals(&s);
  test_threads(&s);

  // A step is begun, and then all goes, the oldest handles first.
  gyre_kv_sequence* a = prompt(&s);
  gyre_kv_sequence* b = prompt(&s);
  const gyre_kv_step steps[2] = {{.size = sizeof steps[0], .sequence = a, .tokens = 1},
                                 {.size = sizeof steps[0], .sequence = b, .tokens = 1}};
  OK(gyre_kv_batch_begin_step(s.batch, s.encoder, steps, 2));
  gyre_device_destroy(s.device);
  gyre_kv_pool_destroy(s.pool);
  gyre_kv_sequence_destroy(a);
  gyre_kv_batch_destroy(s.batch);
  uint64_t length = 0;
  OK(gyre_kv_sequence_length(b, &length));
  CHECK(length == kPrompt);
  gyre_encoder_destroy(s.encoder);
  gyre_kv_sequence_destroy(b);
  return 0;
}
