#define QKV_ISA avx512_amx
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/amx_backward.inc.h"
#include "kernels/cpu/amx_forward.inc.h"
#include "kernels/cpu/amx_products.inc.h"
#include "kernels/cpu/attention_backward_backward.inc.h"
#include "kernels/cpu/attention_forward.inc.h"
#include "kernels/cpu/avx512_kernels.h"
#include "kernels/cpu/few_rows_backward.inc.h"

// Only the kernels of bfloat16 differ from those of AVX-512.

namespace qkv::kernels::avx512_amx {

constexpr BackwardKernels<float> few_rows_in_tiles_kernels =
    make_few_rows_backward_kernels<AmxForward<BFloat16>>();
extern const HalfForwardKernels bfloat16_forward_kernels = {
    make_forward_kernels<AmxForward<BFloat16>>(&few_rows_in_tiles_kernels),
    AmxForward<BFloat16>::takes};
extern const HalfBackwardKernels bfloat16_backward_kernels = make_amx_backward_kernels();
extern const HalfTangentKernels bfloat16_tangent_kernels = {make_tangent_kernels<AmxProducts>(),
                                                            amx_backward_takes};

extern const CpuKernelTable table = {"avx512_amx",
                                     avx512::float32_kernels,
                                     avx512::float64_kernels,
                                     &bfloat16_forward_kernels,
                                     &bfloat16_backward_kernels,
                                     &bfloat16_tangent_kernels};

}  // namespace qkv::kernels::avx512_amx
