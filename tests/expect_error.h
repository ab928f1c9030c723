#pragma once

#include "gyre_test.h"

namespace gyre::test {

// Whether `call` throws an Error of this code whose message holds every part.
template <class Call>
testing::AssertionResult throws_error(ErrorCode code, const std::vector<std::string>& parts,
                                      const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string message = error.what();
    if (error.code() != code) {
      return testing::AssertionFailure() << "code " << name(error.code()) << ": " << message;
    }
    for (const std::string& part : parts) {
      if (message.find(part) == std::string::npos) {
        return testing::AssertionFailure() << '"' << message << "\" does not say \"" << part << '"';
      }
    }
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "nothing was thrown";
}

// In a child process, which can only answer yes or no.
template <class Call>
bool is_lost(const Call& call) {
  return bool(throws_error(ErrorCode::device_lost, {}, call));
}

template <class Call>
testing::AssertionResult refused(const std::vector<std::string>& parts, const Call& call) {
  return throws_error(ErrorCode::invalid_argument, parts, call);
}

template <class... Part>
std::vector<std::string> words(const Part&... part) {
  return {std::string(part)...};
}

}  // namespace gyre::test

// EXPECT_REFUSED(("op", "rule", "value"), op(encoder, in));
#define EXPECT_ERROR(code, parts, ...)                                                       \
  EXPECT_TRUE(::gyre::test::throws_error(::gyre::ErrorCode::code, ::gyre::test::words parts, \
                                         [&] { __VA_ARGS__; }))
#define EXPECT_REFUSED(parts, ...) EXPECT_ERROR(invalid_argument, parts, __VA_ARGS__)
