#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

// Where kernels run, and what becomes of their errors. (stream.cpp; the emulation has its own.)

// The dispatch key that csrc/cuda registers for. The emulation of the device runs on tensors of the
// CPU.
#if !defined(QKV_CUDA_KEY)
#define QKV_CUDA_KEY CUDA
#endif

namespace qkv::cuda {

/// The current stream of a tensor's device, which is the current device as long as this lives.
class Stream {
 public:
  explicit Stream(const at::Tensor& x);
  ~Stream();
  Stream(const Stream&) = delete;

  void* get() const { return stream_; }

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
  void* stream_;
};

/// Raises what a launch returned, unless it is 0.
void check(const char* op, int error);

}  // namespace qkv::cuda
