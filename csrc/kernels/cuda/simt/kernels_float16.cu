#define QKV_ISA simt
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/simt/launch.cuh"

namespace qkv::kernels::simt {

template int merge_splits<Float16>(const ForwardTask<float>&, void*);
template int run_forward<Float16>(const ForwardTask<float>&, void*);
template int run_backward<Float16>(const BackwardTask<float>&, void*);
template int launch_delta<Float16>(const BackwardTask<float>&, void*);
template int run_option_gradients<Float16>(const BackwardTask<float>&, void*);
template int run_jvp<Float16>(const JvpTask<float>&, void*);
template int run_backward_backward<Float16>(const BackwardBackwardTask<float>&, void*);

}  // namespace qkv::kernels::simt
