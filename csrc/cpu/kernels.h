#pragma once

#include "kernels/cpu/isa.h"

namespace qkv::cpu {

/// The kernels for this processor, or those that QKV_CPU_ISA asks for; chosen at the first call.
const kernels::CpuKernelTable& kernel_table();

template <class T>
const kernels::CpuKernels<T>& kernels_for();

}  // namespace qkv::cpu
