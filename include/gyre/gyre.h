#pragma once

#include "gyre/attention.h"      // IWYU pragma: export
#include "gyre/calibration.h"    // IWYU pragma: export
#include "gyre/custom_kernel.h"  // IWYU pragma: export
#include "gyre/device.h"         // IWYU pragma: export
#include "gyre/dtype.h"          // IWYU pragma: export
#include "gyre/encoder.h"        // IWYU pragma: export
#include "gyre/error.h"          // IWYU pragma: export
#include "gyre/export.h"         // IWYU pragma: export
#include "gyre/fence.h"          // IWYU pragma: export
#include "gyre/format.h"         // IWYU pragma: export
#include "gyre/graph.h"          // IWYU pragma: export
#include "gyre/kv_batch.h"       // IWYU pragma: export
#include "gyre/kv_cache.h"       // IWYU pragma: export
#include "gyre/kv_pool.h"        // IWYU pragma: export
#include "gyre/pages.h"          // IWYU pragma: export
#include "gyre/prepare.h"        // IWYU pragma: export
#include "gyre/quantize.h"       // IWYU pragma: export
#include "gyre/rope.h"           // IWYU pragma: export
#include "gyre/rope_append.h"    // IWYU pragma: export
#include "gyre/snapshot.h"       // IWYU pragma: export
#include "gyre/tensor.h"         // IWYU pragma: export
#include "gyre/trace.h"          // IWYU pragma: export
#include "gyre/version.h"        // IWYU pragma: export
#include "gyre/write.h"          // IWYU pragma: export
