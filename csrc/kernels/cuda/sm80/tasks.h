#pragma once

#include "kernels/cuda/simt/tasks.h"

// The kernels for tensor cores, from sm_80 on, as the host calls them: forward and backward of
// 16-bit types. What they do not take is for the kernels for any GPU.

namespace qkv::kernels::sm80 {

/// Whether the current device has tensor cores for the forward's output, by the sizes of a head
/// alone: its 16-bit numbers are multiplied as such, and so are weights, rounded, of which there
/// must be enough for roundings to average out. Its scores are not those of derivatives.
bool takes_forward(const Problem<float>& problem);
inline bool takes_forward(const Problem<double>&) { return false; }

int attention_forward(const simt::ForwardTask<float>& task, void* stream);

/// The same for the gradients of query, key and value, from the lse of that forward: their scores
/// are its scores.
bool takes_backward(const Problem<float>& problem);
inline bool takes_backward(const Problem<double>&) { return false; }

/// From delta, the gradients of query, key and value, and sums of rows for that of slopes.
int attention_backward(const simt::BackwardTask<float>& task, void* stream);

}  // namespace qkv::kernels::sm80
