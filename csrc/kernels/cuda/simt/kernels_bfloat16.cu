#define QKV_ISA simt
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/simt/launch.cuh"

namespace qkv::kernels::simt {

template int merge_splits<BFloat16>(const ForwardTask<float>&, void*);
template int run_forward<BFloat16>(const ForwardTask<float>&, void*);
template int run_backward<BFloat16>(const BackwardTask<float>&, void*);
template int launch_delta<BFloat16>(const BackwardTask<float>&, void*);
template int run_option_gradients<BFloat16>(const BackwardTask<float>&, void*);
template int run_jvp<BFloat16>(const JvpTask<float>&, void*);
template int run_backward_backward<BFloat16>(const BackwardBackwardTask<float>&, void*);

}  // namespace qkv::kernels::simt
