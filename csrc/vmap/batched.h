#pragma once

#include <ATen/functorch/BatchedTensorImpl.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "internal_op.h"

// vmap for the internal operators: the mapped dimension becomes one more batch dimension, so that
// one call of the kernel does it all.

// Of ATen/functorch/DynamicLayer.h, which cannot be included from an installed torch.
namespace at::functorch {
TORCH_API const std::shared_ptr<bool>& getLifeHandleForLevel(int64_t level);
TORCH_API Tensor unwrapIfDead(const Tensor& tensor);
}  // namespace at::functorch

namespace qkv::vmap {

/// Whether the level that is being processed is another one, inside of `level`: only what is not
/// the last has one after it.
inline bool is_outside_of_current(int64_t level) {
  try {
    at::functorch::getLifeHandleForLevel(level + 1);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

/// The innermost vmap that maps any of a call's tensors: takes tensors off that level and puts
/// results back on. The level that is being processed is the same or one that maps nothing. In the
/// second case a grad or jvp between the two may have wrapped other tensors: then it comes first.
class Level {
 public:
  /// Of the arguments of an internal operator, those that are tensors or have some.
  template <class... Arguments>
  explicit Level(const Arguments&... arguments) {
    std::vector<OptionalTensor> tensors;
    const auto add = [&](const auto& x) {
      if constexpr (std::is_convertible_v<decltype(x), OptionalTensor>) tensors.push_back(x);
    };
    std::apply([&](const auto&... flat) { (add(flat), ...); },
               std::tuple_cat(Argument<const Arguments&>::take_apart(arguments)...));
    for (const OptionalTensor& t : tensors) {
      const auto* batched = t ? at::functorch::maybeGetBatchedImpl(*t) : nullptr;
      if (batched != nullptr) level_ = std::max(level_, batched->level());
    }
    const auto is_wrapped = [](const OptionalTensor& t) {
      return t && t->key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
    };
    const bool any_wrapped = std::any_of(tensors.begin(), tensors.end(), is_wrapped);
    if (level_ != kNone && any_wrapped && is_outside_of_current(level_)) level_ = kNone;
    for (const OptionalTensor& t : tensors) {
      if (maps(t)) size_ = split(*t).first.sym_size(*split(*t).second);
    }
  }

  /// Whether anything is mapped.
  bool any() const { return level_ != kNone; }

  bool maps(const OptionalTensor& x) const { return x && split(*x).second.has_value(); }

  /// x with the mapped dimension in front, expanded if x is not mapped.
  Tensor in_front(const Tensor& x) const {
    const auto [value, dim] = split(x);
    if (dim) return value.movedim(*dim, 0);
    auto sizes = value.sym_sizes().vec();
    sizes.insert(sizes.begin(), size_);
    return value.unsqueeze(0).expand_symint(sizes);
  }

  OptionalTensor in_front(const OptionalTensor& x) const {
    return x ? OptionalTensor(in_front(*x)) : std::nullopt;
  }

  ForwardResults in_front(const ForwardResults& x) const {
    return {in_front(x.out), in_front(x.lse), in_front(x.out_rest), in_front(x.lse_rest)};
  }

  /// A tensor that is broadcast from the right to `rank` dimensions: the mapped dimension goes in
  /// front of all of them. One that is not mapped needs nothing, unless it must be (`always`).
  OptionalTensor in_front_of(int64_t rank, const OptionalTensor& x, bool always = false) const {
    if (!x) return std::nullopt;
    if (!maps(x) && !always) return split(*x).first;
    Tensor front = in_front(*x);
    while (front.dim() < rank + 1) front = front.unsqueeze(1);
    return front;
  }

  /// The operands with one more batch dimension. Each sample has gradients of its own, also of a
  /// mask (or slopes, or sinks) that all samples share: those that `needs` names are mapped.
  Operands unwrap(const Operands& x, Needs needs = {}) const {
    const int64_t rank = rank_of(x);
    return x.with({in_front(x.query), in_front(x.key), in_front(x.value),
                   in_front_of(rank, x.attn_mask, needs[3]),
                   in_front_of(rank - 2, x.alibi_slopes, needs[4]),
                   in_front_of(rank - 2, x.sinks, needs[5]), in_front_of(rank - 2, x.key_mask),
                   in_front(x.dropout_seed)});
  }

  /// Tangents of those operands; they need not be mapped where their operand is, unless `always`
  /// names it.
  Tangents unwrap(const Operands& x, const Tangents& t, Needs always = {}) const {
    const int64_t rank = rank_of(x);
    return {in_front(t[0]),
            in_front(t[1]),
            in_front(t[2]),
            in_front_of(rank, t[3], always[3]),
            in_front_of(rank - 2, t[4], always[4]),
            in_front_of(rank - 2, t[5], always[5])};
  }

  /// The operands that are mapped, or whose tangents are.
  Needs mapped(const Operands& x, const Tangents& t) const {
    const auto operands = x.tensors();
    Needs mapped;
    for (size_t i = 0; i < mapped.size(); ++i) mapped[i] = maps(operands[i]) || maps(t[i]);
    return mapped;
  }

  /// The gradient of `input` on the level again. What is of lower rank than the batch was given
  /// dimensions of size 1 to stand in front of; the input has its own sizes.
  Tensor wrap_gradient(const Tensor& grad, const Tensor& input) const {
    auto sizes = input.sym_sizes().vec();
    sizes.insert(sizes.begin(), grad.sym_size(0));
    return wrap(grad.sym_sizes() == sizes ? grad : grad.view_symint(sizes));
  }

  Tensor wrap(const Tensor& x) const { return at::functorch::makeBatched(x, 0, level_); }

 private:
  int64_t rank_of(const Operands& x) const {
    return split(x.query).first.dim() - (maps(x.query) ? 1 : 0);
  }

  std::pair<Tensor, std::optional<int64_t>> split(const Tensor& x) const {
    auto* batched = at::functorch::maybeGetBatchedImpl(x);
    if (batched == nullptr || batched->level() != level_) return {x, std::nullopt};
    return {batched->value(), batched->bdim()};
  }

  static constexpr int64_t kNone = -1;

  int64_t level_ = kNone;
  c10::SymInt size_ = 0;
};

}  // namespace qkv::vmap
