#pragma once

#include "kernels/cpu/attention_backward.inc.h"
#include "kernels/cpu/attention_backward_backward.inc.h"
#include "kernels/cpu/attention_forward.inc.h"
#include "kernels/cpu/attention_jvp.inc.h"
#include "kernels/cpu/few_rows_backward.inc.h"
#include "kernels/cpu/forward_products.inc.h"
#include "kernels/cpu/head_gradient.inc.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/mask_gradient.inc.h"
#include "kernels/cpu/transposition.inc.h"

// All kernels of one type for one instruction set, whose simd_*.h comes before.

namespace qkv::kernels::QKV_ISA {

template <class T>
constexpr BackwardKernels<T> few_rows_backward_kernels =
    make_few_rows_backward_kernels<ForwardProducts<T>>();

/// Forward and Scores of a backward: ForwardProducts and InNumbers with any exponential. Kernels of
/// few rows and of tangents have one of their own.
template <class T, class Forward = ForwardProducts<T>, class Scores = InNumbers<T>>
constexpr CpuKernels<T> make_kernels() {
  return {
      make_forward_kernels<Forward>(&few_rows_backward_kernels<T>),
      make_backward_kernels<Scores>(),
      make_tangent_kernels<VectorProducts<InNumbers<T>>>(),
      transpose_matrix<T>,
      mask_gradient_units<T>,
      head_gradient<T>,
      sink_gradient_t<T>,
  };
}

}  // namespace qkv::kernels::QKV_ISA
