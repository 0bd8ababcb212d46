#pragma once

#include "samples.h"

namespace definition {

struct Result {
  torch::Tensor out, lse, weights;
};

/// Attention by its definition (docs/design.md, section 1) in double, with loops: one row at a
/// time, kept keys only. For dropout, draws the seeds as the operator does.
Result attention(const samples::Sample& sample);

}  // namespace definition
