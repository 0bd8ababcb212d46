#define QKV_ISA simt
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/sm80/attention_backward.cuh"
#include "kernels/cuda/sm80/attention_forward.cuh"
#include "kernels/cuda/sm80/tasks.h"

namespace qkv::kernels::sm80 {

template <class Element>
int run_forward(const ForwardTask<float>& task, void* stream);
extern template int run_forward<BFloat16>(const ForwardTask<float>&, void*);
extern template int run_forward<Float16>(const ForwardTask<float>&, void*);

template <class Element>
int run_backward(const BackwardTask<float>& task, void* stream);
extern template int run_backward<BFloat16>(const BackwardTask<float>&, void*);
extern template int run_backward<Float16>(const BackwardTask<float>&, void*);

bool takes_forward(const Problem<float>& p) {
  constexpr int64_t kLeastKeys = 128, kMostHeadDim = 256;
  return p.key_value_storage != Storage::kSame && p.keys >= kLeastKeys && p.head_dim > 0 &&
         p.head_dim <= kMostHeadDim && p.value_dim > 0 && rows_of_kv_head(p) > kMostFewRowsOfHead &&
         device::has_tensor_cores() &&
         ForwardShared<BFloat16, 1, 128>(nullptr, p.head_dim).memory.taken() <=
             device::most_shared_bytes(1);
}

int attention_forward(const ForwardTask<float>& task, void* stream) {
  return task.forward.problem.key_value_storage == Storage::kBFloat16
             ? run_forward<BFloat16>(task, stream)
             : run_forward<Float16>(task, stream);
}

bool takes_backward(const Problem<float>& p) {
  constexpr int64_t kMostValueDim = 256;
  return takes_forward(p) && p.value_dim <= kMostValueDim &&
         BackwardTiles<BFloat16, 128, true>(nullptr, p.head_dim, p.value_dim, 1).memory.taken() <=
             device::most_shared_bytes(1);
}

int attention_backward(const BackwardTask<float>& task, void* stream) {
  return task.backward.problem.key_value_storage == Storage::kBFloat16
             ? run_backward<BFloat16>(task, stream)
             : run_backward<Float16>(task, stream);
}

}  // namespace qkv::kernels::sm80
