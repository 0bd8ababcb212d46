#include "cpu/kernels.h"

#include <c10/util/Exception.h>

#include "environment.h"

namespace qkv::cpu {

const kernels::CpuKernelTable& kernel_table() {
  static const kernels::CpuKernelTable& table = []() -> const kernels::CpuKernelTable& {
    const char* name = requested_cpu_isa();
    const auto chosen = kernels::choose_cpu_kernels(name);
    TORCH_CHECK_VALUE(chosen.choice != kernels::IsaChoice::kUnknownName, "qkv: QKV_CPU_ISA=", name,
                      " is not one of ", kernels::cpu_isa_names());
    TORCH_CHECK_VALUE(chosen.choice != kernels::IsaChoice::kNotOnThisCpu, "qkv: QKV_CPU_ISA=", name,
                      ", but this processor does not have it");
    return *chosen.table;
  }();
  return table;
}

template <>
const kernels::CpuKernels<float>& kernels_for<float>() {
  return kernel_table().float32;
}

template <>
const kernels::CpuKernels<double>& kernels_for<double>() {
  return kernel_table().float64;
}

}  // namespace qkv::cpu
