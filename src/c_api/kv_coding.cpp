#include "gyre/c/kv_coding.h"

#include "c_api/convert.h"
#include "c_api/handles.h"

namespace gyre::c_api {
namespace {

KvCoding kv_coding(const gyre_kv_coding& given) {
  KvCoding made{{tensor(given.matrix), tensor(given.inverse), tensor(given.mean)},
                {tensor(given.factor), tensor(given.diagonal), {}}};
  if (given.gain_count == 0) return made;
  constexpr uint64_t kMost = 1 << 10;  // far more than the library takes
  deref(given.gains, "coding.gains");
  if (given.gain_count > kMost) refuse("coding.gain_count cannot be ", given.gain_count);
  made.shaping.gains.assign(given.gains, given.gains + given.gain_count);
  return made;
}

}  // namespace

KvCoding kv_coding(const gyre_kv_coding* coding, const char* name) {
  return kv_coding(read_or_default(coding, name));
}

std::vector<KvLayerCoding> kv_codings(const gyre_kv_coding* codings, uint64_t count) {
  if (count % 2 != 0) refuse("coding has K and V of each layer, got an odd count of ", count);
  const std::vector<gyre_kv_coding> given = read_array(codings, count, 2 * kKvMostLayers, "coding");
  std::vector<KvLayerCoding> made;
  for (uint64_t i = 0; i < count; i += 2)
    made.push_back({kv_coding(given[i]), kv_coding(given[i + 1])});
  return made;
}

}  // namespace gyre::c_api

using namespace gyre::c_api;

gyre_status gyre_kv_basis(gyre_encoder* encoder, const gyre_kv_basis_inputs* inputs) {
  return guard(__func__, [&] {
    const gyre_kv_basis_inputs given = read(inputs, "inputs");
    gyre::kv_basis(deref(encoder, "encoder").value, {.x = tensor(given.x),
                                                     .matrix = tensor(given.matrix),
                                                     .before = tensor(given.before),
                                                     .after = tensor(given.after),
                                                     .out = tensor(given.out)});
  });
}
