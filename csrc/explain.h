#pragma once

#include <string>

#include "arguments.h"

namespace qkv {

/// Which kernel a call runs, on what, and why; a few lines.
std::string description(const char* op, const Call& call);

}  // namespace qkv
