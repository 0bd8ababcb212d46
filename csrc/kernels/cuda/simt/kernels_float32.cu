#define QKV_ISA simt
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/simt/launch.cuh"

namespace qkv::kernels::simt {

template int run_forward<float>(const ForwardTask<float>&, void*);
template int run_backward<float>(const BackwardTask<float>&, void*);
template int launch_delta<float>(const BackwardTask<float>&, void*);
template int run_option_gradients<float>(const BackwardTask<float>&, void*);
template int run_jvp<float>(const JvpTask<float>&, void*);
template int run_backward_backward<float>(const BackwardBackwardTask<float>&, void*);

}  // namespace qkv::kernels::simt
