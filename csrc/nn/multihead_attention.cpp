#include <c10/util/safe_numerics.h>
#include <qkv/nn.h>
#include <torch/nn/init.h>

#include <cmath>

#include "nn/arguments.h"

namespace qkv::nn {

namespace {

constexpr const char* kMultiheadAttention = "qkv::nn::MultiheadAttention";

int64_t head_dim_of(const MultiheadAttentionOptions& options) {
  if (options.head_dim()) return *options.head_dim();
  TORCH_CHECK_VALUE(options.embed_dim() % options.num_heads() == 0, kMultiheadAttention,
                    ": embed_dim must be divisible by num_heads unless head_dim is given, but "
                    "embed_dim=",
                    options.embed_dim(), " and num_heads=", options.num_heads());
  return options.embed_dim() / options.num_heads();
}

int64_t num_kv_heads_of(const MultiheadAttentionOptions& options) {
  return options.num_kv_heads().value_or(options.num_heads());
}

/// (.., rows, heads · head_dim) as (.., heads, rows, head_dim), a view.
at::Tensor split_heads(const at::Tensor& x, int64_t heads) {
  return x.unflatten(-1, {heads, x.size(-1) / heads}).transpose(-3, -2);
}

at::Tensor join_heads(const at::Tensor& x) { return x.transpose(-3, -2).flatten(-2); }

}  // namespace

MultiheadAttentionImpl::MultiheadAttentionImpl(const MultiheadAttentionOptions& options_)
    : options(options_) {
  reset();
}

void MultiheadAttentionImpl::reset() {
  check_positive(kMultiheadAttention, "embed_dim", options.embed_dim());
  check_positive(kMultiheadAttention, "num_heads", options.num_heads());
  const int64_t kv_heads = num_kv_heads_of(options);
  check_positive(kMultiheadAttention, "num_kv_heads", kv_heads);
  TORCH_CHECK_VALUE(options.num_heads() % kv_heads == 0, kMultiheadAttention,
                    ": num_kv_heads must divide num_heads, but num_heads=", options.num_heads(),
                    " and num_kv_heads=", kv_heads);
  const int64_t head_dim = head_dim_of(options);
  check_positive(kMultiheadAttention, "head_dim", head_dim);
  int64_t width = 0;
  TORCH_CHECK_VALUE(!c10::mul_overflows(options.num_heads(), head_dim, &width), kMultiheadAttention,
                    ": num_heads * head_dim must be less than 2^63, but num_heads=",
                    options.num_heads(), " and head_dim=", head_dim);
  const int64_t kdim = options.kdim().value_or(options.embed_dim());
  const int64_t vdim = options.vdim().value_or(options.embed_dim());
  check_positive(kMultiheadAttention, "kdim", kdim);
  check_positive(kMultiheadAttention, "vdim", vdim);
  check_dropout(kMultiheadAttention, options.dropout());
  if (options.window()) {
    const auto [left, right] = *options.window();
    TORCH_CHECK_VALUE(
        left >= -1 && right >= -1, kMultiheadAttention,
        ": window must be (left, right) with both >= 0, or -1 for unbounded, but is (", left, ", ",
        right, ")");
  }

  const auto linear = [&](const char* name, int64_t from, int64_t to) {
    return register_module(
        name, torch::nn::Linear(torch::nn::LinearOptions(from, to).bias(options.bias())));
  };
  w_q = linear("w_q", options.embed_dim(), width);
  w_k = linear("w_k", kdim, kv_heads * head_dim);
  w_v = linear("w_v", vdim, kv_heads * head_dim);
  w_o = linear("w_o", width, options.embed_dim());
  reset_parameters();
}

void MultiheadAttentionImpl::reset_parameters() {
  torch::NoGradGuard no_grad;
  // torch.nn.MultiheadAttention keeps three equal projections in one (3 · E, E) matrix, which is
  // what Glorot's bound then counts.
  const bool one_matrix =
      w_q->weight.sizes() == w_k->weight.sizes() && w_q->weight.sizes() == w_v->weight.sizes();
  for (auto& linear : {w_q, w_k, w_v}) {
    if (one_matrix) {
      const double fans = static_cast<double>(linear->weight.size(1) + 3 * linear->weight.size(0));
      const double bound = std::sqrt(6.0 / fans);
      torch::nn::init::uniform_(linear->weight, -bound, bound);
    } else {
      torch::nn::init::xavier_uniform_(linear->weight);
    }
  }
  w_o->reset_parameters();
  for (auto& linear : {w_q, w_k, w_v, w_o}) {
    if (linear->bias.defined()) torch::nn::init::zeros_(linear->bias);
  }
}

void MultiheadAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << kMultiheadAttention << "(embed_dim=" << options.embed_dim()
         << ", num_heads=" << options.num_heads();
  if (options.kdim()) stream << ", kdim=" << *options.kdim();
  if (options.vdim()) stream << ", vdim=" << *options.vdim();
  if (options.num_kv_heads()) stream << ", num_kv_heads=" << *options.num_kv_heads();
  if (options.head_dim()) stream << ", head_dim=" << *options.head_dim();
  stream << std::boolalpha << ", bias=" << options.bias() << ", dropout=" << options.dropout()
         << ", causal=" << options.causal();
  if (options.window()) {
    stream << ", window=(" << options.window()->first << ", " << options.window()->second << ")";
  }
  stream << ")";
}

MultiheadAttentionImpl::Projected MultiheadAttentionImpl::project(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& attn_mask, const at::Tensor& key_padding_mask,
    const c10::intrusive_ptr<KVCache>& cache) {
  const at::Tensor& keys = key.defined() ? key : query;
  const at::Tensor& values = value.defined() ? value : keys;
  // As options may have changed since the module was made.
  check_positive(kMultiheadAttention, "num_heads", options.num_heads());
  check_positive(kMultiheadAttention, "num_kv_heads", num_kv_heads_of(options));
  check_rows(kMultiheadAttention, "query", query, "embed_dim", w_q->options.in_features());
  check_rows(kMultiheadAttention, "key", keys, "kdim", w_k->options.in_features());
  check_rows(kMultiheadAttention, "value", values, "vdim", w_v->options.in_features());

  Projected p;
  p.options.attn_mask(given(attn_mask))
      .key_mask(
          key_mask_of(kMultiheadAttention, key_padding_mask, keys, cache ? cache->length() : 0))
      .is_causal(options.causal())
      .enable_gqa(true);
  p.query = split_heads(w_q(query), options.num_heads());
  p.key = split_heads(w_k(keys), num_kv_heads_of(options));
  p.value = split_heads(w_v(values), num_kv_heads_of(options));
  if (options.window()) p.options.window(options.window()->first, options.window()->second);
  if (cache) {
    p.options.query_offset(cache->length());
    std::tie(p.key, p.value) = cache->extended(p.key, p.value);
  }
  return p;
}

at::Tensor MultiheadAttentionImpl::attend(const Projected& p) {
  AttentionOptions with_dropout = p.options;
  with_dropout.dropout_p(is_training() ? options.dropout() : 0.0);
  return w_o(join_heads(attention(p.query, p.key, p.value, with_dropout)));
}

at::Tensor MultiheadAttentionImpl::forward(const at::Tensor& query, const at::Tensor& key,
                                           const at::Tensor& value, const at::Tensor& attn_mask,
                                           const at::Tensor& key_padding_mask,
                                           const c10::intrusive_ptr<KVCache>& cache) {
  const Projected p = project(query, key, value, attn_mask, key_padding_mask, cache);
  const at::Tensor out = attend(p);
  if (cache) cache->advance(p.key.size(-2) - cache->length());
  return out;
}

std::tuple<at::Tensor, at::Tensor> MultiheadAttentionImpl::forward_with_weights(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& attn_mask, const at::Tensor& key_padding_mask,
    const c10::intrusive_ptr<KVCache>& cache, bool average_weights) {
  const Projected p = project(query, key, value, attn_mask, key_padding_mask, cache);
  const at::Tensor weights = attention_weights(p.query, p.key, p.options);
  const at::Tensor out = attend(p);
  if (cache) cache->advance(p.key.size(-2) - cache->length());
  return {out, average_weights ? weights.mean(-3) : weights};
}

}  // namespace qkv::nn
