#include "cpu/kernels.h"

#include <c10/util/Exception.h>

#include "environment.h"

namespace qkv::cpu {

namespace {

const kernels::ChosenKernels& chosen_kernels() {
  static const kernels::ChosenKernels chosen = [] {
    const char* name = requested_cpu_isa();
    const auto found = kernels::choose_cpu_kernels(name);
    TORCH_CHECK_VALUE(found.choice != kernels::IsaChoice::kUnknownName, "qkv: QKV_CPU_ISA=", name,
                      " is not one of ", kernels::cpu_isa_names());
    TORCH_CHECK_VALUE(found.choice != kernels::IsaChoice::kNotOnThisCpu, "qkv: QKV_CPU_ISA=", name,
                      ", but this processor does not have it");
    return found;
  }();
  return chosen;
}

}  // namespace

const kernels::CpuKernelTable& kernel_table() { return *chosen_kernels().table; }

const kernels::CpuKernelTable& kernel_table_for(const kernels::Problem<float>& problem) {
  const kernels::CpuKernelTable* of_half_vectors = chosen_kernels().of_half_vectors;
  const bool suits = of_half_vectors != nullptr && kernels::leaves_half_a_vector(problem);
  return suits ? *of_half_vectors : kernel_table();
}

template <>
const kernels::CpuKernels<float>& kernels_for(const kernels::Problem<float>& problem) {
  return kernel_table_for(problem).float32;
}

template <>
const kernels::CpuKernels<double>& kernels_for(const kernels::Problem<double>&) {
  return kernel_table().float64;
}

}  // namespace qkv::cpu
