#pragma once

#include <functional>
#include <string>
#include <vector>

#include "runtime/build_queue.h"
#include "runtime/device_impl.h"

namespace gyre {

struct BuildTask {
  std::string name;
  std::function<bool()> make;  // whether it was there already, or in a cache; throws why it cannot
};

// Runs the tasks on the queue's threads and tells of each that succeeded, in the caller's thread.
// Throws, at the end, what the first that failed threw: DeviceImpl::build.
void build_all(BuildQueue& queue, const std::vector<BuildTask>& tasks, const BuildCallback& built);

}  // namespace gyre
