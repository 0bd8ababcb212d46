#pragma once

#include "kernels/cpu/all_kernels.inc.h"

// What isa_*.cpp compiles where float32 and float64 are all that it has kernels for.

namespace qkv::kernels::QKV_ISA {

#define QKV_STRING_OF(x) #x
#define QKV_STRING(x) QKV_STRING_OF(x)

extern const CpuKernels<float> float32_kernels = make_kernels<float>();
extern const CpuKernels<double> float64_kernels = make_kernels<double>();
extern const CpuKernelTable table = {
    QKV_STRING(QKV_ISA), float32_kernels, float64_kernels, nullptr, nullptr, nullptr};

}  // namespace qkv::kernels::QKV_ISA
