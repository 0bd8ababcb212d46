#pragma once

#include <ATen/core/Tensor.h>
#include <qkv/attention.h>

#include <optional>

#include "dtype_name.h"

namespace qkv::nn {

inline std::optional<at::Tensor> given(const at::Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

/// True = padding, as modules have it, to true = may be attended to, as the operator has it.
inline std::optional<at::Tensor> key_mask_of(const char* module, const at::Tensor& padding) {
  if (!padding.defined()) return std::nullopt;
  TORCH_CHECK_TYPE(padding.scalar_type() == at::kBool, module,
                   ": key_padding_mask must be bool (true = padding), but is ",
                   dtype_name(padding.scalar_type()));
  return padding.logical_not();
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
