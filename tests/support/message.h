// The text of the error that a call ends with.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "weft/core/error.h"

namespace weft::testing {

/// What `fn` throws, if it is an Error; "no error" when it returns. Other exceptions pass through.
template <class Error = std::exception, class Fn>
std::string message_of(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

/// The text of the ConfigError that `fn` throws.
template <class Fn>
std::string config_error(Fn&& fn) {
  return message_of<ConfigError>(std::forward<Fn>(fn));
}

}  // namespace weft::testing
