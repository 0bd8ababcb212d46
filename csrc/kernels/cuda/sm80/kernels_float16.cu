#define QKV_ISA simt
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/sm80/launch.cuh"

namespace qkv::kernels::sm80 {

template int run_forward<Float16>(const ForwardTask<float>&, void*);
template int run_backward<Float16>(const BackwardTask<float>&, void*);

}  // namespace qkv::kernels::sm80
