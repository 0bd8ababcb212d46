#pragma once

#include "kernels/cpu/isa.h"

// The kernels of AVX-512 that sets with more than AVX-512 take over.

namespace qkv::kernels::avx512 {

extern const CpuKernels<float> float32_kernels;
extern const CpuKernels<double> float64_kernels;

}  // namespace qkv::kernels::avx512
