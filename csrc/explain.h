#pragma once

#include <string>

#include "arguments.h"

namespace qkv {

/// Which kernels a call and its derivatives run, or why none is fused, and on what; a few lines.
std::string description(const char* op, const Call& call);

}  // namespace qkv
