#pragma once

// Gyre for C and for every language that can call C (docs/c_api.md). Each call does what the C++
// call of the same name does; the C++ headers say what that is, these say what is C's own.
//
// Handles are opaque. A call that returns one through its last argument makes a new handle, which
// its _destroy() frees; what handles share lives as long as one of them, so that they may be
// destroyed in any order. _destroy(NULL) does nothing.
//
// Calls return a status; gyre_last_error() has the message. A NULL that a comment does not allow is
// refused. In the structs of inputs a NULL tensor is one that is left out.
//
// Structs begin with `size`: set it to sizeof, and all else to 0. Every 0 means the default that
// the comment names. Options may be NULL: all defaults. A library newer than its caller takes the
// fields that the caller does not know as 0; an older one refuses what it does not know, unless
// it is 0. Arrays hold structs of one size.
#include "gyre/c/attention.h"      // IWYU pragma: export
#include "gyre/c/base.h"           // IWYU pragma: export
#include "gyre/c/calibration.h"    // IWYU pragma: export
#include "gyre/c/custom_kernel.h"  // IWYU pragma: export
#include "gyre/c/device.h"         // IWYU pragma: export
#include "gyre/c/encoder.h"        // IWYU pragma: export
#include "gyre/c/fence.h"          // IWYU pragma: export
#include "gyre/c/format.h"         // IWYU pragma: export
#include "gyre/c/graph.h"          // IWYU pragma: export
#include "gyre/c/kv_batch.h"       // IWYU pragma: export
#include "gyre/c/kv_cache.h"       // IWYU pragma: export
#include "gyre/c/kv_pool.h"        // IWYU pragma: export
#include "gyre/c/pages.h"          // IWYU pragma: export
#include "gyre/c/prepare.h"        // IWYU pragma: export
#include "gyre/c/quantize.h"       // IWYU pragma: export
#include "gyre/c/rope.h"           // IWYU pragma: export
#include "gyre/c/rope_append.h"    // IWYU pragma: export
#include "gyre/c/snapshot.h"       // IWYU pragma: export
#include "gyre/c/tensor.h"         // IWYU pragma: export
#include "gyre/c/write.h"          // IWYU pragma: export
