#pragma once

#include "kernels/cuda/simt/tasks.h"
#include "kernels/cuda/simt/tile.cuh"
#include "kernels/logsumexp.h"

// The gradients of the numbers a head has, from numbers of its rows. With w_i = exp(sink - lse_i),
// the weight that row i gives to the sink,
//
//     grad_slope = sum over i of slope_gradient_i
//     grad_sink  = - sum over i of w_i · delta_i

namespace qkv::kernels::simt {

/// A block for each (batch, head); threads' sums are added in the order of a tree.
template <class Element>
QKV_KERNEL(kThreads, 1)
head_gradient_kernel(QKV_PARAMS BackwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  using T = Real<Element>;
  const BackwardParams<T>& params = task.backward;
  const Problem<T>& p = params.problem;
  auto* sums = reinterpret_cast<double*>(device::shared_memory());
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    const int64_t batch = unit / p.query_heads, head = unit % p.query_heads;
    const auto sum_of_rows = [&](auto of_row) {
      double sum = 0.0;
      for (int64_t i = device::thread(); i < p.queries; i += kThreads) sum += of_row(i);
      device::barrier();
      device::store_shared(sums + device::thread(), sum);
      device::barrier();
      for (int half = kThreads / 2; half > 0; half /= 2) {
        if (device::thread() < half) {
          device::store_shared(sums + device::thread(),
                               device::load_shared(sums + device::thread()) +
                                   device::load_shared(sums + device::thread() + half));
        }
        device::barrier();
      }
      return device::load_shared(sums);
    };
    const auto of_row = [&](const T* scalars, int64_t i) {
      return device::load_global(scalars + unit * p.queries + i);
    };
    if (task.grad_slopes != nullptr) {
      const double sum = sum_of_rows(
          [&](int64_t i) { return static_cast<double>(of_row(params.slope_gradient_of_rows, i)); });
      if (device::thread() == 0) device::store_global(task.grad_slopes + unit, sum);
    }
    if (task.grad_sinks != nullptr) {
      const T sink = device::load_global(
          p.sinks.data + batch_offset(p, batch, p.sinks.batch_stride) + head * p.sinks.head_stride);
      const double sum = sum_of_rows([&](int64_t i) {
        const T lse = of_row(params.lse, i);
        if (lse == -infinity<T>()) return 0.0;  // whatever delta is
        const T weight = sink_weight(sink, lse, of_row(params.lse_rest, i));
        return -static_cast<double>(weight) * static_cast<double>(of_row(task.delta, i));
      });
      if (device::thread() == 0) device::store_global(task.grad_sinks + unit, sum);
    }
  }
}

}  // namespace qkv::kernels::simt
