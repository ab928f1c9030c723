// A kernel of the caller's between Gyre's ops: order, graphs, user data, names, refusals.
#include "check.h"

enum { kCount = 1000 };

static gyre_device* device;
static gyre_encoder* encoder;

typedef struct Seen {
  uint32_t tasks;
  float last;
} Seen;

typedef struct ScaleParams {
  Seen* seen;  // user data, one entry for each task
  uint64_t count;
  float factor;
  uint32_t unused;
} ScaleParams;

// out = factor x + (bias, if it is there)
static void scale_task(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) {
  const ScaleParams* p = (const ScaleParams*)params;
  const float* x = (const float*)(uintptr_t)args[0];
  float* out = (float*)(uintptr_t)args[1];
  const float* bias = (const float*)(uintptr_t)args[2];
  for (uint64_t i = task; i < p->count; i += tasks)
    out[i] = p->factor * x[i] + (bias != NULL ? bias[i] : 0.0f);
  if (p->seen != NULL) p->seen[task] = (Seen){tasks, p->factor};
}

static const gyre_custom_arg kArgs[3] = {
    {.size = sizeof kArgs[0], .name = "x"},
    {.size = sizeof kArgs[0], .name = "out", .access = GYRE_WRITE},
    {.size = sizeof kArgs[0], .name = "bias", .access = GYRE_READ}};

static gyre_custom_code scale_code(void) {
  const gyre_custom_code code = {.size = sizeof code,
                                 .name = "scale",
                                 .args = kArgs,
                                 .arg_count = 3,
                                 .params_bytes = sizeof(ScaleParams),
                                 .cpu = scale_task};
  return code;
}

static gyre_custom_kernel* make(const gyre_custom_code* code) {
  gyre_custom_kernel* kernel = NULL;
  OK(gyre_custom_kernel_create(code, &kernel));
  return kernel;
}

static gyre_custom_call scale_call(const ScaleParams* params, const gyre_tensor* const* args) {
  const gyre_custom_call call = {.size = sizeof call,
                                 .params = params,
                                 .params_bytes = sizeof *params,
                                 .args = args,
                                 .arg_count = 3,
                                 .tasks = 3,
                                 .grid = {8}};
  return call;
}

static void record(const gyre_custom_kernel* kernel, float factor, const gyre_tensor* x,
                   const gyre_tensor* out, const gyre_tensor* bias, Seen* seen) {
  const ScaleParams params = {seen, kCount, factor, 0};
  const gyre_tensor* const args[3] = {x, out, bias};
  const gyre_custom_call call = scale_call(&params, args);
  OK(gyre_custom_kernel_record(kernel, encoder, &call));
}

// The kernel's handle and its description are gone when the list runs.
static void test_lists_and_graphs(void) {
  gyre_tensor *x = floats(device, 1, kCount / 8, 8), *a = floats(device, 1, kCount / 8, 8),
              *b = floats(device, 1, kCount / 8, 8), *copied = floats(device, 1, kCount / 8, 8);
  fill(x, 1);
  Seen seen[3] = {{0, 0}, {0, 0}, {0, 0}};
  char name[] = "scale";
  gyre_custom_code code = scale_code();
  code.name = name;
  gyre_custom_kernel* kernel = make(&code);
  int32_t yes = 0;
  OK(gyre_supports_custom_kernel(device, kernel, &yes));
  CHECK(yes == 1);
  name[0] = '?';
  const gyre_kv_copy_inputs copy = {.size = sizeof copy, .k = b, .k_cache = copied};
  record(kernel, 2, x, a, NULL, NULL);
  record(kernel, 0.5f, a, b, x, seen);  // x + x: waits for a
  OK(gyre_kv_copy(encoder, &copy, NULL));
  record(kernel, 3, x, a, NULL, NULL);  // a was read: waits
  gyre_custom_kernel_destroy(kernel);
  uint32_t commands = 0, barriers = 0;
  OK(gyre_encoder_size(encoder, &commands));
  OK(gyre_encoder_barriers(encoder, &barriers));
  CHECK(commands == 4 && barriers == 2);
  gyre_graph* graph = NULL;
  OK(gyre_encoder_instantiate(encoder, &graph));
  for (uint32_t seed = 1; seed <= 2; ++seed) {
    fill(x, seed);
    gyre_fence* fence = NULL;
    OK(gyre_graph_replay(graph, &fence));
    OK(gyre_fence_wait(fence));
    gyre_fence_destroy(fence);
    for (int i = 0; i < kCount; ++i) {
      const float at = values(x)[i];
      CHECK(values(copied)[i] == 2 * at && values(a)[i] == 3 * at);
    }
  }
  for (int i = 0; i < 3; ++i) CHECK(seen[i].tasks == 3 && seen[i].last == 0.5f);
  gyre_graph_destroy(graph);
  gyre_tensor_destroy(x);
  gyre_tensor_destroy(a);
  gyre_tensor_destroy(b);
  gyre_tensor_destroy(copied);
}

static void test_nothing_to_do(void) {
  gyre_tensor *x = floats(device, 1, 1, kCount), *out = floats(device, 1, 1, kCount);
  fill(x, 1);
  const gyre_custom_code code = scale_code();
  gyre_custom_kernel* kernel = make(&code);
  const ScaleParams params = {NULL, kCount, 2, 0};
  const gyre_tensor* const args[3] = {x, out, NULL};
  gyre_custom_call call = scale_call(&params, args);
  call.tasks = 0;
  OK(gyre_custom_kernel_record(kernel, encoder, &call));
  submit(encoder);
  for (int i = 0; i < kCount; ++i) CHECK(values(out)[i] == 0);
  gyre_custom_kernel_destroy(kernel);
  gyre_tensor_destroy(x);
  gyre_tensor_destroy(out);
}

#define CODE_REFUSED(change, part)                          \
  do {                                                      \
    gyre_custom_code code = scale_code();                   \
    gyre_custom_kernel* none = (gyre_custom_kernel*)&none;  \
    change;                                                 \
    REFUSED(gyre_custom_kernel_create(&code, &none), part); \
    CHECK(none == NULL);                                    \
  } while (0)

static void test_codes_are_checked(void) {
  gyre_custom_arg wrong[2] = {kArgs[0], kArgs[1]};
  CODE_REFUSED(code.size = 7, "code.size");
  CODE_REFUSED(code.name = NULL, "gyre_custom_kernel_create: code.name is NULL");
  CODE_REFUSED(code.name = "", "a kernel must have a name");
  CODE_REFUSED(code.args = NULL, "code.args is NULL");
  CODE_REFUSED(code.arg_count = 0, "from 1 to 16 arguments, got 0");
  CODE_REFUSED(code.arg_count = UINT64_MAX, "code.arg_count is 18446744073709551615, at most 16");
  CODE_REFUSED((wrong[1].access = 3, code.args = wrong, code.arg_count = 2), "access is 3");
  CODE_REFUSED((wrong[1].name = NULL, code.args = wrong, code.arg_count = 2), "name is NULL");
  CODE_REFUSED(code.params_bytes = 0, "from 1 to 1024 bytes, got 0");
  CODE_REFUSED(code.params_bytes = 1025, "got 1025");
  CODE_REFUSED(code.cuda_source = "x", "source and the kernel's name");
  CODE_REFUSED(code.cuda_name = "x", "source and the kernel's name");
  CODE_REFUSED(code.metal_source = "x", "source and the kernel's name");
  CODE_REFUSED(code.metal_name = "x", "source and the kernel's name");
  CODE_REFUSED(code.cpu = NULL, "code for some device");
  const gyre_custom_code code = scale_code();
  gyre_custom_kernel* none = NULL;
  REFUSED(gyre_custom_kernel_create(NULL, &none), "code is NULL");
  REFUSED(gyre_custom_kernel_create(&code, NULL), "kernel is NULL");
}

#define CALL_REFUSED(change, part)                                    \
  do {                                                                \
    gyre_custom_call call = scale_call(&params, args);                \
    change;                                                           \
    REFUSED(gyre_custom_kernel_record(kernel, encoder, &call), part); \
  } while (0)

static void test_calls_are_checked(void) {
  gyre_tensor *x = floats(device, 1, 1, kCount), *out = floats(device, 1, 1, kCount);
  const gyre_custom_code code = scale_code();
  gyre_custom_kernel* kernel = make(&code);
  const ScaleParams params = {NULL, kCount, 2, 0};
  const gyre_tensor* const args[3] = {x, out, NULL};
  CALL_REFUSED(call.size = 0, "call.size");
  CALL_REFUSED(call.params = NULL, "gyre_custom_kernel_record: call.params is NULL");
  CALL_REFUSED(call.params_bytes = 8, "scale: params have 24 bytes, got 8");
  CALL_REFUSED(call.params_bytes = UINT64_MAX, "scale: params have 24 bytes");
  CALL_REFUSED(call.args = NULL, "call.args is NULL");
  CALL_REFUSED(call.arg_count = 2, "scale: there are 3 arguments, got 2");
  CALL_REFUSED(call.arg_count = UINT64_MAX, "at most 16");
  CALL_REFUSED(call.block = 1025, "scale: a block has at most 1024 threads, got 1025");
  CALL_REFUSED(call.grid[1] = 65536, "got 8 x 65536 x 1");
  const gyre_custom_call call = scale_call(&params, args);
  REFUSED(gyre_custom_kernel_record(NULL, encoder, &call), "kernel is NULL");
  REFUSED(gyre_custom_kernel_record(kernel, NULL, &call), "encoder is NULL");
  REFUSED(gyre_custom_kernel_record(kernel, encoder, NULL), "call is NULL");

  gyre_custom_code elsewhere = scale_code();
  elsewhere.cpu = NULL;
  elsewhere.cuda_source = "__global__ void scale() {}";
  elsewhere.cuda_name = "scale";
  gyre_custom_kernel* on_cuda = make(&elsewhere);
  int32_t yes = 1;
  OK(gyre_supports_custom_kernel(device, on_cuda, &yes));
  CHECK(yes == 0);
  REFUSED_AS(GYRE_UNSUPPORTED, gyre_custom_kernel_record(on_cuda, encoder, &call),
             "scale: there is no code for device cpu");
  REFUSED(gyre_supports_custom_kernel(NULL, on_cuda, &yes), "device is NULL");
  uint32_t commands = 1;
  OK(gyre_encoder_size(encoder, &commands));
  CHECK(commands == 0);
  gyre_custom_kernel_destroy(on_cuda);
  gyre_custom_kernel_destroy(kernel);
  gyre_tensor_destroy(x);
  gyre_tensor_destroy(out);
}

int main(void) {
  OK(gyre_device_open("cpu", NULL, &device));
  OK(gyre_encoder_create(device, &encoder));
  test_lists_and_graphs();
  test_nothing_to_do();
  test_codes_are_checked();
  test_calls_are_checked();
  gyre_custom_kernel_destroy(NULL);
  gyre_encoder_destroy(encoder);
  gyre_device_destroy(device);
  return 0;
}
