#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// `fence` may be NULL: the work goes on, nobody waits for it.
GYRE_API gyre_status gyre_graph_replay(const gyre_graph* graph, gyre_fence** fence);
GYRE_API gyre_status gyre_graph_size(const gyre_graph* graph, uint32_t* commands);
GYRE_API void gyre_graph_destroy(gyre_graph* graph);

#ifdef __cplusplus
}
#endif
