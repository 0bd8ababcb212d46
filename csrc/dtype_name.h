#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace qkv {

/// "float32", as users write it, where c10 prints "Float".
inline std::string dtype_name(c10::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

}  // namespace qkv
