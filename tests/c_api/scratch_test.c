// Memory that a caller of attention keeps, scratch and schedule: who makes the handle, when it is
// replaced, and that a refused call leaves it. Nothing runs: a stand-in for the driver will do.
#include "check.h"

enum { kDim = 128, kPageTokens = 16 };

typedef struct Setup {
  gyre_device* device;
  gyre_encoder* encoder;
  gyre_kv_pages* pages;
  gyre_tensor *table, *lengths, *begin;
} Setup;

static gyre_tensor* tensor_of(const gyre_device* device, gyre_dtype dtype, uint32_t rank,
                              uint64_t a, uint64_t b, uint64_t c) {
  const uint64_t shape[3] = {a, b, c};
  gyre_tensor* made = NULL;
  OK(gyre_tensor_create(device, dtype, rank, shape, &made));
  return made;
}

static Setup open_on(const char* name) {
  Setup s = {0};
  OK(gyre_device_open(name, NULL, &s.device));
  OK(gyre_encoder_create(s.device, &s.encoder));
  const gyre_kv_page_shape shape = {.size = sizeof shape,
                                    .kv_heads = 1,
                                    .head_dim = kDim,
                                    .page_tokens = kPageTokens,
                                    .k = GYRE_KV_TQ4,
                                    .v = GYRE_KV_TQ4};
  OK(gyre_kv_pages_allocate(s.device, &shape, 4, &s.pages));
  s.table = tensor_of(s.device, GYRE_I32, 2, 1, 4, 0);
  s.lengths = tensor_of(s.device, GYRE_I32, 1, 1, 0, 0);
  s.begin = tensor_of(s.device, GYRE_I32, 1, 2, 0, 0);
  return s;
}

static void close_all(Setup* s) {
  gyre_tensor_destroy(s->table);
  gyre_tensor_destroy(s->lengths);
  gyre_tensor_destroy(s->begin);
  gyre_kv_pages_destroy(s->pages);
  gyre_encoder_destroy(s->encoder);
  gyre_device_destroy(s->device);
}

static const gyre_paged_attention_options kOptions = {
    .size = sizeof kOptions, .max_kv_length = 64, .settled_keys = 1, .min_query_length = 1};

static gyre_status make_schedule(const Setup* s, uint64_t heads, const gyre_tensor* lengths,
                                 gyre_tensor** schedule) {
  const gyre_attention_schedule_inputs inputs = {.size = sizeof inputs,
                                                 .pages = s->pages,
                                                 .tokens = 1,
                                                 .heads = heads,
                                                 .q_dtype = GYRE_F16,
                                                 .kv_lengths = lengths,
                                                 .cu_seqlens_q = s->begin};
  const gyre_status status = gyre_attention_schedule(s->encoder, &inputs, &kOptions, schedule);
  OK(gyre_encoder_clear(s->encoder));
  return status;
}

// One token of `heads` heads; the list is dropped, the scratch memory stays.
static gyre_status record_with(const Setup* s, uint64_t heads, const gyre_tensor* table,
                               gyre_tensor** scratch, const gyre_tensor* schedule) {
  gyre_tensor *q = tensor_of(s->device, GYRE_F16, 3, 1, heads, kDim),
              *out = tensor_of(s->device, GYRE_F16, 3, 1, heads, kDim);
  const gyre_paged_attention_inputs inputs = {.size = sizeof inputs,
                                              .q = q,
                                              .pages = s->pages,
                                              .page_table = table,
                                              .kv_lengths = s->lengths,
                                              .cu_seqlens_q = s->begin,
                                              .out = out,
                                              .scratch = scratch,
                                              .schedule = schedule};
  const gyre_status status = gyre_paged_attention(s->encoder, &inputs, &kOptions);
  OK(gyre_encoder_clear(s->encoder));
  gyre_tensor_destroy(q);
  gyre_tensor_destroy(out);
  return status;
}

static gyre_status record(const Setup* s, uint64_t heads, const gyre_tensor* table,
                          gyre_tensor** scratch) {
  return record_with(s, heads, table, scratch, NULL);
}

static gyre_tensor_info info_of(const gyre_tensor* tensor) {
  gyre_tensor_info info = {.size = sizeof info};
  OK(gyre_tensor_get_info(tensor, &info));
  return info;
}

static void test_on_cuda(void) {
  Setup s = open_on("cuda:0");
  gyre_tensor* scratch = NULL;
  REFUSED(record(&s, 4, s.lengths, &scratch), "page_table");
  CHECK(scratch == NULL);
  OK(record(&s, 4, s.table, &scratch));
  CHECK(scratch != NULL);
  const gyre_tensor_info few = info_of(scratch);
  const gyre_tensor* const first = scratch;
  OK(record(&s, 4, s.table, &scratch));
  CHECK(scratch == first && info_of(scratch).address == few.address);
  REFUSED(record(&s, 4, s.lengths, &scratch), "page_table");
  CHECK(scratch == first);
  OK(record(&s, 16, s.table, &scratch));  // more rows in a block
  const gyre_tensor_info many = info_of(scratch);
  CHECK(many.bytes > few.bytes && many.address != few.address);
  const gyre_tensor* const second = scratch;
  OK(record(&s, 4, s.table, &scratch));
  CHECK(scratch == second && info_of(scratch).address == many.address);
  OK(record(&s, 4, s.table, NULL));
  gyre_tensor_destroy(scratch);
  close_all(&s);
}

// A prompt of `tokens` into a new cache; the list is dropped, the scratch memory stays.
static void record_prompt(const gyre_device* device, uint64_t tokens, gyre_tensor** scratch) {
  const gyre_kv_layer layer = {.size = sizeof layer, .k = GYRE_KV_TQ8, .v = GYRE_KV_TQ8};
  const gyre_kv_cache_options options = {.size = sizeof options,
                                         .kv_heads = 1,
                                         .head_dim = kDim,
                                         .capacity = tokens,
                                         .layers = &layer,
                                         .layer_count = 1};
  gyre_kv_cache* cache = NULL;
  OK(gyre_kv_cache_create(device, &options, &cache));
  gyre_encoder* encoder = NULL;
  OK(gyre_encoder_create(device, &encoder));
  gyre_tensor *q = tensor_of(device, GYRE_F16, 3, tokens, 4, kDim),
              *out = tensor_of(device, GYRE_F16, 3, tokens, 4, kDim),
              *rows = tensor_of(device, GYRE_F16, 3, tokens, 1, kDim);
  OK(gyre_kv_cache_begin_step(cache, encoder, tokens));
  OK(gyre_kv_cache_append(cache, encoder, 0, rows, rows));
  gyre_attend_inputs inputs = {.size = sizeof inputs, .q = q, .out = rows, .scratch = scratch};
  const gyre_tensor* const before = scratch != NULL ? *scratch : NULL;
  REFUSED(gyre_kv_cache_attend(cache, encoder, 0, &inputs, NULL), "out");
  CHECK(scratch == NULL || *scratch == before);
  inputs.out = out;
  OK(gyre_kv_cache_attend(cache, encoder, 0, &inputs, NULL));
  OK(gyre_encoder_clear(encoder));
  gyre_tensor_destroy(q);
  gyre_tensor_destroy(out);
  gyre_tensor_destroy(rows);
  gyre_encoder_destroy(encoder);
  gyre_kv_cache_destroy(cache);
}

// Prompts of `tokens` over the keys of a buffer.
static gyre_status record_rows(const gyre_device* device, uint64_t tokens, uint64_t length,
                               gyre_tensor** scratch) {
  gyre_kv_shape shape = {.size = sizeof shape,
                         .format = GYRE_KV_TQ8,
                         .role = GYRE_KV_ROLE_K,
                         .kv_heads = 1,
                         .capacity = 1024,
                         .head_dim = kDim};
  gyre_kv_buffer *k = NULL, *v = NULL;
  OK(gyre_kv_buffer_allocate(device, &shape, &k));
  shape.role = GYRE_KV_ROLE_V;
  OK(gyre_kv_buffer_allocate(device, &shape, &v));
  gyre_tensor *q = tensor_of(device, GYRE_F16, 3, tokens, 4, kDim),
              *out = tensor_of(device, GYRE_F16, 3, tokens, 4, kDim);
  gyre_encoder* encoder = NULL;
  OK(gyre_encoder_create(device, &encoder));
  const gyre_attention_inputs inputs = {.size = sizeof inputs,
                                        .q = q,
                                        .k_cache = k,
                                        .v_cache = v,
                                        .out = out,
                                        .scratch = scratch};
  const gyre_attention_options options = {.size = sizeof options, .length = length};
  const gyre_status status = gyre_attention(encoder, &inputs, &options);
  gyre_encoder_destroy(encoder);
  gyre_tensor_destroy(q);
  gyre_tensor_destroy(out);
  gyre_kv_buffer_destroy(k);
  gyre_kv_buffer_destroy(v);
  return status;
}

static void test_rows(void) {
  gyre_device* device = NULL;
  OK(gyre_device_open("cuda:0", NULL, &device));
  gyre_tensor* scratch = NULL;
  REFUSED(record_rows(device, 128, 1025, &scratch), "length");
  CHECK(scratch == NULL);
  OK(record_rows(device, 1, 1024, &scratch));  // splits, which the kernel reduces
  CHECK(scratch != NULL);
  const gyre_tensor_info few = info_of(scratch);
  OK(record_rows(device, 128, 1024, &scratch));  // unpacked keys
  const gyre_tensor_info many = info_of(scratch);
  CHECK(many.bytes > few.bytes && many.address != few.address);
  const gyre_tensor* const kept = scratch;
  REFUSED(record_rows(device, 128, 1025, &scratch), "length");
  OK(record_rows(device, 1, 1024, &scratch));
  OK(record_rows(device, 128, 512, &scratch));
  CHECK(scratch == kept && info_of(scratch).address == many.address);
  gyre_tensor* wrong = tensor_of(device, GYRE_U8, 1, 64, 0, 0);
  const gyre_tensor* const given = wrong;
  REFUSED(record_rows(device, 1, 1024, &wrong), "scratch");
  CHECK(wrong == given);
  gyre_tensor_destroy(wrong);
  OK(record_rows(device, 128, 1024, NULL));
  gyre_tensor_destroy(scratch);
  gyre_device_destroy(device);
}

static void test_caches(const char* name, int takes_memory) {
  gyre_device* device = NULL;
  OK(gyre_device_open(name, NULL, &device));
  gyre_tensor* scratch = NULL;
  record_prompt(device, 256, &scratch);
  CHECK((scratch != NULL) == takes_memory);
  const gyre_tensor* const first = scratch;
  record_prompt(device, 256, &scratch);
  CHECK(scratch == first);
  record_prompt(device, 512, &scratch);
  CHECK((scratch != first) == takes_memory);
  record_prompt(device, 512, NULL);
  gyre_tensor_destroy(scratch);
  gyre_device_destroy(device);
}

static void test_schedule(void) {
  Setup s = open_on("cuda:0");
  gyre_tensor* schedule = NULL;
  REFUSED(make_schedule(&s, 4, s.table, &schedule), "kv_lengths");
  REFUSED(make_schedule(&s, 4, s.lengths, NULL), "schedule");
  CHECK(schedule == NULL);
  OK(make_schedule(&s, 4, s.lengths, &schedule));
  CHECK(schedule != NULL);
  const gyre_tensor* const first = schedule;
  OK(make_schedule(&s, 4, s.lengths, &schedule));
  CHECK(schedule == first);
  OK(record_with(&s, 4, s.table, NULL, schedule));
  REFUSED(record_with(&s, 4, s.table, NULL, s.begin), "schedule");
  gyre_tensor_destroy(schedule);
  close_all(&s);
}

static void test_on_the_cpu(void) {
  Setup s = open_on("cpu");
  gyre_tensor* scratch = NULL;
  OK(record(&s, 4, s.table, &scratch));
  CHECK(scratch == NULL);
  gyre_tensor* schedule = NULL;
  OK(make_schedule(&s, 4, s.lengths, &schedule));
  CHECK(schedule == NULL);
  close_all(&s);
}

int main(void) {
  test_on_the_cpu();
  test_on_cuda();
  test_schedule();
  test_rows();
  test_caches("cpu", 0);
  test_caches("cuda:0", 1);
  return 0;
}
