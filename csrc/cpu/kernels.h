#pragma once

#include "kernels/cpu/isa.h"
#include "problem.h"

namespace qkv::cpu {

/// The kernels for this processor, or those that QKV_CPU_ISA asks for; chosen at the first call.
const kernels::CpuKernelTable& kernel_table();

/// The same, or for float32 one whose vectors the rows of the problem fill better.
const kernels::CpuKernelTable& kernel_table_for(const kernels::Problem<float>& problem);

/// The kernels that compute in T, float or double, for a problem of this size.
template <class T>
const kernels::CpuKernels<T>& kernels_for(const kernels::Problem<T>& problem);

/// Those of the table's kernels that multiply in the operands' 16-bit type, if there are any for
/// these; else nullptr.
template <class Kernels>
const Kernels* half_kernels_for(const kernels::Problem<float>& problem, const Kernels* of_bfloat16,
                                const Kernels* of_float16 = nullptr) {
  const auto storage = problem.key_value_storage;
  const Kernels* kernels = storage == kernels::Storage::kBFloat16  ? of_bfloat16
                           : storage == kernels::Storage::kFloat16 ? of_float16
                                                                   : nullptr;
  return kernels != nullptr && kernels->takes(problem) ? kernels : nullptr;
}

/// The kernels that multiply in 16 bits, if there are any for this problem, else kernels_for it. So
/// for the backward and for the derivatives of second order.
template <class T>
const kernels::ForwardKernels<T>& forward_kernels_for(const kernels::Problem<T>& problem) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const auto& table = kernel_table();
    const auto* of_half = half_kernels_for(problem, table.bfloat16_forward, table.float16_forward);
    if (of_half != nullptr) return *of_half;
  }
  return kernels_for(problem);
}
template <class T>
const kernels::BackwardKernels<T>& backward_kernels_for(const kernels::Problem<T>& problem) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const auto* of_half = half_kernels_for(problem, kernel_table().bfloat16_backward);
    if (of_half != nullptr) return *of_half;
  }
  return kernels_for(problem);
}

/// The backward that computes the forward's scores, where those are not the ones of derivatives;
/// else nullptr.
template <class T>
const kernels::BackwardKernels<T>* few_rows_backward_for(const kernels::Problem<T>& problem) {
  const kernels::ForwardKernels<T>& forward = forward_kernels_for(problem);
  return forward.has_scores_of_derivatives(problem) ? nullptr : forward.few_rows_backward;
}

/// The backward for this problem, of few rows or of tiles of them.
template <class T>
const kernels::BackwardKernels<T>& backward_kernels_of_rows_for(
    const kernels::Problem<T>& problem) {
  const kernels::BackwardKernels<T>* of_few_rows = few_rows_backward_for(problem);
  return of_few_rows != nullptr ? *of_few_rows : backward_kernels_for(problem);
}

/// Whether that makes minus_dots of a backward of weights.
template <class T>
bool makes_minus_dots(const kernels::BackwardKernels<T>& kernels,
                      const kernels::Problem<T>& problem) {
  return kernels.score_gradients_size != nullptr && kernels.score_gradients_size(problem) > 0;
}

template <class T>
const kernels::TangentKernels<T>& tangent_kernels_for(const kernels::Problem<T>& problem) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const auto* of_half = half_kernels_for(problem, kernel_table().bfloat16_tangents);
    if (of_half != nullptr) return *of_half;
  }
  return kernels_for(problem);
}

}  // namespace qkv::cpu
