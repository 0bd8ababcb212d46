#define QKV_ISA simt
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/simt/launch.cuh"

// The element types that there are kernels of, each compiled by a kernels_*.cu of its own.

namespace qkv::kernels::simt {

#define QKV_COMPILED_ELSEWHERE(Element)                                                          \
  extern template int run_forward<Element>(const ForwardTask<Real<Element>>&, void*);            \
  extern template int run_backward<Element>(const BackwardTask<Real<Element>>&, void*);          \
  extern template int launch_delta<Element>(const BackwardTask<Real<Element>>&, void*);          \
  extern template int run_option_gradients<Element>(const BackwardTask<Real<Element>>&, void*);  \
  extern template int run_jvp<Element>(const JvpTask<Real<Element>>&, void*);                    \
  extern template int run_backward_backward<Element>(const BackwardBackwardTask<Real<Element>>&, \
                                                     void*);
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
bool forward_has_scores_of_derivatives(const Problem<T>& problem) {
  return few_rows_of_tile(problem) == 0;
}
template bool forward_has_scores_of_derivatives(const Problem<float>&);
template bool forward_has_scores_of_derivatives(const Problem<double>&);

template <class T>
int64_t forward_partial_size(const ForwardTask<T>& task) {
  const Problem<T>& p = task.forward.problem;
  return task.splits == 1 ? 0
                          : p.batch * p.query_heads * p.queries * task.splits * partial_row_size(p);
}
template int64_t forward_partial_size(const ForwardTask<float>&);
template int64_t forward_partial_size(const ForwardTask<double>&);

/// run(Element()) for the elements that a problem is stored in.
template <class T, class Run>
int run_stored(const Problem<T>& problem, Run run) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return run(double());
  } else {
    switch (problem.key_value_storage) {
      case Storage::kBFloat16:
        return run(BFloat16());
      case Storage::kFloat16:
        return run(Float16());
      default:
        return run(float());
    }
  }
}

template <class T>
int attention_forward(const ForwardTask<T>& task, void* stream) {
  return run_stored(task.forward.problem,
                    [&](auto element) { return run_forward<decltype(element)>(task, stream); });
}
template int attention_forward(const ForwardTask<float>&, void*);
template int attention_forward(const ForwardTask<double>&, void*);

template <class T>
int attention_backward(const BackwardTask<T>& task, void* stream) {
  return run_stored(task.backward.problem,
                    [&](auto element) { return run_backward<decltype(element)>(task, stream); });
}
template int attention_backward(const BackwardTask<float>&, void*);
template int attention_backward(const BackwardTask<double>&, void*);

int row_deltas(const BackwardTask<float>& task, void* stream) {
  return run_stored(task.backward.problem,
                    [&](auto element) { return launch_delta<decltype(element)>(task, stream); });
}

int option_gradients(const BackwardTask<float>& task, void* stream) {
  return run_stored(task.backward.problem, [&](auto element) {
    return run_option_gradients<decltype(element)>(task, stream);
  });
}

template <class T>
int attention_jvp(const JvpTask<T>& task, void* stream) {
  return run_stored(task.jvp.problem,
                    [&](auto element) { return run_jvp<decltype(element)>(task, stream); });
}
template int attention_jvp(const JvpTask<float>&, void*);
template int attention_jvp(const JvpTask<double>&, void*);

template <class T>
int attention_backward_backward(const BackwardBackwardTask<T>& task, void* stream) {
  return run_stored(task.backward.backward.problem, [&](auto element) {
    return run_backward_backward<decltype(element)>(task, stream);
  });
}
template int attention_backward_backward(const BackwardBackwardTask<float>&, void*);
template int attention_backward_backward(const BackwardBackwardTask<double>&, void*);

}  // namespace qkv::kernels::simt
