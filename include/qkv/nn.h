#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <qkv/attention.h>
#include <qkv/export.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_value.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>

// Attention modules for torch::nn. Everywhere:
//
// - The batch comes first, and there may be any number of batch dimensions, or none.
// - A bool attn_mask means true = may attend; it broadcasts to (B.., H, M, N), or (B.., T, T) of
//   a module with one head. A float one is added to the scores.
// - key_padding_mask (B.., N) means true = padding, that is, may not be attended to.
// - An argument to be left out before one that is given is at::Tensor(): attention(x, at::Tensor(),
//   at::Tensor(), mask).
// - Masks and causal compose: what is kept is their intersection, in training as in evaluation.
// - forward returns the output; forward_with_weights also the attention weights, with the output
//   still from the fused path.
//
// Parameters have the names of the Python modules in qkv.nn, and files go both ways (see
// load_state_dict).

namespace qkv::nn {

/// Keys and values of the tokens so far, for generating one by one. Pass the same object to each
/// call of MultiheadAttention::forward; query i of a call then stands after all cached keys.
///
/// One class for C++, Python (torch.classes.qkv.KVCache) and TorchScript: in C++ make one with
/// c10::make_intrusive<qkv::nn::KVCache>(max_length), a copy with make_intrusive<KVCache>(*cache).
/// For inference: gradients do not flow through it, so it wants torch::NoGradGuard or
/// c10::InferenceMode.
class QKV_API KVCache : public torch::CustomClassHolder {
 public:
  /// \param max_length how many keys there is room for.
  explicit KVCache(int64_t max_length);

  /// With memory of its own: two ways to go on from the same keys.
  KVCache(const KVCache& other);
  KVCache& operator=(const KVCache&) = delete;

  /// Appends (B.., H, new keys, D) and (B.., H, new keys, Dv), which may be views of the cache.
  /// \returns all keys and values so far, as views of the cache.
  /// \throws c10::ValueError if there is no room, if shapes, dtype or device do not fit the cached
  /// ones, or if they require a gradient in grad mode; c10::TypeError if they are not dense, or of
  /// a dtype that attention does not take.
  std::tuple<at::Tensor, at::Tensor> append(const at::Tensor& key, const at::Tensor& value);

  /// What append would return. The cache takes them in when it advances: so nothing is lost, and
  /// nothing is in twice, if what is done with them in between fails.
  /// \throws as append does; then there is nothing to take in.
  std::tuple<at::Tensor, at::Tensor> extended(const at::Tensor& key, const at::Tensor& value);

  /// Takes in the first `count` of the keys that it was last extended by.
  /// \throws c10::ValueError if those are fewer, or were taken in before.
  void advance(int64_t count);

  /// All keys and values so far, none if there are none.
  std::tuple<std::optional<at::Tensor>, std::optional<at::Tensor>> cached() const;

  /// Forgets everything but the first `length` keys.
  /// \throws c10::ValueError if there are not so many.
  void truncate(int64_t length);

  int64_t length() const { return length_; }
  int64_t max_length() const { return max_length_; }

 private:
  int64_t max_length_;
  int64_t length_ = 0;
  int64_t extension_ = 0;  // keys after them that advance may take in
  at::Tensor key_;         // (B.., H, max_length, D), allocated by an append to an empty cache
  at::Tensor value_;       // (B.., H, max_length, Dv)
};

struct ScaledDotProductAttentionOptions {
  /// 1/sqrt(D) by default. 1 is plain dot-product attention.
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  /// Probability of setting a weight to zero, in training.
  TORCH_ARG(double, dropout) = 0.0;
  /// Query i attends to keys j <= i only.
  TORCH_ARG(bool, causal) = false;
};

/// softmax(scale · Q Kᵀ) V without parameters.
class QKV_API ScaledDotProductAttentionImpl
    : public torch::nn::Cloneable<ScaledDotProductAttentionImpl> {
 public:
  explicit ScaledDotProductAttentionImpl(const ScaledDotProductAttentionOptions& options_ = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// \param query (B.., H, M, D), (H, M, D) or (M, D)
  /// \param key (B.., H, N, D); the query by default
  /// \param value (B.., H, N, Dv); the key by default
  /// \returns (B.., H, M, Dv)
  at::Tensor forward(const at::Tensor& query, const at::Tensor& key = {},
                     const at::Tensor& value = {}, const at::Tensor& attn_mask = {},
                     const at::Tensor& key_padding_mask = {});

  /// \returns the output and the weights (B.., H, M, N), before dropout
  std::tuple<at::Tensor, at::Tensor> forward_with_weights(const at::Tensor& query,
                                                          const at::Tensor& key = {},
                                                          const at::Tensor& value = {},
                                                          const at::Tensor& attn_mask = {},
                                                          const at::Tensor& key_padding_mask = {});

  ScaledDotProductAttentionOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())},
                           {2, torch::nn::AnyValue(at::Tensor())},
                           {3, torch::nn::AnyValue(at::Tensor())},
                           {4, torch::nn::AnyValue(at::Tensor())})
};

TORCH_MODULE(ScaledDotProductAttention);

struct SelfAttentionOptions {
  SelfAttentionOptions(int64_t d_in, int64_t d_out) : d_in_(d_in), d_out_(d_out) {}

  /// Width of the input.
  TORCH_ARG(int64_t, d_in);
  /// Width of queries and keys, and of values unless d_v is given.
  TORCH_ARG(int64_t, d_out);
  /// Width of values, hence of the output.
  TORCH_ARG(std::optional<int64_t>, d_v) = std::nullopt;
  /// Whether the three projections have one.
  TORCH_ARG(bool, bias) = false;
  /// Query i attends to keys j <= i only.
  TORCH_ARG(bool, causal) = false;
  /// Probability of setting a weight to zero, in training.
  TORCH_ARG(double, dropout) = 0.0;
  /// 1/sqrt(d_out) by default.
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
};

/// One head of self-attention with learned W_Q, W_K, W_V and no output projection:
/// softmax(scale · (x W_Qᵀ)(x W_Kᵀ)ᵀ) (x W_Vᵀ).
class QKV_API SelfAttentionImpl : public torch::nn::Cloneable<SelfAttentionImpl> {
 public:
  SelfAttentionImpl(int64_t d_in, int64_t d_out)
      : SelfAttentionImpl(SelfAttentionOptions(d_in, d_out)) {}
  explicit SelfAttentionImpl(const SelfAttentionOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// \param input (T, d_in) or (B.., T, d_in)
  /// \param attn_mask broadcasts to (B.., T, T): there is one head
  /// \returns (B.., T, d_v)
  at::Tensor forward(const at::Tensor& input, const at::Tensor& attn_mask = {},
                     const at::Tensor& key_padding_mask = {});

  /// \returns the output and the weights (B.., T, T), before dropout
  std::tuple<at::Tensor, at::Tensor> forward_with_weights(const at::Tensor& input,
                                                          const at::Tensor& attn_mask = {},
                                                          const at::Tensor& key_padding_mask = {});

  SelfAttentionOptions options;
  torch::nn::Linear w_q{nullptr}, w_k{nullptr}, w_v{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())},
                           {2, torch::nn::AnyValue(at::Tensor())})
};

TORCH_MODULE(SelfAttention);

struct MultiheadAttentionOptions {
  MultiheadAttentionOptions(int64_t embed_dim, int64_t num_heads)
      : embed_dim_(embed_dim), num_heads_(num_heads) {}

  /// Width of the query and of the output.
  TORCH_ARG(int64_t, embed_dim);
  /// Query heads.
  TORCH_ARG(int64_t, num_heads);
  /// Width of the key; embed_dim by default.
  TORCH_ARG(std::optional<int64_t>, kdim) = std::nullopt;
  /// Width of the value; embed_dim by default.
  TORCH_ARG(std::optional<int64_t>, vdim) = std::nullopt;
  /// Key/value heads (grouped-query attention): a divisor of num_heads, which is the default.
  TORCH_ARG(std::optional<int64_t>, num_kv_heads) = std::nullopt;
  /// Width of a head; embed_dim / num_heads by default.
  TORCH_ARG(std::optional<int64_t>, head_dim) = std::nullopt;
  /// Whether the four projections have one.
  TORCH_ARG(bool, bias) = true;
  /// Probability of setting a weight to zero, in training.
  TORCH_ARG(double, dropout) = 0.0;
  /// Query i attends to keys j <= i only; after a cache, to those and the cached ones.
  TORCH_ARG(bool, causal) = false;

 public:
  /// A query attends to `left` keys before it and `right` after it only; -1 = unbounded.
  MultiheadAttentionOptions& window(int64_t left, int64_t right) {
    window_ = std::make_pair(left, right);
    return *this;
  }
  const std::optional<std::pair<int64_t, int64_t>>& window() const { return window_; }

 private:
  std::optional<std::pair<int64_t, int64_t>> window_;
};

/// Multi-head attention with learned W_Q, W_K, W_V and W_O (Vaswani et al., 2017,
/// arXiv:1706.03762, section 3.2.2), initialised as torch.nn.MultiheadAttention is.
class QKV_API MultiheadAttentionImpl : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  MultiheadAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : MultiheadAttentionImpl(MultiheadAttentionOptions(embed_dim, num_heads)) {}
  explicit MultiheadAttentionImpl(const MultiheadAttentionOptions& options_);

  void reset() override;
  /// New numbers, drawn as torch.nn.MultiheadAttention draws them; biases are 0.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// Self-attention if only the query is given, cross-attention if the key is too: which
  /// arguments are given decides, never what is in them.
  ///
  /// \param query (M, embed_dim) or (B.., M, embed_dim)
  /// \param key (B.., N, kdim); the query by default
  /// \param value (B.., N, vdim); the key by default
  /// \param attn_mask broadcasts to (B.., num_heads, M, N)
  /// \param key_padding_mask (B.., N), with a cache of all its keys
  /// \param cache keys and values of earlier calls, which this call's are appended to
  /// \returns (B.., M, embed_dim)
  at::Tensor forward(const at::Tensor& query, const at::Tensor& key = {},
                     const at::Tensor& value = {}, const at::Tensor& attn_mask = {},
                     const at::Tensor& key_padding_mask = {},
                     const c10::intrusive_ptr<KVCache>& cache = {});

  /// \param average_weights the mean over the heads instead of all of them
  /// \returns the output and the weights (B.., num_heads, M, N) or (B.., M, N), before dropout
  std::tuple<at::Tensor, at::Tensor> forward_with_weights(
      const at::Tensor& query, const at::Tensor& key = {}, const at::Tensor& value = {},
      const at::Tensor& attn_mask = {}, const at::Tensor& key_padding_mask = {},
      const c10::intrusive_ptr<KVCache>& cache = {}, bool average_weights = false);

  MultiheadAttentionOptions options;
  torch::nn::Linear w_q{nullptr}, w_k{nullptr}, w_v{nullptr}, w_o{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())},
                           {2, torch::nn::AnyValue(at::Tensor())},
                           {3, torch::nn::AnyValue(at::Tensor())},
                           {4, torch::nn::AnyValue(at::Tensor())},
                           {5, torch::nn::AnyValue(c10::intrusive_ptr<KVCache>())})

 private:
  struct Projected {
    at::Tensor query, key, value;  // (B.., heads, rows, head_dim)
    AttentionOptions options;
  };
  Projected project(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const at::Tensor& attn_mask, const at::Tensor& key_padding_mask,
                    const c10::intrusive_ptr<KVCache>& cache);
  at::Tensor attend(const Projected& projected);
};

TORCH_MODULE(MultiheadAttention);

/// Fills a module's parameters and buffers, by name, from a file written by
///   - save_state_dict() here, or qkv.nn.save_state_dict() in Python,
///   - torch.save(dict(module.state_dict()), path) in Python,
///   - torch::save(module, path) in C++, or torch.jit.save(module, path) in Python, which also
///     writes buffers that are not persistent in Python: the module here must have them too.
/// Numbers are converted to the dtypes of the module.
/// \throws c10::ValueError if the file is something else or its structure is damaged (its numbers
/// are taken as they are), if names, shapes or layouts differ, or if the module is on meta or has
/// a tensor that cannot be written (an expanded view, or one of InferenceMode outside it), naming
/// what; then nothing has been changed.
QKV_API void load_state_dict(torch::nn::Module& module, const std::string& path);

/// Writes a module's parameters and buffers as a dict of tensors, for load_state_dict() and for
/// Python's torch.load(path), which cannot read sparse ones nor those of float8, complex32, uint16,
/// uint32 or uint64, as LibTorch writes them.
/// \throws c10::ValueError if the file cannot be written, or if the module is on meta, naming what;
/// then a file of that name is as it was, if its folder can take another beside it.
QKV_API void save_state_dict(const torch::nn::Module& module, const std::string& path);

}  // namespace qkv::nn
