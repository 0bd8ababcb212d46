#pragma once

#include "kernel_run.h"

// Which kernels of a table take problems in 16 bits.

namespace kernel_run {

/// Heads of so many rows or fewer may have kernels of their own.
constexpr int64_t kFewRows = 8;

/// All kernels of float32, which convert what is stored in 16 bits.
struct Converting {
  HalfForwardKernels forward;
  HalfBackwardKernels backward;
  HalfTangentKernels tangents;

  explicit Converting(const CpuKernelTable& table)
      : forward{table.float32, takes_all},
        backward{table.float32, takes_all},
        tangents{table.float32, takes_all} {}

  OfHalf kernels() const { return {&forward, &backward, &tangents}; }

 private:
  static bool takes_all(const Problem<float>&) { return true; }
};

/// What the library takes of a table for bfloat16. (Forwards of tiles also where they do not take a
/// problem: their scores are those of derivatives that do.)
inline OfHalf of_bfloat16(const CpuKernelTable& table, const Converting& converting,
                          const Shape& shape) {
  OfHalf kernels{table.bfloat16_forward, table.bfloat16_backward, table.bfloat16_tangents};
  const auto sizes = sizes_of<float>(shape);
  const bool few = rows_of_head(shape) <= kFewRows;
  if (few && !kernels.forward->takes(sizes)) kernels.forward = &converting.forward;
  if (!kernels.backward->takes(sizes)) kernels.backward = &converting.backward;
  if (!kernels.tangents->takes(sizes)) kernels.tangents = &converting.tangents;
  return kernels;
}

}  // namespace kernel_run
