#pragma once

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "autograd/compat.h"
#include "internal_op.h"
#include "vmap/batched.h"

// The autograd nodes of the internal operators are written by hand, as ATen's own are generated:
// torch::autograd::Function refuses forward mode and every torch.func transform.

namespace qkv::autograd {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

inline OptionalTensor optional(const Tensor& x) {
  return x.defined() ? OptionalTensor(x) : std::nullopt;
}

/// Six tensors, undefined where there is none.
inline Tangents optional_tangents(const Tensor* x) {
  Tangents result;
  std::transform(x, x + result.size(), result.begin(), optional);
  return result;
}

/// The gradients that an operator gave; undefined where none is needed.
template <size_t n>
variable_list only_needed(const std::array<Tensor, n>& grads, const std::vector<bool>& needs) {
  variable_list result(grads.begin(), grads.end());
  for (size_t i = 0; i < n; ++i) {
    if (!needs[i]) result[i] = Tensor();
  }
  return result;
}

/// A node that saves tensors, the operands first, and computes its gradients by a pure function of
/// them, Derived::gradients. Purity is what lets compiled autograd trace it.
///
/// Derived has kGradients, the number of inputs; kOutputs, how many of the saved tensors after the
/// operands are differentiable outputs of the node; and
///   static variable_list gradients(const variable_list& grads, const Operands& operands,
///                                  const std::vector<Tensor>& others,
///                                  const std::vector<bool>& needs)
template <class Derived>
class OperandsNode : public Node {
 public:
  void save_operands(const Operands& x) {
    for (const OptionalTensor& t : x.tensors()) saved_.emplace_back(t, false);
    scale_ = x.scale;
    scalars_ = {x.softcap, x.dropout_p};
    band_ = x.band;
  }
  void save(const OptionalTensor& x, bool is_output) { saved_.emplace_back(x, is_output); }
  /// x without its history and tangent, which might close a cycle of references.
  void save_constant(const Tensor& x) { save(x.detach(), /*is_output=*/false); }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return compute(grads, unpacked(), scale_, scalars_, band_, needs());
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& x : saved_) x.reset_data();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (size_t i = 0; i < saved_.size(); ++i) args.collect(saved_[i], is_output(i));
    args.collect(scale_);
    for (const double scalar : scalars_) args.collect(scalar);
    args.collect(band_);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    using namespace torch::dynamo::autograd;
    for (SavedVariable& x : saved_) saved.before(x);
    saved.before(scale_);
    for (double& scalar : scalars_) saved.before(scalar);
    saved.before(band_);
    PackedArgs packed;
    packed.pack(unpacked());
    packed.pack(scale_);
    packed.pack(scalars_);
    packed.pack(band_);
    packed.pack(needs());
    const auto arguments = std::move(packed).vec();
    std::vector<at::TypePtr> schema;
    for (const auto& value : arguments) schema.push_back(value.type());
    const auto& compiler = getPyCompilerInterface();
    const auto function =
        compiler->bind_function(saved.get_py_compiler(), name(), &compute_packed, schema,
                                /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto metadata =
        IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            torch::dynamo::autograd::get_input_metadata(next_edges()));
    auto result = compiler->call_function(saved.get_py_compiler(), "apply_functional", function,
                                          grads, arguments, metadata);
    for (SavedVariable& x : saved_) saved.after(x);
    saved.after(scale_);
    for (double& scalar : scalars_) saved.after(scalar);
    saved.after(band_);
    return result;
  }

 private:
  static bool is_output(size_t saved) {
    return saved >= Operands::kTensors && saved < Operands::kTensors + Derived::kOutputs;
  }

  std::vector<Tensor> unpacked() {
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < saved_.size(); ++i) {
      const Tensor x = is_output(i) ? saved_[i].unpack(this->getptr()) : saved_[i].unpack();
      // Of a level of torch.func that has ended nothing is to be seen.
      tensors.push_back(x.defined() ? at::functorch::unwrapIfDead(x) : x);
    }
    return tensors;
  }

  std::vector<bool> needs() {
    std::vector<bool> needs;
    for (size_t i = 0; i < Derived::kGradients; ++i) needs.push_back(task_should_compute_output(i));
    return needs;
  }

  static variable_list compute(const variable_list& grads, const std::vector<Tensor>& saved,
                               std::optional<double> scale, const std::vector<double>& scalars,
                               const std::vector<c10::SymInt>& band,
                               const std::vector<bool>& needs) {
    bool any_gradient = false;
    for (const Tensor& grad : grads) any_gradient |= grad.defined();
    if (!any_gradient) return variable_list(Derived::kGradients);
    const Operands x{saved[0],           saved[1],           saved[2],
                     optional(saved[3]), optional(saved[4]), optional(saved[5]),
                     optional(saved[6]), optional(saved[7]), scale,
                     scalars[0],         scalars[1],         band};
    return Derived::gradients(grads, x, {saved.begin() + Operands::kTensors, saved.end()}, needs);
  }

  static variable_list compute_packed(const variable_list& grads,
                                      const std::vector<c10::IValue>& arguments) {
    torch::dynamo::autograd::PackedArgs packed(arguments);
    const auto saved = packed.unpack<std::vector<Tensor>>();
    const auto scale = packed.unpack<std::optional<double>>();
    const auto scalars = packed.unpack<std::vector<double>>();
    const auto band = packed.unpack<std::vector<c10::SymInt>>();
    const auto needs = packed.unpack<std::vector<bool>>();
    return compute(grads, saved, scale, scalars, band, needs);
  }

  std::vector<SavedVariable> saved_;
  std::optional<double> scale_;
  std::vector<double> scalars_;  // softcap, dropout_p
  std::vector<c10::SymInt> band_;
};

/// The tangent of x, or none.
inline OptionalTensor tangent(const OptionalTensor& x) {
  if (!x || !x->defined()) return std::nullopt;
  const Tensor& t = x->_fw_grad(/*level=*/0);
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}

inline Tensor primal(const Tensor& x) { return tangent(x) ? x._fw_primal(/*level=*/0) : x; }

inline OptionalTensor primal(const OptionalTensor& x) {
  return x ? OptionalTensor(primal(*x)) : std::nullopt;
}

inline Operands primal(const Operands& x) {
  auto tensors = x.tensors();
  for (OptionalTensor& t : tensors) t = primal(t);
  return x.with(tensors);
}

inline ForwardResults primal(const ForwardResults& x) {
  return {primal(x.out), primal(x.lse), primal(x.out_rest), primal(x.lse_rest)};
}

inline Tangents tangents(const Operands& x) {
  const auto tensors = x.tensors();
  Tangents result;
  for (size_t i = 0; i < result.size(); ++i) result[i] = tangent(tensors[i]);
  return result;
}

/// Those of n operands from `first` on, as an operator's bool[n].
template <size_t n>
std::array<bool, n> needs_of(const std::vector<bool>& needs, size_t first = 0) {
  std::array<bool, n> result;
  std::copy_n(needs.begin() + static_cast<int64_t>(first), n, result.begin());
  return result;
}

inline bool any(const Tangents& x) {
  return std::any_of(x.begin(), x.end(), [](const OptionalTensor& t) { return t.has_value(); });
}

inline bool any_tangent(const variable_list& x) {
  return std::any_of(x.begin(), x.end(), [](const Tensor& t) { return tangent(t).has_value(); });
}

inline void set_tangent(const Tensor& x, const OptionalTensor& t) {
  if (t) x._set_fw_grad(*t, /*level=*/0, /*is_inplace_op=*/false);
}

/// The differentiable operands as autograd's functions take them.
inline variable_list variables(const Operands& x) {
  const auto tensors = x.tensors();
  variable_list result;
  for (size_t i = 0; i < Operands::kDifferentiable; ++i) {
    result.push_back(tensors[i].value_or(Tensor()));
  }
  return result;
}

}  // namespace qkv::autograd
