#define QKV_ISA simt
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/simt/launch.cuh"

namespace qkv::kernels::simt {

template int run_forward<double>(const ForwardTask<double>&, void*);
template int run_backward<double>(const BackwardTask<double>&, void*);
template int run_jvp<double>(const JvpTask<double>&, void*);
template int run_backward_backward<double>(const BackwardBackwardTask<double>&, void*);

}  // namespace qkv::kernels::simt
