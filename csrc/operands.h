#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymFloat.h>
#include <c10/core/SymIntArrayRef.h>

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

/// What the forward returns, and its derivatives take: output (batch.., Hq, M, Dv), logsumexp
/// (batch.., Hq, M), and what rounding took from each; out_rest is as out, but without columns
/// unless out is of 16 bits and derivatives follow.
struct ForwardResults {
  Tensor out;
  Tensor lse;
  Tensor out_rest;
  Tensor lse_rest;

  std::array<Tensor, 4> tensors() const { return {out, lse, out_rest, lse_rest}; }
};

/// For grad_out, grad_lse and the differentiable operands.
using NeedsOfSecond = std::array<bool, Operands::kDifferentiable + 2>;

/// Of what is there for grad_out, grad_lse and the differentiable operands, the operands' part.
template <class T>
std::array<T, Operands::kDifferentiable> of_operands(
    const std::array<T, Operands::kDifferentiable + 2>& of_all) {
  std::array<T, Operands::kDifferentiable> part;
  std::copy(of_all.begin() + 2, of_all.end(), part.begin());
  return part;
}

}  // namespace qkv
