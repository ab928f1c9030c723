#pragma once

#include <string>
#include <type_traits>

namespace gyre::test {

// One text of all parts: strings, numbers, and enums that have a name().
template <class... Part>
std::string str_cat(const Part&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    using Type = std::remove_cvref_t<decltype(part)>;
    if constexpr (std::is_enum_v<Type>) {
      text += name(part);
    } else if constexpr (std::is_arithmetic_v<Type>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (append(parts), ...);
  return text;
}

}  // namespace gyre::test
