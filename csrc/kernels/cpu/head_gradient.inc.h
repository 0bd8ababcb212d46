#pragma once

#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/row_tile.inc.h"

// The gradients of the numbers a head has, from numbers of its rows. With w_i = exp(sink - lse_i),
// the weight that row i gives to the sink,
//
//     grad_slope = - sum over i, j of dS_ij · |p_i - j|    (over j: backward_split)
//     grad_sink  = - sum over i of w_i · delta_i           delta_i = <dO_i, O_i> - dLSE_i
//
// One unit of work is one query head of one batch element.

namespace qkv::kernels::QKV_ISA {

template <class T>
inline void head_gradient(const HeadGradientParams<T>& params, int64_t unit) {
  const BackwardParams<T>& backward = params.backward;
  const Problem<T>& p = backward.problem;
  const int64_t first_scalar = unit * p.queries;  // of this head in a (B, Hq, M)
  if (params.grad_slopes != nullptr) {
    double sum = 0.0;
    for (int64_t split = 0; split < backward.splits; ++split) {
      const T* of_rows = backward.slope_gradient_of_rows +
                         split * p.batch * p.query_heads * p.queries + first_scalar;
      for (int64_t i = 0; i < p.queries; ++i) sum += static_cast<double>(of_rows[i]);
    }
    params.grad_slopes[unit] = sum;
  }
  if (params.grad_sinks != nullptr) {
    const int64_t head = unit % p.query_heads;
    const BatchIndex batch = batch_index(p, unit / p.query_heads);
    const T sink = p.sinks.data[batch.offset(p.sinks.batch_stride) + head * p.sinks.head_stride];
    const auto head_of = [&](const Operand<const T>& x) {
      return x.data + batch.offset(x.batch_stride) + head * x.head_stride;
    };
    const T *grad_out = head_of(backward.grad_out), *out = head_of(backward.out);
    double sum = 0.0;
    for (int64_t i = 0; i < p.queries; ++i) {
      const T lse = backward.lse[first_scalar + i];
      if (lse == -static_cast<T>(__builtin_inff())) continue;  // no keys, and the sink is -inf
      const T* out_i = out + i * backward.out.row_stride;
      // An output of zeros is that of a row without keys, whose incoming gradient may be NaN.
      bool all_zero = true;
      for (int64_t d = 0; d < p.value_dim; ++d) all_zero &= out_i[d] == T(0);
      T delta =
          all_zero ? T(0) : dot<T>(grad_out + i * backward.grad_out.row_stride, out_i, p.value_dim);
      if (backward.grad_lse != nullptr) delta -= backward.grad_lse[first_scalar + i];
      const T below = sink == lse ? T(0) : (sink - lse) - backward.lse_rest[first_scalar + i];
      const T weight = below >= T(0) ? T(1) : natural_exp(below);
      sum -= static_cast<double>(weight) * static_cast<double>(delta);
    }
    params.grad_sinks[unit] = sum;
  }
}

}  // namespace qkv::kernels::QKV_ISA
