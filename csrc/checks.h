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

/// x is dense, on query's device, and of query's dtype, which is one of those that there are
/// kernels for.
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

/// Tangents or cotangents: each has its operand, of its dtype and, but for masks, slopes and sinks,
/// of its shape.
void check_tangents(const char* op, const Operands& x, const Tangents& tangents);

/// What needs a gradient is there, and of floating-point numbers.
void check_needs(const char* op, const Operands& x, Needs needs);

/// The arguments of the backward after the operands, as the forward returns them.
void check_grad_outputs(const char* op, const Operands& x, const Tensor& grad_out,
                        const OptionalTensor& grad_lse);
void check_forward_results(const char* op, const Operands& x, const Tensor& out, const Tensor& lse,
                           const Tensor& out_rest, const Tensor& lse_rest);

}  // namespace qkv
