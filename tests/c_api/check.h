#pragma once

// What the tests in C need: stop at the first thing that is wrong, and say where.
#include <gyre/gyre_c.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(holds)                                                            \
  do {                                                                          \
    if (!(holds)) {                                                             \
      fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #holds); \
      exit(1);                                                                  \
    }                                                                           \
  } while (0)

#define OK(call)                                                                                \
  do {                                                                                          \
    const gyre_status got_ = (call);                                                            \
    if (got_ != GYRE_OK) {                                                                      \
      fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call, gyre_status_name(got_), \
              gyre_last_error());                                                               \
      exit(1);                                                                                  \
    }                                                                                           \
  } while (0)

// `part` must stand in the message.
#define REFUSED_AS(status, call, part)                                                          \
  do {                                                                                          \
    const gyre_status got_ = (call);                                                            \
    if (got_ != (status) || strstr(gyre_last_error(), (part)) == NULL) {                        \
      fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call, gyre_status_name(got_), \
              got_ == GYRE_OK ? "" : gyre_last_error());                                        \
      exit(1);                                                                                  \
    }                                                                                           \
  } while (0)
#define REFUSED(call, part) REFUSED_AS(GYRE_INVALID_ARGUMENT, call, part)

// Bit for bit.
static inline int same_bits(const void* a, const void* b, size_t bytes) {
  return memcmp(a, b, bytes) == 0;
}

static inline gyre_tensor* floats(const gyre_device* device, uint64_t a, uint64_t b, uint64_t c) {
  const uint64_t shape[3] = {a, b, c};
  gyre_tensor* made = NULL;
  OK(gyre_tensor_create(device, GYRE_F32, 3, shape, &made));
  return made;
}

// Writes numbers from -1 to 1, the same for the same seed.
static inline void fill(const gyre_tensor* tensor, uint32_t seed) {
  gyre_tensor_info info = {.size = sizeof info};
  void* data = NULL;
  OK(gyre_tensor_get_info(tensor, &info));
  OK(gyre_tensor_data(tensor, &data));
  for (uint64_t i = 0; i < info.elements; ++i) {
    seed = seed * 1664525u + 1013904223u;
    ((float*)data)[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

static inline const float* values(const gyre_tensor* tensor) {
  const void* data = NULL;
  OK(gyre_tensor_const_data(tensor, &data));
  return (const float*)data;
}

static inline void submit(gyre_encoder* encoder) {
  gyre_fence* fence = NULL;
  OK(gyre_encoder_submit(encoder, &fence));
  OK(gyre_fence_wait(fence));
  gyre_fence_destroy(fence);
}
