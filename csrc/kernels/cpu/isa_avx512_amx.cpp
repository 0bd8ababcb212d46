#define QKV_ISA avx512_amx
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/amx_backward.inc.h"
#include "kernels/cpu/amx_source.inc.h"
#include "kernels/cpu/attention_forward.inc.h"
#include "kernels/cpu/avx512_kernels.h"

// Only forward and backward of bfloat16 differ from AVX-512.

namespace qkv::kernels::avx512_amx {

constexpr ForwardKernels<float> bfloat16_kernels = make_forward_kernels<AmxSource>();
constexpr BFloat16BackwardKernels bfloat16_backward_kernels = make_amx_backward_kernels();

extern const CpuKernelTable table = {"avx512_amx", avx512::float32_kernels, avx512::float64_kernels,
                                     &bfloat16_kernels, &bfloat16_backward_kernels};

}  // namespace qkv::kernels::avx512_amx
