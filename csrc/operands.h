#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <tuple>
#include <vector>

namespace qkv {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// What the internal operators compute on: checked, with every default filled in.
///
/// query (batch.., Hq, M, D), key (batch.., Hkv, N, D), value (batch.., Hkv, N, Dv) with equal
/// batch dimensions, broadcast ones expanded to stride 0. Hkv divides Hq. attn_mask broadcasts to
/// (batch.., Hq, M, N), bool or float; key_mask broadcasts to (batch.., N), bool.
struct Operands {
  Tensor query;
  Tensor key;
  Tensor value;
  OptionalTensor attn_mask;
  OptionalTensor key_mask;
  double scale = 1.0;
  std::vector<c10::SymInt> band;  // left, right (-1 = unbounded), query_offset
};

/// An internal operator takes the operands one by one, as a schema must have them, and then the
/// rest of its arguments. Here they are put together and taken apart, so that nobody else has to.
template <class Signature>
class InternalOp;

template <class Result, class... Rest>
class InternalOp<Result(const Operands&, Rest...)> {
 public:
  explicit InternalOp(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Flat>()) {}

  Result operator()(const Operands& x, Rest... rest) const {
    return handle_.call(x.query, x.key, x.value, x.attn_mask, x.key_mask, x.scale, x.band, rest...);
  }

  Result redispatch(c10::DispatchKeySet keys, const Operands& x, Rest... rest) const {
    return handle_.redispatch(keys, x.query, x.key, x.value, x.attn_mask, x.key_mask, x.scale,
                              x.band, rest...);
  }

 private:
  using Flat = Result(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                      const OptionalTensor&, double, c10::SymIntArrayRef, Rest...);
  c10::TypedOperatorHandle<Flat> handle_;
};

template <auto kKernel>
struct FlatKernel;

template <class Result, class... Rest, Result (*kKernel)(const Operands&, Rest...)>
struct FlatKernel<kKernel> {
  static Result call(const Tensor& query, const Tensor& key, const Tensor& value,
                     const OptionalTensor& attn_mask, const OptionalTensor& key_mask, double scale,
                     c10::SymIntArrayRef band, Rest... rest) {
    return kKernel({query, key, value, attn_mask, key_mask, scale, band.vec()}, rest...);
  }
};

template <class Result, class... Rest,
          Result (*kKernel)(c10::DispatchKeySet, const Operands&, Rest...)>
struct FlatKernel<kKernel> {
  static Result call(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
                     const Tensor& value, const OptionalTensor& attn_mask,
                     const OptionalTensor& key_mask, double scale, c10::SymIntArrayRef band,
                     Rest... rest) {
    return kKernel(keys, {query, key, value, attn_mask, key_mask, scale, band.vec()}, rest...);
  }
};

/// m.impl("_attention_forward", flat<&attention_forward>)
template <auto kKernel>
constexpr auto flat = &FlatKernel<kKernel>::call;

/// output (batch.., Hq, M, Dv), logsumexp (batch.., Hq, M)
using Forward = std::tuple<Tensor, Tensor>(const Operands&);

/// Gradients of query, key, value and attn_mask. Those with needs[i] false are empty tensors.
/// output and logsumexp are those of _attention_forward: functions of the operands, not variables.
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Operands&, const Tensor& grad_out,
                                                            const OptionalTensor& grad_lse,
                                                            const Tensor& out, const Tensor& lse,
                                                            std::array<bool, 4> needs);

/// Tangents of output and logsumexp. A tangent that is not given is zero and costs nothing.
using Jvp = std::tuple<Tensor, Tensor>(const Operands&, const OptionalTensor& query_t,
                                       const OptionalTensor& key_t, const OptionalTensor& value_t,
                                       const OptionalTensor& attn_mask_t);

/// Gradients of <grad_query, grad_grad_query> + .. + <grad_attn_mask, grad_grad_attn_mask> with
/// respect to grad_out, grad_lse, query, key, value and attn_mask.
using BackwardBackward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Operands&, const Tensor& grad_out, const OptionalTensor& grad_lse,
    const OptionalTensor& grad_grad_query, const OptionalTensor& grad_grad_key,
    const OptionalTensor& grad_grad_value, const OptionalTensor& grad_grad_attn_mask,
    std::array<bool, 6> needs);

const InternalOp<Forward>& attention_forward_op();
const InternalOp<Backward>& attention_backward_op();
const InternalOp<Jvp>& attention_jvp_op();
const InternalOp<BackwardBackward>& attention_backward_backward_op();

}  // namespace qkv
