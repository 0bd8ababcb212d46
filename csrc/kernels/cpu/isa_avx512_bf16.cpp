#define QKV_ISA avx512_bf16
// On Zen 4 multiply-adds wait for sums that are stored many at a time: 24 of them cost 30 cycles,
// 12 cost 3.
#define QKV_FEWER_SUMS
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/all_kernels.inc.h"
#include "kernels/cpu/avx512_kernels.h"
#include "kernels/cpu/exp_by_table.inc.h"
#include "kernels/cpu/fixed_point_gradients.inc.h"
#include "kernels/cpu/forward_in_pairs.inc.h"
#include "kernels/cpu/in_pairs.inc.h"
#include "kernels/cpu/rounded_products.inc.h"

// Kernels of bfloat16, and of float32 for processors that add, permute and shift beside
// multiply-adds, as AMD's do, for which this set is chosen (isa.cpp).

namespace qkv::kernels::avx512_bf16 {

inline bool takes_all(const Problem<float>&) { return true; }

constexpr CpuKernels<float> float32_kernels =
    make_kernels<float, ForwardProducts<float, ExpByTable, /*kBeside=*/true>,
                 InNumbers<float, ExpByTable, /*kBeside=*/true>>();
constexpr BackwardKernels<float> few_rows_in_pairs_kernels =
    make_few_rows_backward_kernels<ForwardInPairs>();
constexpr HalfForwardKernels bfloat16_forward_kernels = {
    make_forward_kernels<ForwardInPairs>(&few_rows_in_pairs_kernels), ForwardInPairs::takes};
constexpr HalfBackwardKernels bfloat16_backward_kernels = {
    make_backward_kernels<InPairs, FixedPointGradients>(), takes_all};
constexpr HalfTangentKernels bfloat16_tangent_kernels = {make_tangent_kernels<RoundedProducts>(),
                                                         takes_all};

extern const CpuKernelTable table = {"avx512_bf16",
                                     float32_kernels,
                                     avx512::float64_kernels,
                                     &bfloat16_forward_kernels,
                                     &bfloat16_backward_kernels,
                                     &bfloat16_tangent_kernels};

}  // namespace qkv::kernels::avx512_bf16
