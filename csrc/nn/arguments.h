#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <qkv/attention.h>

#include <optional>

#include "dtype_name.h"

namespace qkv::nn {

inline std::optional<at::Tensor> given(const at::Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

/// True = padding, as modules have it, to true = may be attended to, as the operator has it, which
/// would broadcast what is meant for one key. The keys (.., rows, width) come after `cached` ones.
inline std::optional<at::Tensor> key_mask_of(const char* module, const at::Tensor& padding,
                                             const at::Tensor& keys, int64_t cached = 0) {
  if (!padding.defined()) return std::nullopt;
  TORCH_CHECK_TYPE(padding.layout() == at::kStrided, module,
                   ": key_padding_mask must be a dense tensor, but is sparse");
  TORCH_CHECK_TYPE(padding.scalar_type() == at::kBool, module,
                   ": key_padding_mask must be bool (true = padding), but is ",
                   dtype_name(padding.scalar_type()));
  if (keys.defined() && keys.dim() >= 2) {  // else the operator says that they are no rows
    const int64_t count = cached + keys.size(-2);
    TORCH_CHECK_VALUE(padding.dim() >= 1 && padding.size(-1) == count, module,
                      ": key_padding_mask must be (B.., N=", count, ")",
                      cached > 0 ? ", cached keys included" : "", ", but has shape ",
                      padding.sizes());
  }
  return padding.logical_not();
}

/// Of a module with one head, whose masks have no dimension for it.
inline void check_mask_of_one_head(const char* module, const at::Tensor& mask,
                                   const at::Tensor& input) {
  auto full = input.sizes().vec();
  full.back() = input.size(-2);
  TORCH_CHECK_VALUE(at::is_expandable_to(mask.sizes(), full), module,
                    ": attn_mask must broadcast to (B.., T, T) = ", at::IntArrayRef(full),
                    ", but has shape ", mask.sizes());
}

inline void check_rows(const char* module, const char* name, const at::Tensor& x,
                       const char* letters, int64_t width) {
  TORCH_CHECK_TYPE(x.defined(), module, ": ", name, " must be a tensor, but is undefined");
  TORCH_CHECK_VALUE(x.dim() >= 2 && x.size(-1) == width, module, ": ", name, " must be (.., rows, ",
                    letters, "=", width, "), but has shape ", x.sizes());
}

inline void check_dropout(const char* module, double dropout) {
  TORCH_CHECK_VALUE(dropout >= 0.0 && dropout <= 1.0, module,
                    ": dropout must be between 0 and 1, but is ", dropout);
}

inline void check_positive(const char* module, const char* name, int64_t x) {
  TORCH_CHECK_VALUE(x > 0, module, ": ", name, " must be positive, but is ", x);
}

}  // namespace qkv::nn
