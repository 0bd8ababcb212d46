#pragma once

#include "cpu/kernels.h"
#include "cpu/units.h"

namespace qkv::cpu {

template <class T>
void run_jvp(const kernels::JvpParams<T>& params) {
  const auto& kernels = kernels_for<T>();
  for_each_unit(kernels.jvp_units(params), kernels.jvp_scratch_bytes(params),
                [&](int64_t unit, void* scratch) { kernels.jvp(params, unit, scratch); });
}

}  // namespace qkv::cpu
