#include "reference.h"

#include <ATen/ATen.h>

#include <limits>

namespace qkv::reference {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// a · b where rows of a or columns of b with something non-finite in them take no part in the
/// gradients of the others (0 · NaN is NaN, also where the 0 stands for "masked out").
Tensor product_of_rows_and_columns(const Tensor& a, const Tensor& b) {
  const Tensor a_finite = a.isfinite(), b_finite = b.isfinite();
  const Tensor finite = at::matmul(a.where(a_finite, 0.0), b.where(b_finite, 0.0));
  return finite.where(a_finite.all(-1, true).logical_and(b_finite.all(-2, true)),
                      at::matmul(a.detach(), b.detach()));
}

/// |i + query_offset - j| and its sign, (M, N).
Tensor distances(const Operands& x) {
  const auto options = x.query.options().dtype(at::kLong);
  const Tensor p = at::arange(x.query.sym_size(-2), options) + x.band[2];
  return p.unsqueeze(-1) - at::arange(x.key.sym_size(-2), options);
}

/// Philox4x32-10 (Salmon et al., SC 2011), element (i, j) of head h: of the 128 bits for counter
/// (j / 8, i, h, 0) and key seed, the 16 bits number j % 8. int64 tensors hold the 32-bit words.
Tensor random_16_bits(const Operands& x, const Tensor& seed) {
  constexpr int64_t kWord = 0xffffffff;
  const auto options = seed.options();
  const Tensor j = at::arange(x.key.sym_size(-2), options);
  Tensor c0 = j.div(8, "floor");
  Tensor c1 = at::arange(x.query.sym_size(-2), options).unsqueeze(-1);
  Tensor c2 = at::arange(x.query.sym_size(-3), options).unsqueeze(-1).unsqueeze(-1);
  Tensor c3 = at::zeros({}, options);
  Tensor k0 = seed.bitwise_and(kWord).unsqueeze(-1).unsqueeze(-1).unsqueeze(-1);
  Tensor k1 =
      seed.bitwise_right_shift(32).bitwise_and(kWord).unsqueeze(-1).unsqueeze(-1).unsqueeze(-1);
  const auto high = [&](const Tensor& c, int64_t m) {  // of the 64-bit product c · m
    const Tensor low_half = c.bitwise_and(0xffff) * m;
    const Tensor high_half = c.bitwise_right_shift(16) * m + low_half.bitwise_right_shift(16);
    return high_half.bitwise_right_shift(16).bitwise_and(kWord);
  };
  const auto low = [&](const Tensor& c, int64_t m) {
    const Tensor high_half = (c.bitwise_right_shift(16) * m).bitwise_and(0xffff);
    return (c.bitwise_and(0xffff) * m + high_half * 65536).bitwise_and(kWord);
  };
  for (int round = 0; round < 10; ++round) {
    const Tensor n0 = high(c2, 0xCD9E8D57).bitwise_xor(c1).bitwise_xor(k0);
    const Tensor n2 = high(c0, 0xD2511F53).bitwise_xor(c3).bitwise_xor(k1);
    c1 = low(c2, 0xCD9E8D57);
    c3 = low(c0, 0xD2511F53);
    c0 = n0;
    c2 = n2;
    k0 = (k0 + 0x9E3779B9).bitwise_and(kWord);
    k1 = (k1 + 0xBB67AE85).bitwise_and(kWord);
  }
  const Tensor word = j.remainder(8).div(2, "floor");
  const Tensor of_word = c0.where(word == 0, c1.where(word == 1, c2.where(word == 2, c3)));
  return at::bitwise_right_shift(of_word, j.remainder(2) * 16).bitwise_and(0xffff);
}

/// The probability is rounded to a multiple of 2^-16, and the weights grow by what it really is.
Tensor drop(const Tensor& weights, const Operands& x, const Tensor& seed, double dropout_p) {
  const int64_t threshold = std::llround(dropout_p * 65536.0);
  if (threshold == 65536) return weights * 0.0;
  const Tensor stays = random_16_bits(x, seed) >= threshold;
  return weights.where(stays, 0.0) * (65536.0 / static_cast<double>(65536 - threshold));
}

}  // namespace

at::ScalarType accumulate_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor for_query_heads(const Tensor& x, const Operands& operands) {
  const c10::SymInt heads = operands.query.sym_size(-3);
  return x.sym_size(-3) == heads ? x : x.repeat_interleave_symint(heads / x.sym_size(-3), -3);
}

Tensor kept_pairs(const Operands& x) {
  const Tensor distance = distances(x);
  Tensor keep = at::ones_like(distance, distance.options().dtype(at::kBool));
  if (x.band[0] >= 0) keep = keep.logical_and(distance <= x.band[0]);
  if (x.band[1] >= 0) keep = keep.logical_and(distance >= -x.band[1]);
  if (x.key_mask) keep = keep.logical_and(x.key_mask->unsqueeze(-2).unsqueeze(-2));
  if (!x.attn_mask) return keep;
  return keep.logical_and(x.attn_mask->scalar_type() == at::kBool ? *x.attn_mask
                                                                  : *x.attn_mask != -kInfinity);
}

Tensor product_of_kept(const Tensor& weights, const Tensor& keep, const Tensor& value) {
  const Tensor kept = keep.to(weights.scalar_type()).expand_symint(weights.sym_sizes());
  const auto reaches = [&](const Tensor& marked) {
    return at::matmul(kept, marked.to(weights.scalar_type())) > 0;
  };
  const Tensor up = reaches(value == kInfinity), down = reaches(value == -kInfinity);
  const Tensor invalid = reaches(value.isnan()).logical_or(up.logical_and(down));
  return at::matmul(weights, value.where(value.isfinite(), 0.0))
      .masked_fill(up, kInfinity)
      .masked_fill(down, -kInfinity)
      .masked_fill(invalid, std::numeric_limits<double>::quiet_NaN());
}

Softmax softmax(const Call& call) {
  const Operands& x = call.operands;
  const auto real = accumulate_type(x.query);
  const Tensor key = for_query_heads(x.key, x).to(real);
  Tensor scores = product_of_rows_and_columns(x.query.to(real) * x.scale, key.transpose(-2, -1));
  if (call.softcap != 0.0) scores = at::tanh(scores / call.softcap) * call.softcap;
  if (x.attn_mask && x.attn_mask->scalar_type() != at::kBool)
    scores = scores + x.attn_mask->to(real);
  if (call.alibi_slopes) {
    const Tensor slopes = call.alibi_slopes->to(real).unsqueeze(-1).unsqueeze(-1);
    scores = scores - slopes * distances(x).abs();
  }
  Softmax result;
  result.keep = kept_pairs(x);
  scores = scores.where(result.keep, -kInfinity);
  if (call.sinks) {
    const Tensor sinks = call.sinks->to(real).unsqueeze(-1).unsqueeze(-1);
    auto column = scores.sym_sizes().vec();
    column.back() = 1;
    result.lse = at::logsumexp(at::cat({scores, sinks.expand_symint(column)}, -1), -1);
  } else {
    // The logsumexp of nothing is -inf, but its derivatives are 0, not ATen's NaN.
    const Tensor empty = result.keep.any(-1).logical_not();
    result.lse = at::logsumexp(scores.masked_fill(empty.unsqueeze(-1), 0.0), -1)
                     .masked_fill(empty, -kInfinity);
  }
  // -inf - -inf is NaN; rows that keep nothing get weight 0 by selection.
  const Tensor lse = result.lse.masked_fill(result.lse == -kInfinity, 0.0).unsqueeze(-1);
  result.weights = at::exp(scores - lse).where(result.keep, 0.0);
  return result;
}

std::tuple<Tensor, Tensor> attention(const Call& call, const OptionalTensor& seed) {
  const Operands& x = call.operands;
  const auto [weights, lse, keep] = softmax(call);
  const Tensor used = seed ? drop(weights, x, *seed, call.dropout_p) : weights;
  const Tensor value = for_query_heads(x.value, x).to(weights.scalar_type());
  // Nothing reaches a row that keeps nothing, nor comes back from its gradient.
  const Tensor out = product_of_kept(used, keep, value).where(keep.any(-1, true), 0.0);
  return {out.to(x.query.scalar_type()), lse};
}

}  // namespace qkv::reference
