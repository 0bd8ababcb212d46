#pragma once

#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/row_tile.inc.h"
#include "kernels/logsumexp.h"

// The gradients of the numbers a head has, from numbers of its rows. With w_i = exp(sink - lse_i),
// the weight that row i gives to the sink,
//
//     grad_slope = - sum over i, j of dS_ij · |p_i - j|    (over j: the backward,
//                                                          slope_gradient_of_rows)
//     grad_sink  = - sum over i of w_i · delta_i           delta_i = <dO_i, O_i> - dLSE_i
//
// One unit of work is one query head of one batch element.

namespace qkv::kernels::QKV_ISA {

/// The rows of query head `unit` of a (B, Hq, M).
template <class T>
struct HeadRows {
  BatchIndex batch;
  int64_t head;
  int64_t width;  // of an output

  HeadRows(const Problem<T>& p, int64_t unit)
      : batch(batch_index(p, unit / p.query_heads)),
        head(unit % p.query_heads),
        width(p.value_dim) {}

  T number(const HeadNumbers<T>& x) const {
    return x.data[batch.offset(x.batch_stride) + head * x.head_stride];
  }

  template <class Stored = T>
  const Stored* row(const Operand<const T>& x, int64_t i) const {
    return reinterpret_cast<const Stored*>(x.data) + batch.offset(x.batch_stride) +
           head * x.head_stride + i * x.row_stride;
  }
};

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
    const HeadRows<T> rows(p, unit);
    const T sink = rows.number(p.sinks);
    double sum = 0.0;
    for (int64_t i = 0; i < p.queries; ++i) {
      const T lse = backward.lse[first_scalar + i];
      if (lse == -static_cast<T>(__builtin_inff())) continue;
      const T rest = backward.lse_rest[first_scalar + i];
      const T weight = sink_weight(sink, lse, rest);
      T delta{};
      // Whatever comes for the output of a row without keys, NaN as well, does not matter.
      with_stored<T>(p.key_value_storage, [&](auto stored) {
        using Stored = decltype(stored);
        if (has_no_keys(rest)) return;
        delta = dot_with_exact<T>(rows.template row<Stored>(backward.grad_out, i),
                                  rows.template row<Stored>(backward.out, i),
                                  rows.template row<Stored>(backward.out_rest, i), rows.width);
      });
      if (backward.grad_lse != nullptr) delta -= backward.grad_lse[first_scalar + i];
      sum -= static_cast<double>(weight) * static_cast<double>(delta);
    }
    params.grad_sinks[unit] = sum;
  }
}

}  // namespace qkv::kernels::QKV_ISA
