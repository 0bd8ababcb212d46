#define QKV_ISA avx512_amx_fp16
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/amx_forward.inc.h"
#include "kernels/cpu/attention_forward.inc.h"
#include "kernels/cpu/avx512_kernels.h"
#include "kernels/cpu/few_rows_backward.inc.h"

// Only the forward of float16 differs from what AMX has without AMX-FP16.

namespace qkv::kernels::avx512_amx_fp16 {

constexpr BackwardKernels<float> few_rows_in_tiles_kernels =
    make_few_rows_backward_kernels<AmxForward<Float16>>();
constexpr HalfForwardKernels float16_forward_kernels = {
    make_forward_kernels<AmxForward<Float16>>(&few_rows_in_tiles_kernels),
    AmxForward<Float16>::takes};

extern const CpuKernelTable table = {"avx512_amx_fp16",
                                     avx512::float32_kernels,
                                     avx512::float64_kernels,
                                     &avx512_amx::bfloat16_forward_kernels,
                                     &avx512_amx::bfloat16_backward_kernels,
                                     &avx512_amx::bfloat16_tangent_kernels,
                                     &float16_forward_kernels};

}  // namespace qkv::kernels::avx512_amx_fp16
