// A kernel takes its own Params and no others.
#include "abi/kernels.h"
#include "runtime/recorder.h"

struct OtherParams {
  uint64_t tokens;
};

#if defined(GYRE_BREAK)
using Params = OtherParams;
#else
using Params = gyre::abi::KvCopyParams;
#endif

void record(gyre::Recording& recording) {
  recording.dispatch(gyre::kKvCopy, gyre::abi::KvCopySpec{}, Params{}, {});
}
