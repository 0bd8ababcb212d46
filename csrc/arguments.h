#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <qkv/attention.h>

#include <optional>
#include <string>
#include <vector>

#include "operands.h"

namespace qkv {

/// The arguments of a public operator, as given.
struct Arguments {
  Tensor query;
  Tensor key;
  OptionalTensor value;  // attention_weights has none
  OptionalTensor attn_mask;
  double dropout_p = 0.0;
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = false;
  std::optional<std::vector<c10::SymInt>> window;
  std::optional<c10::SymInt> query_offset;
  double softcap = 0.0;
  OptionalTensor alibi_slopes;
  OptionalTensor sinks;
  OptionalTensor key_mask;
};

/// Those of a call from C++.
Arguments as_arguments(const Tensor& query, const Tensor& key, const OptionalTensor& value,
                       const AttentionOptions& options);

/// A call that has passed every check, with every default filled in but the scale's.
struct Call {
  Operands operands;            // without a seed
  bool unbatched_head = false;  // all of the caller's tensors were (rows, width)
  std::string unfused_reason;   // why there is no fused kernel for this; empty: there is one

  /// (1, M, ..) back to (M, ..) if that is what the caller has. As a view, so that autograd notices
  /// if it is changed in place; but it would not let a view made without grad mode be changed.
  Tensor restore_rank(const Tensor& x) const {
    if (!unbatched_head) return x;
    return at::GradMode::is_enabled() ? x.squeeze(0)
                                      : at::_unsafe_view_symint(x, x.sym_sizes().slice(1));
  }
};

/// Checks everything, before any work. Messages start with `op`.
Call checked_call(const char* op, const Arguments& arguments);

}  // namespace qkv
