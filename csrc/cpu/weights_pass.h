#pragma once

#include "cpu/kernels.h"
#include "cpu/units.h"

namespace qkv::cpu {

/// The weights of all heads, or what a backward needs of them: parallel loops over what is prepared
/// for them, and over tiles.
template <class T>
void weights_pass(kernels::WeightsParams<T> params) {
  const kernels::Problem<T>& p = params.forward.problem;
  const kernels::ForwardKernels<T>& kernels = forward_kernels_for(p);
  const int64_t prepared_bytes = kernels.forward_prepared_bytes(params.forward, /*in_turn=*/1);
  const auto prepared = c10::GetCPUAllocator()->allocate(prepared_bytes);
  params.forward.prepared = prepared_bytes > 0 ? prepared.get() : nullptr;
  if (prepared_bytes > 0) {
    for_each_unit(p.batch * p.kv_heads, 0,
                  [&](int64_t head, void*) { kernels.prepare_forward(params.forward, head); });
  }
  for_each_unit(kernels.weights_units(p), kernels.weights_scratch_bytes(p),
                [&](int64_t unit, void* scratch) { kernels.weights(params, unit, scratch); });
}

}  // namespace qkv::cpu
