// Linked into a program, it makes the stand-in the Metal driver before main: devices() lists it.
#include "metal_host/standin_driver.h"

namespace gyre::metal_host {
namespace {

[[maybe_unused]] const bool kInstalled = [] {
  metal::set_driver_for_test(&standin_driver());
  return true;
}();

}  // namespace
}  // namespace gyre::metal_host
