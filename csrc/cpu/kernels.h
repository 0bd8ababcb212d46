#pragma once

#include "kernels/cpu/isa.h"
#include "problem.h"

namespace qkv::cpu {

/// The kernels for this processor, or those that QKV_CPU_ISA asks for; chosen at the first call.
const kernels::CpuKernelTable& kernel_table();

template <class T>
const kernels::CpuKernels<T>& kernels_for();

/// Those of the table's kernels that multiply in the operands' 16-bit type, if there are any for
/// these; else nullptr.
template <class Kernels>
const Kernels* half_kernels_for(const Operands& x, const Kernels* of_bfloat16,
                                const Kernels* of_float16 = nullptr) {
  const auto type = x.query.scalar_type();
  const Kernels* kernels = type == at::kBFloat16 ? of_bfloat16
                           : type == at::kHalf   ? of_float16
                                                 : nullptr;
  return kernels != nullptr && kernels->takes(sizes_of<float>(x)) ? kernels : nullptr;
}

}  // namespace qkv::cpu
