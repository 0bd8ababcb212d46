#include "cuda/stream.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace qkv::cuda {

struct Stream::Guard {
  explicit Guard(at::Device device) : device(device) {}
  c10::cuda::CUDAGuard device;
};

Stream::Stream(const at::Tensor& x)
    : guard_(std::make_unique<Guard>(x.device())),
      stream_(c10::cuda::getCurrentCUDAStream().stream()) {}

Stream::~Stream() = default;

void check(const char* op, int error) {
  if (error == cudaSuccess) return;
  const auto code = static_cast<cudaError_t>(error);
  if (code == cudaErrorNoKernelImageForDevice || code == cudaErrorInvalidDeviceFunction ||
      code == cudaErrorUnsupportedPtxVersion) {
    const auto* device = at::cuda::getCurrentDeviceProperties();
    TORCH_CHECK(false, op,
                ": this build has kernels for the CUDA architectures " QKV_CUDA_BUILT_FOR
                ", none of which runs on ",
                device->name, " (sm_", device->major, device->minor,
                "); build qkv with -DQKV_CUDA_ARCHITECTURES=", device->major, device->minor);
  }
  TORCH_CHECK(false, op, ": CUDA error: ", cudaGetErrorString(code));
}

}  // namespace qkv::cuda
