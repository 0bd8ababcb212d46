#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "arguments.h"

namespace qkv {

/// A public operator takes its arguments one by one, as a schema must have them. Here they are put
/// together into Arguments, and taken apart for a call. An object of this calls the operator of a
/// name, which it looks up once.
template <class Result>
class AttentionOp {
 public:
  using Flat = Result(const Tensor& query, const Tensor& key, const Tensor& value,
                      const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                      std::optional<double> scale, bool enable_gqa,
                      at::OptionalSymIntArrayRef window, std::optional<c10::SymInt> query_offset,
                      double softcap, const OptionalTensor& alibi_slopes,
                      const OptionalTensor& sinks, const OptionalTensor& key_mask);

  /// The kernel to register for one that takes Arguments.
  template <Result (*kKernel)(const Arguments&)>
  static Result kernel(const Tensor& query, const Tensor& key, const Tensor& value,
                       const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                       std::optional<double> scale, bool enable_gqa,
                       at::OptionalSymIntArrayRef window, std::optional<c10::SymInt> query_offset,
                       double softcap, const OptionalTensor& alibi_slopes,
                       const OptionalTensor& sinks, const OptionalTensor& key_mask) {
    return kKernel({query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                    window ? std::optional(window->vec()) : std::nullopt, query_offset, softcap,
                    alibi_slopes, sinks, key_mask});
  }

  explicit AttentionOp(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Flat>()) {}

  Result operator()(const Arguments& a) const {
    return handle_.call(a.query, a.key, *a.value, a.attn_mask, a.dropout_p, a.is_causal, a.scale,
                        a.enable_gqa,
                        a.window ? at::OptionalSymIntArrayRef(*a.window) : std::nullopt,
                        a.query_offset, a.softcap, a.alibi_slopes, a.sinks, a.key_mask);
  }

 private:
  c10::TypedOperatorHandle<Flat> handle_;
};

/// attention_weights: neither value nor dropout.
class AttentionWeightsOp {
 public:
  using Flat = Tensor(const Tensor& query, const Tensor& key, const OptionalTensor& attn_mask,
                      bool is_causal, std::optional<double> scale, bool enable_gqa,
                      at::OptionalSymIntArrayRef window, std::optional<c10::SymInt> query_offset,
                      double softcap, const OptionalTensor& alibi_slopes,
                      const OptionalTensor& sinks, const OptionalTensor& key_mask);

  template <Tensor (*kKernel)(const Arguments&)>
  static Tensor kernel(const Tensor& query, const Tensor& key, const OptionalTensor& attn_mask,
                       bool is_causal, std::optional<double> scale, bool enable_gqa,
                       at::OptionalSymIntArrayRef window, std::optional<c10::SymInt> query_offset,
                       double softcap, const OptionalTensor& alibi_slopes,
                       const OptionalTensor& sinks, const OptionalTensor& key_mask) {
    return kKernel({query, key, std::nullopt, attn_mask, 0.0, is_causal, scale, enable_gqa,
                    window ? std::optional(window->vec()) : std::nullopt, query_offset, softcap,
                    alibi_slopes, sinks, key_mask});
  }

  explicit AttentionWeightsOp(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Flat>()) {}

  Tensor operator()(const Arguments& a) const {
    return handle_.call(a.query, a.key, a.attn_mask, a.is_causal, a.scale, a.enable_gqa,
                        a.window ? at::OptionalSymIntArrayRef(*a.window) : std::nullopt,
                        a.query_offset, a.softcap, a.alibi_slopes, a.sinks, a.key_mask);
  }

 private:
  c10::TypedOperatorHandle<Flat> handle_;
};

}  // namespace qkv
