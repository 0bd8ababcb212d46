#pragma once

#include "cpu/kernels.h"
#include "cpu/units.h"

namespace qkv::cpu {

/// The forward of all heads: parallel loops over what is prepared for them, over tiles, and to
/// merge what ranges of keys left.
template <class T>
void forward_pass(const kernels::ForwardKernels<T>& kernels, kernels::ForwardParams<T> params) {
  auto& allocator = *c10::GetCPUAllocator();
  const int64_t heads = params.problem.batch * params.problem.kv_heads;
  const int64_t in_turn = kernels.forward_tiles_in_turn(params, at::get_num_threads());
  const int64_t prepared_bytes = kernels.forward_prepared_bytes(params, in_turn);
  const auto prepared = allocator.allocate(prepared_bytes);
  params.prepared = prepared_bytes > 0 ? prepared.get() : nullptr;
  const int64_t partial_size = kernels.forward_partial_size(params);
  const auto partial = allocator.allocate(partial_size * sizeof(T));
  params.partial = static_cast<T*>(partial.get());

  if (prepared_bytes > 0) {
    for_each_unit(heads, 0, [&](int64_t head, void*) { kernels.prepare_forward(params, head); });
  }
  const int64_t units = kernels.forward_units(params, in_turn);
  params.units_to_next = Units(units, /*one_by_one=*/false).to_next();
  for_each_unit(
      units, kernels.forward_scratch_bytes(params, in_turn),
      [&](int64_t unit, void* scratch) { kernels.forward(params, in_turn, unit, scratch); });
  if (partial_size > 0) {
    for_each_unit(heads, 0, [&](int64_t head, void*) { kernels.merge_forward(params, head); });
  }
}

/// The forward whose scores derivatives compute, to the bit: in 16 bits or in numbers.
template <class T>
const kernels::ForwardKernels<T>& forward_of_derivatives(bool in_16_bits,
                                                         const kernels::Problem<T>& problem) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (in_16_bits) return *kernel_table().bfloat16_forward;
  }
  return kernels_for(problem);
}

/// The lse for derivatives, and what rounding took from it. It must come from their scores to the
/// bit: those of 1e6, summed in another order, differ by 1/16 or more, and the weights exp(S - lse)
/// of a row would not add up to 1. Where the forward computed other ones, as of few rows or in
/// other products, lse is computed again.
template <class T>
class LseOfDerivatives {
 public:
  LseOfDerivatives(bool in_16_bits, const kernels::Problem<T>& problem, const T* lse_of_forward,
                   const T* rest_of_forward)
      : lse_(lse_of_forward), lse_rest_(rest_of_forward) {
    const kernels::ForwardKernels<T>& kernels = forward_of_derivatives(in_16_bits, problem);
    if (&kernels == &forward_kernels_for(problem) && kernels.has_scores_of_derivatives(problem)) {
      return;
    }
    const int64_t rows = problem.batch * problem.query_heads * problem.queries;
    memory_ = c10::GetCPUAllocator()->allocate(2 * rows * sizeof(T));
    kernels::ForwardParams<T> params{};
    params.problem = problem;
    params.lse = static_cast<T*>(memory_.get());
    params.lse_rest = params.lse + rows;
    forward_pass(kernels, params);
    lse_ = params.lse;
    lse_rest_ = params.lse_rest;
  }

  /// Whether the forward computed other scores.
  bool is_of_its_own() const { return memory_.get() != nullptr; }

  /// Sets lse in the params of a derivative, which must not outlive this.
  template <class Params>
  void set_lse(Params& params) const {
    params.lse = lse_;
    params.lse_rest = lse_rest_;
  }

 private:
  const T* lse_;       // (B, Hq, M), dense
  const T* lse_rest_;  // as lse_
  c10::DataPtr memory_;
};

}  // namespace qkv::cpu
