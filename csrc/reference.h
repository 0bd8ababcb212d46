#pragma once

#include "operands.h"

// Attention as it is defined (docs/design.md, section 1), in ordinary ATen operations: what
// runs where there is no fused kernel. Derivatives that no kernel computes are in
// reference_derivatives.cpp. All of it needs memory for all M x N scores.

namespace qkv::reference {

/// The softmax of attention, with float64 numbers for float64, float32 otherwise.
struct Softmax {
  Tensor weights;       // (batch.., Hq, M, N)
  Tensor sink_weights;  // (batch.., Hq, M, 1), undefined without sinks
  Tensor keep;          // bool, broadcasts to weights
};

/// A key/value tensor (.., Hkv, N, width) as (.., Hq, N, width).
Tensor for_query_heads(const Tensor& x, const Operands& operands);

/// a · b where rows of a or columns of b with something non-finite in them take no part in the
/// gradients of the others (0 · NaN is NaN, also where the 0 stands for "masked out"). Two
/// products, unless gradients are off.
Tensor product_of_rows_and_columns(const Tensor& a, const Tensor& b);

/// weights · value, in which a value that is not finite reaches only the rows that keep its key.
Tensor product_of_kept(const Tensor& weights, const Tensor& keep, const Tensor& value);

/// The softcap in the numbers that sums are taken in.
double softcap_of(const Operands& x);

/// tanh(scale · query keyᵀ / softcap), which is softcap(..) / softcap, (batch.., Hq, M, N).
Tensor tanh_of_softcap(const Operands& x);

/// softcap(scale · query keyᵀ), (batch.., Hq, M, N).
Tensor capped_products(const Operands& x);

/// |i + query_offset - j|, (M, N).
Tensor distances(const Operands& x);

Softmax softmax(const Operands& x);

/// What dropout multiplies the weights with, 0 or 1 / (1 - p), (batch.., Hq, M, N); undefined
/// without dropout.
Tensor dropout_factors(const Operands& x);

/// output and logsumexp
TensorTuple<2> attention(const Operands& x);

/// Tangents of output and logsumexp.
TensorTuple<2> attention_jvp(const Operands& x, const Tangents& tangents);

/// The double backward; as attention_jvp in reference_derivatives.cpp.
TensorTuple<8> attention_backward_backward(const Operands& x, const Tensor& grad_out,
                                           const OptionalTensor& grad_lse,
                                           const Tangents& cotangents, NeedsOfSecond needs);

}  // namespace qkv::reference
