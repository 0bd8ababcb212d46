#pragma once

#include <stdint.h>

#include "kernels/params.h"

// The kernels for any NVIDIA GPU as the host calls them. Of T = float, query, key, value and what
// is shaped like them are all stored as Problem::key_value_storage says: pointers to float in
// Params then point to such numbers. Everything is put on a cudaStream_t and returns at once, a
// cudaError_t, 0 if all is well.

namespace qkv::kernels::simt {

template <class T>
struct ForwardTask {
  ForwardParams<T> forward;
  int64_t splits;  // ranges that the keys are cut into
};

/// The keys are not cut: backward.splits and partial_grad_query are not read.
template <class T>
struct BackwardTask {
  BackwardParams<T> backward;
  T* delta;             // (B, Hq, M), dense: <dO, O> - dLSE of each row
  double* grad_slopes;  // (B, Hq), or nullptr
  double* grad_sinks;   // as grad_slopes
};

/// Directions lie like their operands, that of attn_mask as Mask::type says.
template <class T>
struct JvpTask {
  JvpParams<T> jvp;
  Operand<const T> out_rest;  // as in BackwardParams
  Operand<T> out_t_rest;      // likewise, of out_t; without data if not asked for
};

/// The derivative of the backward along the directions: results go where the backward's would.
template <class T>
struct BackwardBackwardTask {
  BackwardTask<T> backward;
  Directions<T> directions;
  Operand<const T> out_t;  // from JvpTask, with the same directions
  Operand<const T> out_t_rest;
  const T* lse_t;
  T* delta_t;  // (B, Hq, M), dense: <dO, O'> of each row
};

/// How many ranges the keys are cut into when rows are few: of the sizes of a head alone.
template <class T>
int64_t forward_splits(const Problem<T>& problem);

/// Whether lse comes from the scores that derivatives compute, to the bit. Else these need an lse
/// of their own, that of a forward without out.
template <class T>
bool forward_has_scores_of_derivatives(const Problem<T>& problem);

/// Numbers of the buffer for partial results; 0: none is needed.
template <class T>
int64_t forward_partial_size(const ForwardTask<T>& task);

template <class T>
int attention_forward(const ForwardTask<T>& task, void* stream);

template <class T>
int attention_backward(const BackwardTask<T>& task, void* stream);

/// What of it comes before the gradients of query, key and value, delta, and what comes after them:
/// the gradients of mask, slopes and sinks.
int row_deltas(const BackwardTask<float>& task, void* stream);
int option_gradients(const BackwardTask<float>& task, void* stream);

template <class T>
int attention_jvp(const JvpTask<T>& task, void* stream);

template <class T>
int attention_backward_backward(const BackwardBackwardTask<T>& task, void* stream);

}  // namespace qkv::kernels::simt
