#include "reference.h"

#include <ATen/ATen.h>

#include <limits>

namespace qkv::reference {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// i + query_offset - j, (M, N).
Tensor signed_distances(const Operands& x) {
  const auto options = x.query.options().dtype(at::kLong);
  const Tensor p = at::arange(x.query.sym_size(-2), options) + x.band[2];
  return p.unsqueeze(-1) - at::arange(x.key.sym_size(-2), options);
}

/// Whether each query keeps each key, whatever the numbers are.
bool keeps_all(const Operands& x) {
  return x.band[0] < 0 && x.band[1] < 0 && !x.key_mask && !x.attn_mask;
}

/// keep(i, j) of band, masks and key mask. Broadcasts to (batch.., Hq, M, N).
Tensor kept_pairs(const Operands& x) {
  if (keeps_all(x)) return at::ones({1, 1}, x.query.options().dtype(at::kBool));
  Tensor keep;
  const auto keep_only = [&](const Tensor& those) {
    keep = keep.defined() ? keep.logical_and(those) : those;
  };
  if (x.band[0] >= 0) keep_only(signed_distances(x) <= x.band[0]);
  if (x.band[1] >= 0) keep_only(signed_distances(x) >= -x.band[1]);
  if (x.key_mask) keep_only(x.key_mask->unsqueeze(-2).unsqueeze(-2));
  if (x.attn_mask) {
    const bool is_bool = x.attn_mask->scalar_type() == at::kBool;
    keep_only(is_bool ? *x.attn_mask : *x.attn_mask != -kInfinity);
  }
  return keep;
}

/// The random number of each weight as kernels/philox.h defines it. int64 tensors hold the 32-bit
/// words.
Tensor random_16_bits(const Operands& x) {
  const Tensor& seed = *x.dropout_seed;
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

}  // namespace

Tensor for_query_heads(const Tensor& x, const Operands& operands) {
  const c10::SymInt heads = operands.query.sym_size(-3);
  const c10::SymInt kv_heads = x.sym_size(-3);
  if (kv_heads == heads) return x;
  // repeat_interleave would fix the number of heads in a graph that is traced.
  auto sizes = x.sym_sizes().vec();
  sizes.insert(sizes.end() - 2, heads / kv_heads);
  return x.unsqueeze(-3).expand_symint(sizes).flatten(-4, -3);
}

Tensor product_of_rows_and_columns(const Tensor& a, const Tensor& b) {
  if (!at::GradMode::is_enabled()) return at::matmul(a, b);  // the same but for its gradients
  const Tensor a_finite = a.isfinite(), b_finite = b.isfinite();
  const Tensor finite = at::matmul(a.where(a_finite, 0.0), b.where(b_finite, 0.0));
  return finite.where(a_finite.all(-1, true).logical_and(b_finite.all(-2, true)),
                      at::matmul(a.detach(), b.detach()));
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

Tensor distances(const Operands& x) { return signed_distances(x).abs(); }

double softcap_of(const Operands& x) {
  return accumulate_type(x.query) == at::kDouble ? qkv::softcap_of<double>(x)
                                                 : qkv::softcap_of<float>(x);
}

namespace {

Tensor products_of(const Operands& x) {
  const auto real = accumulate_type(x.query);
  const Tensor query = x.query.to(real) * scale_of(x);
  const Tensor key = for_query_heads(x.key, x).to(real).transpose(-2, -1);
  return keeps_all(x) ? at::matmul(query, key) : product_of_rows_and_columns(query, key);
}

}  // namespace

Tensor tanh_of_softcap(const Operands& x) { return at::tanh(products_of(x) / softcap_of(x)); }

Tensor capped_products(const Operands& x) {
  return x.softcap == 0.0 ? products_of(x) : tanh_of_softcap(x) * softcap_of(x);
}

namespace {

/// What softmax and logsumexp are taken of.
struct Scores {
  Tensor scores;     // (batch.., Hq, M, N), or one more of the sink; numbers also where all is -inf
  Tensor keep;       // bool, broadcasts to (batch.., Hq, M, N)
  Tensor has_any;    // (batch.., Hq, M, 1): rows where not all was -inf
  Tensor takes_all;  // (batch.., Hq, M, 1): rows whose sink is infinite, undefined without sinks
};

Scores scores_of(const Operands& x) {
  const auto real = accumulate_type(x.query);
  Tensor scores = capped_products(x);
  if (x.attn_mask && x.attn_mask->scalar_type() != at::kBool)
    scores = scores + x.attn_mask->to(real);
  if (x.alibi_slopes) {
    scores = scores - x.alibi_slopes->to(real).unsqueeze(-1).unsqueeze(-1) * distances(x);
  }
  Scores result;
  result.keep = kept_pairs(x);
  if (!keeps_all(x)) scores = scores.where(result.keep, -kInfinity);
  if (x.sinks) {  // one more score, of a value that is 0
    auto column = scores.sym_sizes().vec();
    column.back() = 1;
    const Tensor sinks = x.sinks->to(real).unsqueeze(-1).unsqueeze(-1).expand_symint(column);
    result.takes_all = sinks.eq(kInfinity);
    scores = at::cat({scores, sinks}, -1).masked_fill(result.takes_all, 0.0);
  }
  const auto columns = scores.sym_size(-1).maybe_as_int();  // of none there is no maximum
  result.has_any = columns.value_or(0) > 0 ? scores.detach().amax(-1, true).ne(-kInfinity)
                                           : scores.ne(-kInfinity).any(-1, true);
  result.scores = scores.where(result.has_any, 0.0);
  return result;
}

/// The logsumexp of nothing is -inf, but its derivatives are 0, not ATen's NaN.
Tensor logsumexp(const Scores& s) {
  const Tensor lse = at::logsumexp(s.scores, -1).where(s.has_any.squeeze(-1), -kInfinity);
  return s.takes_all.defined() ? lse.masked_fill(s.takes_all.squeeze(-1), kInfinity) : lse;
}

Softmax softmax_of(const Operands& x, const Scores& s) {
  Softmax result;
  result.keep = s.keep;
  // Not exp(scores - lse): the rounding of a large lse would be a factor.
  result.weights = at::softmax(s.scores, -1).where(s.has_any, 0.0);
  if (x.sinks) {
    const c10::SymInt keys = x.key.sym_size(-2);
    result.sink_weights = result.weights.narrow_symint(-1, keys, 1).masked_fill(s.takes_all, 1.0);
    result.weights = result.weights.narrow_symint(-1, 0, keys).masked_fill(s.takes_all, 0.0);
  }
  if (!keeps_all(x)) result.weights = result.weights.where(s.keep, 0.0);
  return result;
}

}  // namespace

Softmax softmax(const Operands& x) { return softmax_of(x, scores_of(x)); }

Tensor dropout_factors(const Operands& x) {
  if (x.dropout_p == 0.0) return {};
  // The probability is rounded to a multiple of 2^-16, and weights grow by what it really is.
  const int64_t threshold = dropout_threshold(x.dropout_p);
  const double scale = threshold == 65536 ? 0.0 : 65536.0 / static_cast<double>(65536 - threshold);
  return (random_16_bits(x) >= threshold).to(accumulate_type(x.query)) * scale;
}

TensorTuple<2> attention(const Operands& x) {
  const Scores scores = scores_of(x);
  const Softmax s = softmax_of(x, scores);
  const Tensor factors = dropout_factors(x);
  const Tensor used = factors.defined() ? s.weights * factors : s.weights;
  const Tensor value = for_query_heads(x.value, x).to(s.weights.scalar_type());
  // Nothing reaches a row that keeps nothing, nor comes back from its gradient.
  const Tensor out = product_of_kept(used, s.keep, value).where(s.keep.any(-1, true), 0.0);
  return {out.to(x.query.scalar_type()), logsumexp(scores)};
}

}  // namespace qkv::reference
