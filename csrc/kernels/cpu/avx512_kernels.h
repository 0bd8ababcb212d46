#pragma once

#include "kernels/cpu/isa.h"

// The kernels that sets with more instructions take over.

namespace qkv::kernels::avx512 {

extern const CpuKernels<float> float32_kernels;
extern const CpuKernels<double> float64_kernels;

}  // namespace qkv::kernels::avx512

namespace qkv::kernels::avx512_amx {

extern const HalfForwardKernels bfloat16_forward_kernels;
extern const HalfBackwardKernels bfloat16_backward_kernels;
extern const HalfTangentKernels bfloat16_tangent_kernels;

}  // namespace qkv::kernels::avx512_amx
