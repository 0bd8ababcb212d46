#pragma once

#include "operands.h"
#include "problem.h"

// Tensors as the kernels of a GPU read them: half types as they are.

namespace qkv::cuda {

inline Tangents readable(Tangents tangents, at::ScalarType real) {
  for (size_t i = 0; i < 3; ++i) {  // query, key, value
    if (tangents[i]) tangents[i] = with_unit_columns(*tangents[i]);
  }
  for (size_t i = 4; i < tangents.size(); ++i) {  // alibi_slopes, sinks
    if (tangents[i]) tangents[i] = tangents[i]->to(real);
  }
  return tangents;
}

}  // namespace qkv::cuda
