#pragma once

#include "kernels/cpu/isa.h"
#include "problem.h"

namespace qkv::cpu {

/// The kernels for this processor, or those that QKV_CPU_ISA asks for; chosen at the first call.
const kernels::CpuKernelTable& kernel_table();

template <class T>
const kernels::CpuKernels<T>& kernels_for();

/// Those of the table's kernels that multiply in bfloat16, if there are any for these operands;
/// else nullptr.
template <class Kernels>
const Kernels* bfloat16_kernels_for(const Operands& x, const Kernels* of_table) {
  if (of_table == nullptr || x.query.scalar_type() != at::kBFloat16) return nullptr;
  return of_table->takes(sizes_of<float>(x)) ? of_table : nullptr;
}

}  // namespace qkv::cpu
