#pragma once

#include <vector>

#include "c_api/enums.h"
#include "c_api/structs.h"
#include "gyre/c/attention.h"
#include "gyre/c/calibration.h"
#include "gyre/c/kv_cache.h"
#include "gyre/c/rope_append.h"
#include "gyre/c/write.h"
#include "gyre/gyre.h"

// Structs that several calls take. Each refuses with the path of the field, from `name` on.
namespace gyre::c_api {

std::optional<RopeOptions> rope_options(const gyre_rope_options* options, int32_t no_rope,
                                        const char* name);
RopeNorm rope_norm(const gyre_rope_norm* norm, const char* name);
RopeAppendInputs rope_append_inputs(const gyre_rope_append_inputs* inputs);
RopeAppendOptions rope_append_options(const gyre_rope_append_options* options);
inline KvStepEnd step_end(gyre_step_end how) {
  return same_number<KvStepEnd>(how, {KvStepEnd::checked, KvStepEnd::captured}, "how");
}
AttendOptions attend_options(const gyre_attend_options* options);
KvRange kv_range(const gyre_kv_range* options);
KvLayer kv_layer(const gyre_kv_layer& given);
KvCalibration kv_calibration(const gyre_kv_calibration* calibration, const char* name);
std::vector<KvLayerCalibration> kv_calibrations(const gyre_kv_calibration* calibrations,
                                                uint64_t count);
std::vector<KvLayer> kv_layers(const gyre_kv_layer* layers, uint64_t count);

}  // namespace gyre::c_api
