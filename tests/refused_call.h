#pragma once
// Refusals as changes to a call that would be fine.

#include <initializer_list>

#include "gyre_test.h"
#include "op_case.h"

// Makes the call `c` wrong; `t` makes tensors.
#define CHANGE(...) [](auto& c, [[maybe_unused]] FilledTensors& t) { __VA_ARGS__; }

namespace gyre::test {

template <class Call>
using Change = void (*)(Call&, FilledTensors&);

// A change that several ops refuse.
template <class Call>
struct RuleOf {
  std::string name;
  std::vector<std::string> message;
  Change<Call> change;
};

template <class Call>
struct RefusedCall {
  const char* op;
  Call (*good)(FilledTensors&);
  void (*record)(Encoder&, const Call&);

  Refusal operator()(std::string name, std::vector<std::string> message,
                     Change<Call> change) const {
    message.emplace_back(op);
    return {std::move(name), std::move(message),
            [*this, change](Encoder& encoder, FilledTensors& tensors) {
              Call call = good(tensors);
              change(call, tensors);
              record(encoder, call);
            }};
  }
  std::vector<Refusal> operator()(const std::vector<RuleOf<Call>>& rules) const {
    std::vector<Refusal> all;
    for (const auto& [name, message, change] : rules) all.push_back((*this)(name, message, change));
    return all;
  }
};

template <class Row>
std::vector<Row> concat(std::initializer_list<std::vector<Row>> lists) {
  std::vector<Row> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

inline Tensor read_only(const Device& device, const Tensor& tensor) {
  const void* memory = address_of(tensor);
  return device.wrap(memory, tensor.dtype(), tensor.shape());
}
inline Tensor on_another_device(DType dtype, const Dims& shape) {
  return Device::open("cpu", {.threads = 1}).tensor(dtype, shape);
}

}  // namespace gyre::test
