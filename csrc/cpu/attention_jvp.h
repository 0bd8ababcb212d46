#pragma once

#include "cpu/kernels.h"
#include "cpu/units.h"

namespace qkv::cpu {

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
  for_each_unit(kernels.jvp_units(params), kernels.jvp_scratch_bytes(params),
                [&](int64_t unit, void* scratch) { kernels.jvp(params, unit, scratch); });
}

}  // namespace qkv::cpu
