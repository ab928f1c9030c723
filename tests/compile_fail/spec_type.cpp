// A kernel takes its own Spec, even where another has the same size.
#include "abi/kernels.h"
#include "runtime/recorder.h"

struct OtherSpec {
  uint64_t key;
};

#if defined(GYRE_BREAK)
using Spec = OtherSpec;
#else
using Spec = gyre::abi::KvCopySpec;
#endif

void record(gyre::Recording& recording) {
  recording.dispatch(gyre::kKvCopy, Spec{}, gyre::abi::KvCopyParams{}, {});
}
