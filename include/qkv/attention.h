#pragma once

#include <ATen/core/Tensor.h>
#include <qkv/export.h>
#include <torch/arg.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace qkv {

/// The arguments of attention() after query, key and value.
///
/// Letters: B batch dimensions (any number, also none), Hq query heads, Hkv key/value heads,
/// M queries, N keys, D head dim of query and key, Dv head dim of value. A single query head is
/// broadcast to the key/value heads, and Hq is their number then. So is a single head of key or of
/// value to those of the other.
struct AttentionOptions {
  /// Broadcasts to (B.., Hq, M, N). bool: true = may attend. Floating point (query's dtype or
  /// float32): added to the scores, -inf = may not attend; its gradient is computed if it requires
  /// one.
  TORCH_ARG(std::optional<at::Tensor>, attn_mask) = std::nullopt;
  /// Probability of setting a weight to zero, rounded to a multiple of 2^-16; the others grow by
  /// 1 / (1 - dropout_p).
  TORCH_ARG(double, dropout_p) = 0.0;
  /// Query i may attend to keys j <= i + query_offset only.
  TORCH_ARG(bool, is_causal) = false;
  /// Factor on the scores; 1/sqrt(D) by default.
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  /// Allows Hkv to be any divisor of Hq; query head h uses key/value head h / (Hq / Hkv).
  TORCH_ARG(bool, enable_gqa) = false;
  /// Position of query 0 among the keys: 0, the default, aligns the band to the upper left, N - M
  /// to the lower right. May be negative.
  TORCH_ARG(std::optional<int64_t>, query_offset) = std::nullopt;
  /// Scores become softcap · tanh(score / softcap) before masks are added; 0 = off.
  TORCH_ARG(double, softcap) = 0.0;
  /// (Hq) or (B.., Hq), query's dtype or float32: subtracts slope · |i + query_offset - j| (ALiBi,
  /// arXiv:2108.12409).
  TORCH_ARG(std::optional<at::Tensor>, alibi_slopes) = std::nullopt;
  /// (Hq) or (B.., Hq), query's dtype or float32: a further score in each row's softmax that has
  /// no value (StreamingLLM, arXiv:2309.17453; learned in gpt-oss).
  TORCH_ARG(std::optional<at::Tensor>, sinks) = std::nullopt;
  /// bool, broadcasts to (B.., N): true = may be attended to.
  TORCH_ARG(std::optional<at::Tensor>, key_mask) = std::nullopt;

 public:
  /// Query i may attend to keys i + query_offset - left <= j <= i + query_offset + right only;
  /// -1 = unbounded, less is an error. What is kept is what masks, is_causal and the window all
  /// keep.
  AttentionOptions& window(int64_t left, int64_t right) {
    window_ = std::make_pair(left, right);
    return *this;
  }
  const std::optional<std::pair<int64_t, int64_t>>& window() const { return window_; }

 private:
  std::optional<std::pair<int64_t, int64_t>> window_;
};

/// Scaled dot-product attention, softmax(scale · Q Kᵀ + mask) V, without the M x N matrix
/// (FlashAttention-2, arXiv:2307.08691). Differentiable to any order, in reverse and forward mode.
///
/// \param query (B.., Hq, M, D), (Hq, M, D) or (M, D): float64, float32, bfloat16 or float16, any
///     strides.
/// \param key (B.., Hkv, N, D) with Hkv = Hq or 1, or any divisor of Hq if enable_gqa. Batch
///     dimensions broadcast, without copies.
/// \param value (B.., Hkv, N, Dv).
/// \returns (B.., Hq, M, Dv), laid out as query is. Rows that may attend to no key are 0.
/// \throws c10::ValueError or c10::TypeError naming the rule and what was found, before any work.
QKV_API at::Tensor attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const AttentionOptions& options = {});

/// attention() and the log of its softmax denominators, both differentiable. Parameters and errors
/// are those of attention().
///
/// \returns the output, and logsumexp (B.., Hq, M): natural log, float32 (float64 for float64). Of
/// a row that may attend to no key it is its head's sink, -inf without sinks.
QKV_API std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query,
                                                              const at::Tensor& key,
                                                              const at::Tensor& value,
                                                              const AttentionOptions& options = {});

/// The attention weights, before dropout (options.dropout_p must be 0): this is the M x N matrix
/// that attention() never builds. Parameters and errors are those of attention().
///
/// \returns (B.., Hq, M, N) in query's dtype, differentiable. A row adds up to 1, with sinks to
/// 1 - exp(sink - logsumexp), and to 0 if it may attend to no key.
QKV_API at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                                     const AttentionOptions& options = {});

/// Which kernels attention() and its derivatives would run on these arguments, or why none is
/// fused, and what the band is. Computes nothing. Parameters and errors are those of attention().
QKV_API std::string explain(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const AttentionOptions& options = {});

}  // namespace qkv
