#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <array>
#include <vector>

#include "operands.h"
#include "sizes.h"

// Where results lie in memory. Real and meta kernels both allocate by these functions, so that
// they agree.

namespace qkv {

/// Strides for a dense tensor of these sizes, with its dimensions ordered in memory as those with
/// the strides `like` (as many) are. Dimensions of stride 0 keep their place.
inline std::vector<c10::SymInt> dense_strides(c10::SymIntArrayRef like, c10::SymIntArrayRef sizes) {
  const auto rank = static_cast<int64_t>(sizes.size());
  std::vector<int64_t> order(rank);  // outermost first
  for (int64_t d = 0; d < rank; ++d) order[d] = d;
  // Insertion sort by falling stride; what cannot be compared (stride 0, equal strides) stays.
  for (int64_t d = 1; d < rank; ++d) {
    for (int64_t at = d; at > 0; --at) {
      const c10::SymInt& outer = like[order[at - 1]];
      const c10::SymInt& inner = like[order[at]];
      if (is_known_to_be(outer, 0) || is_known_to_be(inner, 0)) break;
      if (!is_smaller_stride(outer, inner)) break;
      std::swap(order[at - 1], order[at]);
    }
  }
  std::vector<c10::SymInt> dense(rank);
  c10::SymInt step = 1;
  for (int64_t at = rank - 1; at >= 0; --at) {
    dense[order[at]] = step;
    step = step * sizes[order[at]].max(1);  // a graph may not know whether it is 0
  }
  return dense;
}

/// An empty tensor of these sizes, dense, with its dimensions ordered in memory as those of `like`
/// (same rank) are.
inline Tensor empty_dense_like(const Tensor& like, c10::SymIntArrayRef sizes) {
  return at::empty_strided_symint(sizes, dense_strides(like.sym_strides(), sizes), like.options());
}

inline bool has_16_bits(const Tensor& x) {
  return x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
}

/// (batch.., Hq, M, Dv), as query lies in memory.
inline Tensor empty_output(const Operands& x) {
  auto sizes = x.query.sym_sizes().vec();
  sizes.back() = x.value.sym_size(-1);
  return empty_dense_like(x.query, sizes);
}

/// (batch.., Hq, M) of the numbers that sums are taken in.
inline Tensor empty_logsumexp(const Operands& x) {
  auto sizes = x.query.sym_sizes().vec();
  sizes.pop_back();
  return at::empty_symint(sizes, x.query.options().dtype(accumulate_type(x.query)));
}

/// output, logsumexp and their rests; that of output without columns if it is not needed.
inline TensorTuple<4> empty_forward_results(const Operands& x, bool needs_rest) {
  const Tensor out = empty_output(x);
  auto sizes = out.sym_sizes().vec();
  if (!needs_rest || !has_16_bits(out)) sizes.back() = 0;
  return {out, empty_logsumexp(x), empty_dense_like(x.query, sizes), empty_logsumexp(x)};
}

/// (batch.., Hq, M, N)
inline std::vector<c10::SymInt> weights_sizes(const Operands& x) {
  auto sizes = x.query.sym_sizes().vec();
  sizes.back() = x.key.sym_size(-2);
  return sizes;
}

/// weights, contiguous, logsumexp and its rest.
inline TensorTuple<3> empty_weights(const Operands& x) {
  return {at::empty_symint(weights_sizes(x), x.query.options()), empty_logsumexp(x),
          empty_logsumexp(x)};
}

/// Each gradient as its input lies in memory; an empty tensor for one that is not needed.
inline Gradients empty_gradients(const Operands& x, Needs needs) {
  const auto inputs = x.tensors();
  Gradients gradients;
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] = needs[i] ? empty_dense_like(*inputs[i], inputs[i]->sym_sizes())
                            : at::empty({0}, x.query.options());
  }
  return gradients;
}

/// Those of grad_output and grad_logsumexp first, then those of the operands.
inline std::array<Tensor, 8> empty_gradients_of_second(const Operands& x, const Tensor& grad_out,
                                                       NeedsOfSecond needs) {
  const auto none = [&] { return at::empty({0}, x.query.options()); };
  std::array<Tensor, 8> gradients = {
      needs[0] ? empty_dense_like(grad_out, grad_out.sym_sizes()) : none(),
      needs[1] ? empty_logsumexp(x) : none()};
  const Gradients grads = empty_gradients(x, of_operands(needs));
  std::copy(grads.begin(), grads.end(), gradients.begin() + 2);
  return gradients;
}

}  // namespace qkv
