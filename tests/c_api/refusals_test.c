// NULL, sizes of structs, values that are none, messages, and what tensors and devices say.
#include "check.h"

static gyre_device* device;
static gyre_encoder* encoder;

static void test_versions(void) {
  char text[32];
  snprintf(text, sizeof text, "%d.%d.%d", GYRE_VERSION_MAJOR, GYRE_VERSION_MINOR,
           GYRE_VERSION_PATCH);
  CHECK(strcmp(gyre_version(), text) == 0);
  CHECK(gyre_abi_version() == GYRE_ABI_VERSION);
  CHECK(strcmp(gyre_status_name(GYRE_OK), "ok") == 0);
  CHECK(strcmp(gyre_status_name(GYRE_IO), "io") == 0);
  CHECK(strcmp(gyre_status_name(GYRE_INTERNAL), "internal") == 0);
  CHECK(strcmp(gyre_status_name(-1), "no gyre_status") == 0);
  CHECK(strcmp(gyre_status_name(GYRE_INTERNAL + 1), "no gyre_status") == 0);
  CHECK(strcmp(gyre_last_error(), "") == 0);
}

static void test_devices(void) {
  gyre_device* none = (gyre_device*)&none;
  REFUSED(gyre_device_open("abacus", NULL, &none), "abacus");
  CHECK(none == NULL);
  REFUSED(gyre_device_open(NULL, NULL, &none), "gyre_device_open: name is NULL");
  REFUSED(gyre_device_open("cpu", NULL, NULL), "gyre_device_open: device is NULL");
  OK(gyre_device_open("cpu", NULL, &device));
  gyre_device_info info = {.size = sizeof info};
  OK(gyre_device_get_info(device, &info));
  CHECK(strcmp(info.name, "cpu") == 0 && info.available && strlen(info.description) > 0);
  CHECK(info.size == sizeof info && info.memory_bytes > 0);

  gyre_device_list* list = NULL;
  uint64_t count = 0;
  OK(gyre_device_list_create(&list));
  OK(gyre_device_list_size(list, &count));
  CHECK(count >= 1);
  OK(gyre_device_list_get(list, 0, &info));
  CHECK(strcmp(info.name, "cpu") == 0);
  REFUSED(gyre_device_list_get(list, count, &info), "gyre_device_list_get: index is");
  gyre_device_list_destroy(list);

  int32_t yes = 0;
  OK(gyre_supports_kv_copy(device, GYRE_F32, GYRE_BF16, &yes));
  CHECK(yes == 1);
  OK(gyre_supports_kv_copy(device, GYRE_F32, GYRE_I64, &yes));
  CHECK(yes == 0);
  OK(gyre_supports_rope(device, GYRE_F16, GYRE_F32, &yes));
  CHECK(yes == 1);
  OK(gyre_supports_kv_quantize(device, GYRE_F32, GYRE_KV_TQ4, &yes));
  CHECK(yes == 1);
  REFUSED(gyre_supports_kv_quantize(device, GYRE_F32, 4, &yes), "format is 4");
  const gyre_attention_types types = {.size = sizeof types, .k = GYRE_KV_TQ8, .paged = 1};
  OK(gyre_supports_attention(device, &types, &yes));
  CHECK(yes == 1);
  const gyre_attention_types latent = {
      .size = sizeof latent, .k = GYRE_KV_MLX_NATIVE4, .v = GYRE_KV_F16, .latent = 1};
  OK(gyre_supports_attention(device, &latent, &yes));
  CHECK(yes == 0);
  uint64_t stream = 1;
  OK(gyre_device_stream(device, &stream));
  CHECK(stream == 0);
}

static void test_tensors(void) {
  const uint64_t shape[3] = {2, 3, 4}, order[3] = {1, 0, 2}, flat[1] = {24},
                 huge[2] = {1u << 31, ~0ull};
  gyre_tensor *t = NULL, *view = NULL;
  REFUSED(gyre_tensor_create(device, 0, 3, shape, &t), "gyre_tensor_create: dtype is 0");
  REFUSED(gyre_tensor_create(device, GYRE_I64 + 1, 3, shape, &t), "dtype is 8");
  REFUSED(gyre_tensor_create(device, GYRE_F32, 7, shape, &t), "rank is 7, at most 6");
  REFUSED(gyre_tensor_create(device, GYRE_F32, 3, NULL, &t), "shape is NULL");
  REFUSED(gyre_tensor_create(NULL, GYRE_F32, 3, shape, &t), "device is NULL");
  REFUSED(gyre_tensor_create(device, GYRE_F32, 2, huge, &t), "");
  const uint64_t terabytes[2] = {1ull << 24, 1ull << 24};
  REFUSED_AS(GYRE_OUT_OF_MEMORY, gyre_tensor_create(device, GYRE_F32, 2, terabytes, &t), "");
  CHECK(t == NULL);
  OK(gyre_tensor_create(device, GYRE_F32, 3, shape, &t));
  float in[24], out[24];
  for (int i = 0; i < 24; ++i) in[i] = (float)i;
  REFUSED(gyre_tensor_write(t, in, 23 * sizeof *in), "the tensor has 96 bytes, got 92");
  REFUSED(gyre_tensor_read(t, out, 25 * sizeof *in), "the tensor has 96 bytes, got 100");
  REFUSED(gyre_tensor_write(t, NULL, sizeof in), "source is NULL");
  REFUSED(gyre_tensor_read(t, NULL, sizeof in), "target is NULL");
  OK(gyre_tensor_write(t, in, sizeof in));
  OK(gyre_tensor_permute(t, 3, order, &view));
  OK(gyre_tensor_read(view, out, sizeof out));
  for (int i = 0; i < 24; ++i) CHECK(out[i] == in[i / 8 * 4 + i / 4 % 2 * 12 + i % 4]);
  gyre_tensor_info info = {.size = sizeof info};
  OK(gyre_tensor_get_info(view, &info));
  CHECK(info.dtype == GYRE_F32 && info.rank == 3 && info.elements == 24 && info.bytes == 96);
  CHECK(info.shape[0] == 3 && info.shape[1] == 2 && info.strides[0] == 4 && info.strides[1] == 12);
  CHECK(!info.contiguous && !info.read_only && info.shape[3] == 0);
  gyre_tensor* no = NULL;
  REFUSED(gyre_tensor_reshape(view, 1, flat, &no), "contiguous");
  void* data = NULL;
  REFUSED(gyre_tensor_data(view, &data), "contiguous");
  gyre_tensor_destroy(view);
  OK(gyre_tensor_reshape(t, 1, flat, &view));
  const uint64_t two[1] = {2}, twelve[1] = {12};
  const gyre_strided_view layout = {
      .size = sizeof layout, .shape = two, .strides = twelve, .offset_elements = 3, .rank = 1};
  OK(gyre_tensor_strided(view, &layout, &no));
  gyre_tensor_destroy(t);
  gyre_tensor_destroy(view);
  OK(gyre_tensor_read(no, out, 2 * sizeof *out));  // the memory lives with its last view
  CHECK(out[0] == 3 && out[1] == 15);
  gyre_tensor_destroy(no);
}

static void count_release(void* context) { ++*(int*)context; }

static void test_wrapped(void) {
  static float numbers[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const uint64_t shape[2] = {2, 4}, strides[2] = {4, 1};
  int released = 0;
  gyre_memory memory = {.size = sizeof memory,
                        .data = NULL,
                        .shape = shape,
                        .strides = strides,
                        .release = count_release,
                        .context = &released,
                        .dtype = GYRE_F32,
                        .rank = 2,
                        .read_only = 1};
  gyre_tensor *t = NULL, *view = NULL;
  REFUSED(gyre_tensor_wrap(device, &memory, &t), "wrap: ");
  memory.data = numbers;
  memory.reserved = 1;
  REFUSED(gyre_tensor_wrap(device, &memory, &t), "memory.reserved must be 0, got 1");
  memory.reserved = 0;
  memory.rank = 7;
  REFUSED(gyre_tensor_wrap(device, &memory, &t), "rank is 7");
  memory.rank = 2;
  CHECK(released == 0);
  OK(gyre_tensor_wrap(device, &memory, &t));
  CHECK(values(t) == numbers);
  void* data = numbers;
  REFUSED(gyre_tensor_data(t, &data), "read-only");
  CHECK(data == NULL);
  OK(gyre_tensor_slice(t, 0, 1, 1, &view));
  gyre_tensor_destroy(t);
  CHECK(released == 0 && values(view)[0] == 5);
  gyre_tensor_destroy(view);
  CHECK(released == 1);
}

// Structs of a caller that is older or newer than the library.
static void test_struct_sizes(void) {
  gyre_tensor* x = floats(device, 1, 1, 64);
  const uint64_t one[1] = {1};
  gyre_tensor* positions = NULL;
  OK(gyre_tensor_create(device, GYRE_I32, 1, one, &positions));
  struct {
    gyre_rope_inputs known;
    uint64_t added[2];
  } newer = {{.size = sizeof newer, .x = x, .positions = positions, .out = x}, {0, 0}};
  OK(gyre_rope(encoder, &newer.known, NULL));
  newer.added[1] = 1;
  REFUSED(gyre_rope(encoder, &newer.known, NULL), "gyre_rope: inputs has 80 bytes, this library (");
  // Older: without k and all after it, which is 0 whatever lies behind the struct.
  struct {
    uint64_t size;
    const gyre_tensor *x, *positions, *out;
    const void* not_mine[4];
  } older = {32, x, positions, x, {&older, &older, &older, &older}};
  OK(gyre_rope(encoder, (const gyre_rope_inputs*)&older, NULL));
  const uint64_t wrong[] = {0, 4, 7, 33, 4104, ~0ull};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    older.size = wrong[i];
    REFUSED(gyre_rope(encoder, (const gyre_rope_inputs*)&older, NULL),
            "gyre_rope: inputs.size must be sizeof the struct, got");
  }
  uint32_t commands = 0;
  OK(gyre_encoder_size(encoder, &commands));
  CHECK(commands == 2);  // refused calls record nothing
  OK(gyre_encoder_clear(encoder));

  // Structs that the library fills: never more bytes than the caller has, 0 in unknown fields.
  struct {
    gyre_memory_use known;
    uint64_t added;
  } larger = {.known = {.size = sizeof larger}, .added = 5};
  OK(gyre_device_memory(device, &larger.known));
  CHECK(larger.added == 0 && larger.known.size == sizeof larger && larger.known.in_use_bytes > 0);
  gyre_memory_use smaller = {.size = 16, .cached_bytes = 77, .reuses = 78};
  OK(gyre_device_memory(device, &smaller));
  CHECK(smaller.in_use_bytes > 0 && smaller.cached_bytes == 77 && smaller.reuses == 78);
  gyre_tensor_destroy(x);
  gyre_tensor_destroy(positions);
}

static void test_null(void) {
  gyre_kv_buffer* buffer = NULL;
  gyre_kv_cache* cache = NULL;
  gyre_kv_pool* pool = NULL;
  gyre_fence* fence = NULL;
  uint64_t number = 0;
  REFUSED(gyre_rope(encoder, NULL, NULL), "gyre_rope: inputs is NULL");
  REFUSED(gyre_attention(encoder, NULL, NULL), "gyre_attention: inputs is NULL");
  const gyre_attention_merge_inputs merge = {.size = sizeof merge};
  REFUSED(gyre_attention_merge(NULL, &merge), "gyre_attention_merge: encoder is NULL");
  REFUSED(gyre_attention_merge(encoder, &merge), "attention_merge: ");  // the op's own
  REFUSED(gyre_kv_buffer_allocate(device, NULL, &buffer), "shape is NULL");
  REFUSED(gyre_kv_cache_create(device, NULL, &cache), "gyre_kv_cache_create: options is NULL");
  REFUSED(gyre_kv_cache_length(NULL, &number), "gyre_kv_cache_length: cache is NULL");
  REFUSED(gyre_kv_pool_create(NULL, NULL, &pool), "NULL");
  REFUSED(gyre_kv_batch_record(NULL), "gyre_kv_batch_record: batch is NULL");
  REFUSED(gyre_kv_sequence_clear(NULL), "sequence is NULL");
  REFUSED(gyre_encoder_submit(NULL, &fence), "gyre_encoder_submit: encoder is NULL");
  REFUSED(gyre_encoder_submit_on(encoder, 0, NULL), "fence is NULL");
  REFUSED_AS(GYRE_UNSUPPORTED, gyre_encoder_submit_on(encoder, 0, &fence), "submit_on");
  REFUSED(gyre_fence_wait(NULL), "gyre_fence_wait: fence is NULL");
  REFUSED(gyre_graph_replay(NULL, NULL), "gyre_graph_replay: graph is NULL");
  REFUSED(gyre_kv_snapshot_inspect(NULL, NULL), "path is NULL");
  REFUSED(gyre_kv_snapshot_verify(NULL), "path is NULL");
  gyre_device_destroy(NULL);
  gyre_device_list_destroy(NULL);
  gyre_tensor_destroy(NULL);
  gyre_encoder_destroy(NULL);
  gyre_fence_destroy(NULL);
  gyre_graph_destroy(NULL);
  gyre_kv_buffer_destroy(NULL);
  gyre_kv_pages_destroy(NULL);
  gyre_kv_cache_destroy(NULL);
  gyre_kv_pool_destroy(NULL);
  gyre_kv_sequence_destroy(NULL);
  gyre_kv_batch_destroy(NULL);
  gyre_bytes_destroy(NULL);
}

static void test_values(void) {
  gyre_kv_format format = 0;
  const char* name = NULL;
  OK(gyre_kv_format_from_name("tq4", &format));
  CHECK(format == GYRE_KV_TQ4);
  OK(gyre_kv_format_name(GYRE_KV_BF16, &name));
  CHECK(strcmp(name, "bf16") == 0);
  REFUSED(gyre_kv_format_name(0, &name), "format is 0, which is no gyre_kv_format");
  REFUSED(gyre_kv_format_from_name("tq1", &format), "tq1");
  const gyre_rope_inputs inputs = {.size = sizeof inputs};
  const gyre_rope_options options = {.size = sizeof options, .mode = 1};
  REFUSED(gyre_rope(encoder, &inputs, &options), "options.mode is 1, which names nothing");
  const gyre_norm_rope_inputs norm_inputs = {.size = sizeof norm_inputs};
  const gyre_rope_options plain = {.size = sizeof plain};
  const gyre_norm_rope_options both = {.size = sizeof both, .rope = &plain, .no_rope = 1};
  REFUSED(gyre_norm_rope(encoder, &norm_inputs, &both), "options.rope is given, and no_rope is 1");
  const gyre_rope_config config = {.size = sizeof config, .rotary_dim = 8};
  double inverse[4], factor = 0;
  REFUSED(gyre_rope_frequencies(&config, inverse, 5, &factor), "there are 4 frequencies");
  OK(gyre_rope_frequencies(&config, inverse, 4, &factor));
  CHECK(inverse[0] == 1 && fabs(inverse[1] - 0.1) < 1e-12 && factor == 1);
  gyre_kv_cache* cache = NULL;
  const gyre_kv_layer layer = {.size = sizeof layer, .v = 99};
  const gyre_kv_cache_options wrong = {.size = sizeof wrong, .layers = &layer, .layer_count = 1};
  REFUSED(gyre_kv_cache_create(device, &wrong, &cache), "layer.v is 99");
  const gyre_kv_cache_options missing = {.size = sizeof missing, .layer_count = 1};
  REFUSED(gyre_kv_cache_create(device, &missing, &cache), "layers is NULL");
  // Counts are checked before anything is read by them.
  const gyre_kv_layer good = {.size = sizeof good, .k = GYRE_KV_F16, .v = GYRE_KV_F16};
  const gyre_kv_cache_options many = {.size = sizeof many, .layers = &good, .layer_count = 1ull << 40};
  REFUSED(gyre_kv_cache_create(device, &many, &cache), "layers: at most 1024, got 1099511627776");
  gyre_kv_pool* pool = NULL;
  const gyre_kv_pool_options pools = {.size = sizeof pools, .layers = &good, .layer_count = 1ull << 40};
  REFUSED(gyre_kv_pool_create(device, &pools, &pool), "layers: at most 1024");
  const gyre_kv_calibration calibration = {.size = sizeof calibration};
  const gyre_kv_cache_options calibrations = {.size = sizeof calibrations,
                                         .layers = &good,
                                         .layer_count = 1,
                                         .calibration = &calibration,
                                         .calibration_count = 1ull << 40};
  REFUSED(gyre_kv_cache_create(device, &calibrations, &cache), "calibration: at most 2048");
  gyre_tensor* table = NULL;
  REFUSED(gyre_rope_table(device, inverse, 1ull << 61, &table), "rope_table: at most 1024");
  const gyre_kv_cache_options empty = {.size = sizeof empty};
  REFUSED(gyre_kv_cache_create(device, &empty, &cache), "kv_cache: ");  // the library's own
}

static void test_trace(void) {
  gyre_bytes* trace = NULL;
  const void* text = NULL;
  uint64_t size = 0;
  gyre_tensor* x = floats(device, 1, 1, 64);
  const gyre_hadamard_inputs inputs = {.size = sizeof inputs, .x = x, .out = x};
  OK(gyre_device_start_trace(device));
  OK(gyre_hadamard(encoder, &inputs, NULL));
  submit(encoder);
  REFUSED(gyre_device_stop_trace(device, 3, &trace), "format is 3");
  OK(gyre_device_stop_trace(device, GYRE_TRACE_TABLE, &trace));
  OK(gyre_bytes_get(trace, &text, &size));
  CHECK(strlen(text) == size && strstr(text, "hadamard") != NULL);
  gyre_bytes_destroy(trace);
  gyre_tensor_destroy(x);
}

static void test_prepare(void) {
  uint64_t kernels = 9;
  gyre_model_shape shape = {
      .size = sizeof shape, .heads = 4, .kv_heads = 2, .head_dim = 64, .context = 256};
  OK(gyre_prepare(device, &shape, NULL, NULL, &kernels));
  CHECK(kernels == 0);  // a CPU has nothing to build
  shape.kv_heads = 3;
  REFUSED(gyre_prepare(device, &shape, NULL, NULL, NULL), "heads");
}

// A handle of another type is refused, as an argument, in a struct and by _destroy().
static void test_handle_types(void) {
  gyre_tensor* x = floats(device, 1, 1, 64);
  uint64_t count = 0;
  REFUSED(gyre_kv_cache_length((gyre_kv_cache*)(void*)x, &count),
          "gyre_kv_cache_length: cache must be a gyre_kv_cache, got a gyre_tensor");
  REFUSED(gyre_kv_sequence_length((gyre_kv_sequence*)(void*)encoder, &count),
          "must be a gyre_kv_sequence, got a gyre_encoder");
  gyre_tensor* made = NULL;
  const uint64_t shape[1] = {1};
  REFUSED(gyre_tensor_create((gyre_device*)(void*)x, GYRE_F32, 1, shape, &made),
          "device must be a gyre_device, got a gyre_tensor");
  const gyre_hadamard_inputs inputs = {
      .size = sizeof inputs, .x = (gyre_tensor*)(void*)encoder, .out = x};
  REFUSED(gyre_hadamard(encoder, &inputs, NULL), "must be a gyre_tensor, got a gyre_encoder");
  uint64_t zeros[8] = {0};
  REFUSED(gyre_kv_cache_length((gyre_kv_cache*)(void*)zeros, &count), "no handle of Gyre's");
  gyre_kv_cache_destroy((gyre_kv_cache*)(void*)x);
  CHECK(strstr(gyre_last_error(), "gyre_kv_cache_destroy: cache must be a gyre_kv_cache") != NULL);
  gyre_tensor_info info = {.size = sizeof info};
  OK(gyre_tensor_get_info(x, &info));  // it is still there
  gyre_tensor_destroy(x);
}

int main(void) {
  test_versions();
  test_devices();
  OK(gyre_encoder_create(device, &encoder));
  test_tensors();
  test_wrapped();
  test_struct_sizes();
  test_null();
  test_values();
  test_trace();
  test_prepare();
  test_handle_types();
  OK(gyre_device_trim(device));
  gyre_device_destroy(device);
  gyre_encoder_destroy(encoder);
  return 0;
}
