#define QKV_ISA simt
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/simt/launch.cuh"

// The element types that there are kernels of, each compiled by a kernels_*.cu of its own.

namespace qkv::kernels::simt {

#define QKV_COMPILED_ELSEWHERE(Element)                                               \
  extern template int run_forward<Element>(const ForwardTask<Real<Element>>&, void*); \
  extern template int run_backward<Element>(const BackwardTask<Real<Element>>&, void*);
QKV_COMPILED_ELSEWHERE(float)
QKV_COMPILED_ELSEWHERE(double)
QKV_COMPILED_ELSEWHERE(BFloat16)
QKV_COMPILED_ELSEWHERE(Float16)

template <class T>
int64_t forward_splits(const Problem<T>& problem) {
  return number_of_splits(problem);
}
template int64_t forward_splits(const Problem<float>&);
template int64_t forward_splits(const Problem<double>&);

template <class T>
int64_t forward_partial_size(const ForwardTask<T>& task) {
  const Problem<T>& p = task.forward.problem;
  return task.splits == 1 ? 0
                          : p.batch * p.query_heads * p.queries * task.splits * partial_row_size(p);
}
template int64_t forward_partial_size(const ForwardTask<float>&);
template int64_t forward_partial_size(const ForwardTask<double>&);

template <>
int attention_forward(const ForwardTask<double>& task, void* stream) {
  return run_forward<double>(task, stream);
}
template <>
int attention_forward(const ForwardTask<float>& task, void* stream) {
  switch (task.forward.problem.key_value_storage) {
    case Storage::kBFloat16:
      return run_forward<BFloat16>(task, stream);
    case Storage::kFloat16:
      return run_forward<Float16>(task, stream);
    default:
      return run_forward<float>(task, stream);
  }
}

template <>
int attention_backward(const BackwardTask<double>& task, void* stream) {
  return run_backward<double>(task, stream);
}
template <>
int attention_backward(const BackwardTask<float>& task, void* stream) {
  switch (task.backward.problem.key_value_storage) {
    case Storage::kBFloat16:
      return run_backward<BFloat16>(task, stream);
    case Storage::kFloat16:
      return run_backward<Float16>(task, stream);
    default:
      return run_backward<float>(task, stream);
  }
}

}  // namespace qkv::kernels::simt
