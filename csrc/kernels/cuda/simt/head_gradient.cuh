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

/// sum over the rows i of a head of of_row(i). Threads' sums, in shared memory, are added in the
/// order of a tree.
template <class F>
QKV_DEVICE double sum_of_rows(int64_t rows, double* sums, F of_row) {
  double sum = 0.0;
  for (int64_t i = device::thread(); i < rows; i += kThreads) sum += of_row(i);
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
}

/// - sum over i of w_i · of_row(i)
template <class T, class F>
QKV_DEVICE double sum_of_sinks(const BackwardParams<T>& params, int64_t head, T sink, double* sums,
                               F of_row) {
  const int64_t first = head * params.problem.queries;  // of the head in a (B, Hq, M)
  return sum_of_rows(params.problem.queries, sums, [&](int64_t i) {
    const T lse = device::load_global(params.lse + first + i);
    if (lse == -infinity<T>()) return 0.0;  // whatever of_row is
    const T weight = sink_weight(sink, lse, device::load_global(params.lse_rest + first + i));
    return -static_cast<double>(weight) * static_cast<double>(of_row(first + i));
  });
}

/// A block for each (batch, head).
template <class Element>
QKV_KERNEL(kThreads, 1)
head_gradient_kernel(QKV_PARAMS BackwardTask<Real<Element>> task, QKV_PARAMS int64_t units) {
  using T = Real<Element>;
  const BackwardParams<T>& params = task.backward;
  const Problem<T>& p = params.problem;
  auto* sums = reinterpret_cast<double*>(device::shared_memory());
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    if (task.grad_slopes != nullptr) {
      const T* of_rows = params.slope_gradient_of_rows + unit * p.queries;
      const double sum = sum_of_rows(p.queries, sums, [&](int64_t i) {
        return static_cast<double>(device::load_global(of_rows + i));
      });
      if (device::thread() == 0) device::store_global(task.grad_slopes + unit, sum);
    }
    if (task.grad_sinks != nullptr) {
      const T sink = number_of_head(p, p.sinks, unit / p.query_heads, unit % p.query_heads);
      const double sum = sum_of_sinks(params, unit, sink, sums, [&](int64_t scalar) {
        return device::load_global(task.delta + scalar);
      });
      if (device::thread() == 0) device::store_global(task.grad_sinks + unit, sum);
    }
  }
}

/// The derivative of grad_sink along directions,
///
///     grad_sink' = - sum over i of w_i · ((sink' - lse'_i) · delta_i + delta'_i)
template <class Element>
QKV_KERNEL(kThreads, 1)
sink_gradient_t_kernel(QKV_PARAMS BackwardBackwardTask<Real<Element>> task,
                       QKV_PARAMS int64_t units) {
  using T = Real<Element>;
  const BackwardParams<T>& params = task.backward.backward;
  const Problem<T>& p = params.problem;
  const HeadNumbers<T>& sinks_t = task.directions.sinks;
  auto* sums = reinterpret_cast<double*>(device::shared_memory());
  for (int64_t unit = device::block(); unit < units; unit += device::blocks()) {
    const int64_t batch = unit / p.query_heads, head = unit % p.query_heads;
    const T sink = number_of_head(p, p.sinks, batch, head);
    const T sink_t = sinks_t.data == nullptr ? T(0) : number_of_head(p, sinks_t, batch, head);
    const double sum = sum_of_sinks(params, unit, sink, sums, [&](int64_t scalar) {
      // A row without keys has lse' = sink', and NaN may come for it.
      if (has_no_keys(device::load_global(params.lse_rest + scalar))) return T(0);
      return (sink_t - device::load_global(task.lse_t + scalar)) *
                 device::load_global(task.backward.delta + scalar) +
             device::load_global(task.delta_t + scalar);
    });
    if (device::thread() == 0) device::store_global(task.backward.grad_sinks + unit, sum);
  }
}

}  // namespace qkv::kernels::simt
