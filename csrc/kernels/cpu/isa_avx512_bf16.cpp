#define QKV_ISA avx512_bf16
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/attention_forward.inc.h"
#include "kernels/cpu/bfloat16_source.inc.h"
#include "kernels/cpu/isa.h"

// Only the forward pass of bfloat16 differs from AVX-512.

namespace qkv::kernels {

namespace avx512 {
extern const CpuKernels<float> float32_kernels;
extern const CpuKernels<double> float64_kernels;
}  // namespace avx512

namespace avx512_bf16 {

constexpr ForwardKernels<float> bfloat16_kernels = {
    forward_units<float>,
    forward_scratch_bytes<BFloat16Source, float>,
    forward_partial_size<float>,
    [](const ForwardParams<float>& params) -> int64_t {
      const Problem<float>& p = params.problem;
      return p.batch * p.kv_heads * BFloat16Source::prepared_pairs(p) * sizeof(BFloat16Pair);
    },
    BFloat16Source::is_for,
    prepare_bfloat16,
    attention_forward<BFloat16Source, float>,
    merge_forward<float>,
};

extern const CpuKernelTable table = {"avx512_bf16", avx512::float32_kernels,
                                     avx512::float64_kernels, &bfloat16_kernels};

}  // namespace avx512_bf16

}  // namespace qkv::kernels
