#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace qkv {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// What the internal operators compute on: checked, with every default filled in but the scale's.
///
/// query (batch.., Hq, M, D), key (batch.., Hkv, N, D), value (batch.., Hkv, N, Dv) with equal
/// batch dimensions, broadcast ones expanded to stride 0. Hkv divides Hq. attn_mask broadcasts to
/// (batch.., Hq, M, N), bool or float; key_mask to (batch.., N), bool; alibi_slopes and sinks to
/// (batch.., Hq), float. dropout_seed (batch..), int64, is there if dropout_p > 0.
struct Operands {
  Tensor query;
  Tensor key;
  Tensor value;
  OptionalTensor attn_mask;
  OptionalTensor alibi_slopes;
  OptionalTensor sinks;
  OptionalTensor key_mask;
  OptionalTensor dropout_seed;
  std::optional<double> scale;  // see scale_of
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::vector<c10::SymInt> band;  // left, right (-1 = unbounded), query_offset
  int64_t first_head = 0;         // index of query's first head in the whole call

  /// What there are gradients of; the first of the tensors.
  static constexpr size_t kDifferentiable = 6;
  static constexpr size_t kTensors = 8;
  /// How many dimensions each has after its batch. The first of those is its heads, or keys.
  static constexpr int64_t kInnerRanks[kTensors] = {3, 3, 3, 3, 1, 1, 1, 0};

  std::array<OptionalTensor, kTensors> tensors() const {
    return {query, key, value, attn_mask, alibi_slopes, sinks, key_mask, dropout_seed};
  }

  /// These operands with other tensors, in the order of tensors().
  Operands with(const std::array<OptionalTensor, kTensors>& t) const {
    return {*t[0], *t[1], *t[2],   t[3],      t[4], t[5],      t[6],
            t[7],  scale, softcap, dropout_p, band, first_head};
  }
};

/// The dtype that sums are taken in.
inline at::ScalarType accumulate_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Further than every key from every query, yet sums of three of them do not overflow.
constexpr int64_t kFar = int64_t(1) << 60;

/// (left, right, query_offset) that keep the same pairs, none of them further than 2 kFar. What is
/// clamped is where a query's first and last key are, for a window may make up for an offset.
inline std::array<int64_t, 3> clamped_band(int64_t left, int64_t right, int64_t query_offset) {
  const auto near = [](int64_t x) { return std::clamp(x, -kFar, kFar); };
  const int64_t offset = near(query_offset);
  int64_t first = 0, last = 0;
  if (__builtin_sub_overflow(query_offset, left, &first)) first = -kFar;
  if (__builtin_add_overflow(query_offset, right, &last)) last = kFar;
  return {left < 0 ? -1 : offset - near(first), right < 0 ? -1 : near(last) - offset, offset};
}

/// The factor on the scores. Its default depends on the head dim, which may be symbolic while a
/// graph is traced: computed no sooner than here, it leaves one graph for all.
inline at::Scalar scale_of(const Operands& x) {
  if (x.scale) return *x.scale;
  const c10::SymInt head_dim = x.query.sym_size(-1);
  if (head_dim == 0) return 1.0;
  return c10::SymFloat(1.0) / static_cast<c10::SymFloat>(head_dim).sqrt();
}

/// The softcap in the numbers T that sums are taken in: neither it nor its inverse may overflow
/// them; beyond, it makes no difference.
template <class T>
T softcap_of(const Operands& x) {
  const double smallest = std::numeric_limits<T>::min(), largest = 1.0 / (16 * smallest);
  return x.softcap == 0.0 ? T(0) : static_cast<T>(std::clamp(x.softcap, smallest, largest));
}

/// Dropout's probability as the number that 16 random bits are compared with.
inline int64_t dropout_threshold(double p) { return std::llround(p * 65536.0); }

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
    return handle_.call(x.query, x.key, x.value, x.attn_mask, x.alibi_slopes, x.sinks, x.key_mask,
                        x.dropout_seed, x.scale, x.softcap, x.dropout_p, x.band, rest...);
  }

  Result redispatch(c10::DispatchKeySet keys, const Operands& x, Rest... rest) const {
    return handle_.redispatch(keys, x.query, x.key, x.value, x.attn_mask, x.alibi_slopes, x.sinks,
                              x.key_mask, x.dropout_seed, x.scale, x.softcap, x.dropout_p, x.band,
                              rest...);
  }

 private:
  using Flat = Result(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, std::optional<double>, double, double,
                      c10::SymIntArrayRef, Rest...);
  c10::TypedOperatorHandle<Flat> handle_;
};

template <auto kKernel>
struct FlatKernel;

template <class Result, class... Rest, Result (*kKernel)(const Operands&, Rest...)>
struct FlatKernel<kKernel> {
  static Result call(const Tensor& query, const Tensor& key, const Tensor& value,
                     const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& sinks, const OptionalTensor& key_mask,
                     const OptionalTensor& dropout_seed, std::optional<double> scale,
                     double softcap, double dropout_p, c10::SymIntArrayRef band, Rest... rest) {
    return kKernel({query, key, value, attn_mask, alibi_slopes, sinks, key_mask, dropout_seed,
                    scale, softcap, dropout_p, band.vec()},
                   rest...);
  }
};

template <class Result, class... Rest,
          Result (*kKernel)(c10::DispatchKeySet, const Operands&, Rest...)>
struct FlatKernel<kKernel> {
  static Result call(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
                     const Tensor& value, const OptionalTensor& attn_mask,
                     const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                     const OptionalTensor& key_mask, const OptionalTensor& dropout_seed,
                     std::optional<double> scale, double softcap, double dropout_p,
                     c10::SymIntArrayRef band, Rest... rest) {
    return kKernel(keys,
                   {query, key, value, attn_mask, alibi_slopes, sinks, key_mask, dropout_seed,
                    scale, softcap, dropout_p, band.vec()},
                   rest...);
  }
};

/// m.impl("_attention_forward", flat<&attention_forward>)
template <auto kKernel>
constexpr auto flat = &FlatKernel<kKernel>::call;

/// n tensors as an operator returns them; std::tuple_cat turns the array into the tuple.
template <size_t n>
using TensorTuple = decltype(std::tuple_cat(std::array<Tensor, n>()));

template <class... Tensors>
std::array<Tensor, sizeof...(Tensors)> as_array(const std::tuple<Tensors...>& tuple) {
  return std::apply([](const auto&... x) { return std::array<Tensor, sizeof...(Tensors)>{x...}; },
                    tuple);
}

/// One for each differentiable operand, in their order.
using Gradients = std::array<Tensor, Operands::kDifferentiable>;
using Tangents = std::array<OptionalTensor, Operands::kDifferentiable>;
using Needs = std::array<bool, Operands::kDifferentiable>;

/// output (batch.., Hq, M, Dv), logsumexp (batch.., Hq, M), and what rounding took from each, for
/// the backward: output_rest is as output, but without columns unless output is of 16 bits.
using Forward = TensorTuple<4>(const Operands&);

/// Gradients of the differentiable operands. Those with needs[i] false are empty tensors.
/// The results are functions of the operands, not variables.
using Backward = TensorTuple<6>(const Operands&, const Tensor& grad_out,
                                const OptionalTensor& grad_lse, const Tensor& out,
                                const Tensor& lse, const Tensor& out_rest, const Tensor& lse_rest,
                                Needs needs);

/// Tangents of output and logsumexp. A tangent that is not given is zero and costs nothing.
using Jvp = TensorTuple<2>(const Operands&, const Tensor& out, const Tensor& lse,
                           const Tensor& out_rest, const Tensor& lse_rest,
                           const OptionalTensor& query_t, const OptionalTensor& key_t,
                           const OptionalTensor& value_t, const OptionalTensor& attn_mask_t,
                           const OptionalTensor& alibi_slopes_t, const OptionalTensor& sinks_t);

/// Gradients of <grad_query, grad_grad_query> + .. + <grad_sinks, grad_grad_sinks> with respect to
/// grad_out, grad_lse and the differentiable operands.
using NeedsOfSecond = std::array<bool, Operands::kDifferentiable + 2>;

/// Of what is there for grad_out, grad_lse and the differentiable operands, the operands' part.
template <class T>
std::array<T, Operands::kDifferentiable> of_operands(
    const std::array<T, Operands::kDifferentiable + 2>& of_all) {
  std::array<T, Operands::kDifferentiable> part;
  std::copy(of_all.begin() + 2, of_all.end(), part.begin());
  return part;
}

using BackwardBackward = TensorTuple<8>(
    const Operands&, const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
    const Tensor& lse, const Tensor& out_rest, const Tensor& lse_rest,
    const OptionalTensor& grad_grad_query, const OptionalTensor& grad_grad_key,
    const OptionalTensor& grad_grad_value, const OptionalTensor& grad_grad_attn_mask,
    const OptionalTensor& grad_grad_alibi_slopes, const OptionalTensor& grad_grad_sinks,
    NeedsOfSecond needs);

constexpr const char* kForwardOp = "qkv::_attention_forward";
constexpr const char* kBackwardOp = "qkv::_attention_backward";
constexpr const char* kJvpOp = "qkv::_attention_jvp";
constexpr const char* kBackwardBackwardOp = "qkv::_attention_backward_backward";

const InternalOp<Forward>& attention_forward_op();
const InternalOp<Backward>& attention_backward_op();
const InternalOp<Jvp>& attention_jvp_op();
const InternalOp<BackwardBackward>& attention_backward_backward_op();

}  // namespace qkv
