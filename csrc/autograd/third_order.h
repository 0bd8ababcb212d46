#pragma once

#include "autograd/operands_node.h"

namespace qkv::autograd {

/// The derivative of _attention_backward_backward by the reference's formulas: with `others` its
/// grad_out, grad_lse and cotangents, the gradients of <grads, results> for grad_out, grad_lse, the
/// operands and the cotangents, of those that need one.
variable_list third_order(const variable_list& grads, const Operands& x,
                          const std::vector<Tensor>& others, const std::vector<bool>& needs);

}  // namespace qkv::autograd
