#pragma once

#include <optional>
#include <vector>

#include "operands.h"

// The checks that public and internal operators share. Messages start with `op`, name the rule and
// say what was found. Nothing here allocates a tensor.

namespace qkv {

/// The scores of a call are (batch.., heads, queries, keys).
struct ScoreShape {
  std::vector<c10::SymInt> batch;
  c10::SymInt heads;
  c10::SymInt queries;
  c10::SymInt keys;
};

/// x is dense, and of a dtype that there are kernels for.
void check_rows_of_numbers(const char* op, const char* name, const Tensor& x);

/// The same, and x is on query's device and of query's dtype.
void check_like_query(const char* op, const char* name, const Tensor& x, const Tensor& query);

/// Masks, slopes and sinks: what their numbers are, and that they broadcast.
void check_masks(const char* op, const Tensor& query, const ScoreShape& scores,
                 const OptionalTensor& attn_mask, const OptionalTensor& key_mask,
                 const OptionalTensor& alibi_slopes, const OptionalTensor& sinks);

void check_scalars(const char* op, const Tensor& query, std::optional<double> scale, double softcap,
                   double dropout_p);

/// Operands as operands.h describes them. Public operators make them so; who calls an internal one
/// by its name gets an error instead of a crash.
void check_operands(const char* op, const Operands& x);

/// The operands of weights: without dropout, values without columns.
void check_weights(const char* op, const Operands& x);

/// The same for the arguments after the operands: incoming gradients and results of the forward as
/// the forward returns them; tangents (or cotangents, which lie like them) each of an operand that
/// is there, of its dtype and, but for masks, slopes and sinks, of its shape; gradients wanted only
/// of floating-point operands that are there.
void check_backward(const char* op, const Operands& x, const Tensor& grad_out,
                    const OptionalTensor& grad_lse, const ForwardResults& forward,
                    const Needs& needs);
void check_weights_backward(const char* op, const Operands& x, const Tensor& grad_weights,
                            const Tensor& lse, const Tensor& lse_rest, const Needs& needs);
void check_jvp(const char* op, const Operands& x, const ForwardResults& forward,
               const Tangents& tangents);
void check_backward_backward(const char* op, const Operands& x, const Tensor& grad_out,
                             const OptionalTensor& grad_lse, const ForwardResults& forward,
                             const Tangents& cotangents, const NeedsOfSecond& needs);

}  // namespace qkv
