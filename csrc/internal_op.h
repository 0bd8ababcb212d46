#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>
#include <utility>

#include "operands.h"

// Calling and implementing the internal operators. A schema has their arguments one by one; here
// structs are taken apart into those and put together from them, so that nobody else has to.

namespace qkv {

template <class... Args>
struct Types {
  static constexpr size_t kCount = sizeof...(Args);
};
template <class... A, class... B>
Types<A..., B...> operator+(Types<A...>, Types<B...>);

/// An argument as the schema has it: one that is whole, or a struct's members in their order.
template <class T>
struct Argument {
  using Parts = Types<T>;
  static std::tuple<T> take_apart(T x) { return {x}; }
  static T put_together(T x) { return x; }
};

template <>
struct Argument<const Operands&> {
  using Parts =
      Types<const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
            const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
            const OptionalTensor&, std::optional<double>, double, double, c10::SymIntArrayRef>;
  static auto take_apart(const Operands& x) {
    return std::tie(x.query, x.key, x.value, x.attn_mask, x.alibi_slopes, x.sinks, x.key_mask,
                    x.dropout_seed, x.scale, x.softcap, x.dropout_p, x.band);
  }
  static Operands put_together(const Tensor& query, const Tensor& key, const Tensor& value,
                               const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                               const OptionalTensor& sinks, const OptionalTensor& key_mask,
                               const OptionalTensor& dropout_seed, std::optional<double> scale,
                               double softcap, double dropout_p, c10::SymIntArrayRef band) {
    return {query,    key,          value, attn_mask, alibi_slopes, sinks,
            key_mask, dropout_seed, scale, softcap,   dropout_p,    band.vec()};
  }
};

template <>
struct Argument<const ForwardResults&> {
  using Parts = Types<const Tensor&, const Tensor&, const Tensor&, const Tensor&>;
  static auto take_apart(const ForwardResults& x) {
    return std::tie(x.out, x.lse, x.out_rest, x.lse_rest);
  }
  static ForwardResults put_together(const Tensor& out, const Tensor& lse, const Tensor& out_rest,
                                     const Tensor& lse_rest) {
    return {out, lse, out_rest, lse_rest};
  }
};

template <>
struct Argument<const Tangents&> {
  using Parts = Types<const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&>;
  static auto take_apart(const Tangents& x) { return std::tie(x[0], x[1], x[2], x[3], x[4], x[5]); }
  template <class... Tensors>
  static Tangents put_together(const Tensors&... x) {
    return {x...};
  }
};

template <class... Args>
using FlatTypes = decltype((Types<>() + ... + typename Argument<Args>::Parts()));

template <class Result, class Flat>
struct FlatSignature;
template <class Result, class... Flat>
struct FlatSignature<Result, Types<Flat...>> {
  using type = Result(Flat...);
};

/// Calls an internal operator.
template <class Signature>
class InternalOp;

template <class Result, class... Args>
class InternalOp<Result(Args...)> {
 public:
  explicit InternalOp(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Flat>()) {}

  Result operator()(Args... args) const {
    return std::apply([this](const auto&... flat) { return handle_.call(flat...); },
                      std::tuple_cat(Argument<Args>::take_apart(args)...));
  }

  Result redispatch(c10::DispatchKeySet keys, Args... args) const {
    return std::apply([&](const auto&... flat) { return handle_.redispatch(keys, flat...); },
                      std::tuple_cat(Argument<Args>::take_apart(args)...));
  }

 private:
  using Flat = typename FlatSignature<Result, FlatTypes<Args...>>::type;
  c10::TypedOperatorHandle<Flat> handle_;
};

template <auto kKernel, class Result, class Args, class Flat>
struct FlatKernelOf;

template <auto kKernel, class Result, class... Args, class... Flat>
struct FlatKernelOf<kKernel, Result, Types<Args...>, Types<Flat...>> {
  static Result call(Flat... flat) {
    return of_all(std::tie(flat...), std::index_sequence_for<Args...>());
  }

 private:
  template <class All, size_t... i>
  static Result of_all(const All& all, std::index_sequence<i...>) {
    return kKernel(
        part<Args, first_of(i)>(all, std::make_index_sequence<Argument<Args>::Parts::kCount>())...);
  }

  template <class Arg, size_t kFirst, class All, size_t... k>
  static decltype(auto) part(const All& all, std::index_sequence<k...>) {
    return Argument<Arg>::put_together(std::get<kFirst + k>(all)...);
  }

  /// Where argument i begins.
  static constexpr size_t first_of(size_t i) {
    constexpr size_t kCounts[] = {Argument<Args>::Parts::kCount...};
    size_t first = 0;
    for (size_t j = 0; j < i; ++j) first += kCounts[j];
    return first;
  }
};

template <auto kKernel>
struct FlatKernel;
template <class Result, class... Args, Result (*kKernel)(Args...)>
struct FlatKernel<kKernel> : FlatKernelOf<kKernel, Result, Types<Args...>, FlatTypes<Args...>> {};

/// m.impl("_attention_forward", flat<&attention_forward>)
template <auto kKernel>
constexpr auto flat = &FlatKernel<kKernel>::call;

/// Results: as ForwardResults, of which derivatives need out_rest.
using Forward = TensorTuple<4>(const Operands&, bool needs_rest);

/// The weights, logsumexp and what rounding took from it. There is no dropout, and values have no
/// columns.
using Weights = TensorTuple<3>(const Operands&);

/// Gradients of the differentiable operands. Those with needs[i] false are empty tensors.
/// The forward's results are functions of the operands, not variables.
using Backward = TensorTuple<6>(const Operands&, const Tensor& grad_out,
                                const OptionalTensor& grad_lse, const ForwardResults&, Needs needs);

/// The same of <grad_weights, weights>.
using WeightsBackward = TensorTuple<6>(const Operands&, const Tensor& grad_weights,
                                       const Tensor& lse, const Tensor& lse_rest, Needs needs);

/// Tangents of output and logsumexp. A tangent that is not given is zero and costs nothing.
using Jvp = TensorTuple<2>(const Operands&, const ForwardResults&, const Tangents&);

/// Gradients of <gradients, cotangents>, of those that have one, with respect to grad_out, grad_lse
/// and the differentiable operands.
using BackwardBackward = TensorTuple<8>(const Operands&, const Tensor& grad_out,
                                        const OptionalTensor& grad_lse, const ForwardResults&,
                                        const Tangents& cotangents, NeedsOfSecond needs);

constexpr const char* kForwardOp = "qkv::_attention_forward";
constexpr const char* kWeightsOp = "qkv::_attention_weights";
constexpr const char* kBackwardOp = "qkv::_attention_backward";
constexpr const char* kWeightsBackwardOp = "qkv::_attention_weights_backward";
constexpr const char* kJvpOp = "qkv::_attention_jvp";
constexpr const char* kBackwardBackwardOp = "qkv::_attention_backward_backward";

const InternalOp<Forward>& attention_forward_op();
const InternalOp<Weights>& attention_weights_op();
const InternalOp<Backward>& attention_backward_op();
const InternalOp<WeightsBackward>& attention_weights_backward_op();
const InternalOp<Jvp>& attention_jvp_op();
const InternalOp<BackwardBackward>& attention_backward_backward_op();

}  // namespace qkv
