#define QKV_ISA avx512_bf16
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/attention_forward.inc.h"
#include "kernels/cpu/avx512_kernels.h"
#include "kernels/cpu/bfloat16_source.inc.h"

// Only the forward pass of bfloat16 differs from AVX-512.

namespace qkv::kernels::avx512_bf16 {

constexpr ForwardKernels<float> bfloat16_kernels = make_forward_kernels<BFloat16Source>();

extern const CpuKernelTable table = {
    "avx512_bf16", avx512::float32_kernels, avx512::float64_kernels, &bfloat16_kernels, nullptr,
    nullptr};

}  // namespace qkv::kernels::avx512_bf16
