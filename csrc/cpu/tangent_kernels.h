#pragma once

#include "cpu/kernels.h"
#include "cpu/units.h"

namespace qkv::cpu {

/// Those that multiply in bfloat16, where there are any for this problem.
template <class T>
const kernels::TangentKernels<T>& tangent_kernels_for(const kernels::Problem<T>& problem) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const auto* in_bfloat16 = kernel_table().bfloat16_tangents;
    if (problem.key_value_storage == kernels::Storage::kBFloat16 && in_bfloat16 != nullptr &&
        in_bfloat16->takes(problem)) {
      return *in_bfloat16;
    }
  }
  return kernels_for<T>();
}

/// What prepare(head, memory) makes of each key/value head.
template <class T, class Prepare>
c10::DataPtr prepare_heads(const kernels::Problem<T>& problem, int64_t bytes_of_head,
                           const Prepare& prepare) {
  const int64_t heads = problem.batch * problem.kv_heads;
  auto prepared = c10::GetCPUAllocator()->allocate(heads * bytes_of_head);
  if (bytes_of_head > 0) {
    for_each_unit(heads, 0, [&](int64_t head, void*) { prepare(head, prepared.get()); });
  }
  return prepared;
}

}  // namespace qkv::cpu
