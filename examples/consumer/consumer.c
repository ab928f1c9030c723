// The installed C ABI: eight values, rotated and rotated back.
#include <gyre/gyre_c.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kCount = 8 };

static void ok(gyre_status status) {
  if (status == GYRE_OK) return;
  fprintf(stderr, "%s: %s\n", gyre_status_name(status), gyre_last_error());
  exit(1);
}

int main(void) {
  gyre_device* device = NULL;
  gyre_encoder* encoder = NULL;
  gyre_tensor* x = NULL;
  gyre_fence* fence = NULL;
  float values[kCount] = {1, 2, 3, 4, 5, 6, 7, 8};
  const uint64_t shape[2] = {1, kCount};
  ok(gyre_device_open("cpu", NULL, &device));
  ok(gyre_encoder_create(device, &encoder));
  ok(gyre_tensor_create(device, GYRE_F32, 2, shape, &x));
  ok(gyre_tensor_write(x, values, sizeof values));
  const gyre_hadamard_inputs inputs = {.size = sizeof inputs, .x = x, .out = x};
  const gyre_hadamard_options back = {.size = sizeof back, .direction = GYRE_HADAMARD_INVERSE};
  ok(gyre_hadamard(encoder, &inputs, NULL));
  ok(gyre_hadamard(encoder, &inputs, &back));
  ok(gyre_encoder_submit(encoder, &fence));
  ok(gyre_fence_wait(fence));
  ok(gyre_tensor_read(x, values, sizeof values));
  for (int i = 0; i < kCount; ++i) {
    if (fabsf(values[i] - (float)(i + 1)) > 1e-5f) return 1;
  }
  printf("Gyre %s, as C sees it\n", gyre_version());
  gyre_fence_destroy(fence);
  gyre_tensor_destroy(x);
  gyre_encoder_destroy(encoder);
  gyre_device_destroy(device);
  return 0;
}
