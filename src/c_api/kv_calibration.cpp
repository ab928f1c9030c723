#include "c_api/convert.h"
#include "c_api/handles.h"
#include "gyre/c/calibration.h"

namespace gyre::c_api {
namespace {

KvCalibration kv_calibration(const gyre_kv_calibration& given) {
  KvCalibration made{{tensor(given.matrix), tensor(given.inverse), tensor(given.mean)},
                     {tensor(given.factor), tensor(given.diagonal), {}}};
  if (given.gain_count == 0) return made;
  constexpr uint64_t kMax = 1 << 10;  // far more than the library takes
  deref(given.gains, "calibration.gains");
  if (given.gain_count > kMax) refuse("calibration.gain_count cannot be ", given.gain_count);
  made.feedback.gains.assign(given.gains, given.gains + given.gain_count);
  return made;
}

}  // namespace

KvCalibration kv_calibration(const gyre_kv_calibration* calibration, const char* name) {
  return kv_calibration(read_or_default(calibration, name));
}

std::vector<KvLayerCalibration> kv_calibrations(const gyre_kv_calibration* calibrations,
                                                uint64_t count) {
  if (count % 2 != 0) refuse("calibration has K and V of each layer, got an odd count of ", count);
  const std::vector<gyre_kv_calibration> given =
      read_array(calibrations, count, 2 * kKvMaxLayers, "calibration");
  std::vector<KvLayerCalibration> made;
  for (uint64_t i = 0; i < count; i += 2)
    made.push_back({kv_calibration(given[i]), kv_calibration(given[i + 1])});
  return made;
}

}  // namespace gyre::c_api

using namespace gyre::c_api;

gyre_status gyre_kv_transform(gyre_encoder* encoder, const gyre_kv_transform_inputs* inputs) {
  return record(__func__, encoder, inputs, [&](gyre::Encoder& to, const auto& given) {
    gyre::kv_transform(to, {.x = tensor(given.x),
                            .matrix = tensor(given.matrix),
                            .before = tensor(given.before),
                            .after = tensor(given.after),
                            .out = tensor(given.out)});
  });
}
