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

template <class T>
void run_jvp(const kernels::TangentKernels<T>& kernels, const kernels::JvpParams<T>& params) {
  const int64_t heads = params.problem.batch * params.problem.kv_heads;
  const int64_t prepared_bytes = kernels.jvp_prepared_bytes(params);
  const auto prepared = c10::GetCPUAllocator()->allocate(heads * prepared_bytes);
  if (prepared_bytes > 0) {
    for_each_unit(heads, 0,
                  [&](int64_t head, void*) { kernels.prepare_jvp(params, head, prepared.get()); });
  }
  for_each_unit(
      kernels.jvp_units(params), kernels.jvp_scratch_bytes(params),
      [&](int64_t unit, void* scratch) { kernels.jvp(params, prepared.get(), unit, scratch); });
}

}  // namespace qkv::cpu
