#pragma once

#include "cpu/forward_pass.h"
#include "cpu/gradients.h"

namespace qkv::cpu {

/// The gradients of alibi_slopes and sinks, per head by a kernel.
template <class T>
void run_heads(const kernels::BackwardParams<T>& backward, const Operands& x,
               const Gradients& grads, const Needs& needs) {
  const int64_t heads = backward.problem.batch * backward.problem.query_heads;
  std::vector<double> slopes(needs[4] ? heads : 0), sinks(needs[5] ? heads : 0);
  kernels::HeadGradientParams<T> params{backward, needs[4] ? slopes.data() : nullptr,
                                        needs[5] ? sinks.data() : nullptr};
  const auto& kernels = kernels_for(backward.problem);
  for_each_unit(heads, 0, [&](int64_t unit, void*) { kernels.head_gradient(params, unit); });
  if (needs[4]) sum_over_batch(slopes, x, grads[4]);
  if (needs[5]) sum_over_batch(sinks, x, grads[5]);
}

/// Of `count` numbers of T, nullptr if that is 0.
template <class T>
c10::DataPtr memory_of(int64_t count) {
  if (count == 0) return {};
  return c10::GetCPUAllocator()->allocate(count * sizeof(T));
}

/// The backward of all heads: parallel loops over splits of the keys, to sum their parts of
/// grad_query, for the mask's gradient and for what heads have one number of. `backward` has what
/// tensors tell; `grads` are written.
template <class T>
void backward_pass(kernels::BackwardParams<T> backward, const Operands& x, const Gradients& grads,
                   const Needs& needs) {
  const kernels::Problem<T>& p = backward.problem;
  const auto& kernels = kernels_for(p);
  const kernels::BackwardKernels<T>* of_few_rows = few_rows_backward_for(p);
  const kernels::BackwardKernels<T>& of_splits = backward_kernels_of_rows_for(p);
  backward.splits = of_splits.splits(p);
  const int64_t rows = p.batch * p.query_heads * p.queries;
  const auto slope_gradient = memory_of<T>(needs[4] ? backward.splits * rows : 0);
  backward.slope_gradient_of_rows = static_cast<T*>(slope_gradient.get());
  const bool sums_rows = needs[3] && of_few_rows != nullptr;
  const auto score_gradient = memory_of<T>(sums_rows ? rows * p.keys : 0);
  backward.score_gradient_of_rows = static_cast<T*>(score_gradient.get());

  const bool in_16_bits = &of_splits != &kernels;
  std::optional<LseOfDerivatives<T>> lse;
  if (of_few_rows == nullptr) {
    lse.emplace(in_16_bits, p, backward.lse, backward.lse_rest);
    lse->set_lse(backward);
  }
  const kernels::BackwardParams<T> for_mask = backward;
  const bool of_weights = backward.grad_weights.data != nullptr && makes_minus_dots(of_splits, p);
  // A unit that has all keys needs no memory for dS of other tiles than its own.
  const int64_t least = of_weights ? 1 : of_splits.least_units(backward);
  if (needs[3] && splits_may_add_to_mask(backward, Split::kKeys, backward.splits)) {
    // The more units, the more threads can add to the mask's gradient; but each packs the rows.
    backward.units = least;
    const auto is_good = [&](int64_t units) {
      return p.keys <= 512 * units && splits_may_add_to_mask(backward, Split::kKeys, units);
    };
    while (backward.units < backward.splits && !is_good(backward.units)) {
      backward.units = std::min(2 * backward.units, backward.splits);
    }
  } else {
    backward.units =
        best_units_of_head(least, backward.splits, p.batch * p.kv_heads, sees_all(p.band));
  }
  Workspace workspace;
  const bool needs_splits = needs[0] || needs[1] || needs[2] || needs[4] || sums_rows;
  c10::DataPtr score_gradients;
  if (of_weights && (backward.units > 1 || !needs_splits)) {
    const int64_t heads = p.batch * p.kv_heads;
    score_gradients = memory_of<T>(needs_splits ? heads * of_splits.score_gradients_size(p) : 0);
    backward.score_gradients_of_tiles = static_cast<T*>(score_gradients.get());
    for_each_unit(
        heads * of_splits.backward_row_tiles(p), of_splits.backward_scratch_bytes(backward),
        workspace,
        [&](int64_t unit, void* scratch) { of_splits.score_gradients(backward, unit, scratch); });
  }
  SplitPass<T, kernels::BackwardParams<T>> splits{};
  splits.what = Split::kKeys;
  splits.units = backward.units;
  splits.scratch_bytes = of_splits.backward_scratch_bytes(backward);
  splits.run = of_splits.backward;
  splits.needed = needs_splits;
  splits.add_to_mask = !sums_rows;
  splits.sums = splits.units > 1 && needs[0];
  splits.partial = [](kernels::BackwardParams<T>& x) -> T*& { return x.partial_grad_query; };
  splits.partial_size = of_splits.partial_grad_query_size(backward);
  splits.sum_units = of_splits.backward_row_tiles(p);
  splits.sum = of_splits.sum_grad_query;
  run_gradients<T, kernels::BackwardParams<T>>(
      backward, backward, splits,
      {kernels.mask_gradient_units, of_splits.mask_gradient_scratch_bytes(backward),
       [&](int64_t unit, void* scratch) { of_splits.mask_gradient(for_mask, unit, scratch); }},
      workspace);
  if (needs[4] || needs[5]) run_heads(backward, x, grads, needs);
}

}  // namespace qkv::cpu
