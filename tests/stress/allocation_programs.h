#pragma once
// Programs that use the library from opening a device to the last destructor. Every call may fail
// for want of memory, once or several times: it is then made again, and must find everything as it
// was.

#include "gyre_test.h"
#include "stress/failing_memory.h"

namespace gyre::test {

// Runs a call with failing memory until it succeeds. What a call may throw is out_of_memory.
template <class Call>
decltype(auto) survive(const Call& call) {
  constexpr int kMaxAttempts = 64;
  for (int attempt = 1;; ++attempt) {
    struct On {
      On() { failing_memory().on = true; }
      ~On() { failing_memory().on = false; }
    };
    try {
      const On on;
      return call();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::out_of_memory || attempt == kMaxAttempts) throw;
    }
  }
}

// As above, for a call that records: while it is refused, the encoder stays as it was.
template <class Call>
decltype(auto) survive(Encoder& encoder, const Call& call) {
  return survive([&]() -> decltype(auto) {
    const uint32_t size = encoder.size(), barriers = encoder.barriers();
    try {
      return call();
    } catch (...) {
      if (encoder.size() != size || encoder.barriers() != barriers) {
        failing_memory().on = false;
        throw std::logic_error("a refused call left " + std::to_string(encoder.size() - size) +
                               " commands");
      }
      throw;
    }
  });
}

inline CustomKernel surviving_kernel(const CustomCode& code) {
  return survive([&] {
    failing_memory().on = false;  // the caller's copy, for a call by value
    CustomCode given = code;
    failing_memory().on = true;
    return CustomKernel(std::move(given));
  });
}

// Each returns everything it computed, to be compared with a run in which nothing failed, and
// throws if a rule is broken.
struct AllocationProgram {
  std::string name;
  std::function<std::vector<uint8_t>(const std::string& folder)> run;
};

std::vector<uint8_t> run_ops(const std::string& folder);
std::vector<uint8_t> run_calls(const std::string& folder);
std::vector<uint8_t> run_cache(const std::string& folder);
std::vector<uint8_t> run_pool(const std::string& folder);

}  // namespace gyre::test
