#pragma once

#include <ATen/Parallel.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <vector>

#include "layout.h"
#include "operands.h"

// Second order of half types makes copies of outputs in float32, and so may both it and forward
// mode of the keys as they are multiplied. However long the sequences are, these stay small: they
// are made for a few heads at a time.

namespace qkv::cpu {

/// Some neighbouring heads of key and value, with the query's heads that see them.
class Heads {
 public:
  Heads(const Operands& x, int64_t first, int64_t count)
      : first_(first),
        count_(count),
        group_(x.query.size(-3) / x.key.size(-3)),
        all_(count == x.key.size(-3)) {}

  /// Of (batch.., Hq, M, columns).
  Tensor of_rows(const Tensor& x) const { return of_query_heads(x, 3); }

  /// Of (batch.., Hq, M), dense.
  Tensor of_scalars(const Tensor& x) const { return of_query_heads(x, 2).contiguous(); }

  /// Copies x back into `to`, unless of_scalars(to) was a view.
  void put_scalars(const Tensor& x, const Tensor& to) const {
    const Tensor part = of_query_heads(to, 2);
    if (part.data_ptr() != x.data_ptr()) part.copy_(x);
  }

  Operands of(Operands x) const {
    auto tensors = x.tensors();
    of_each(tensors);
    x = x.with(tensors);
    x.first_head = first_ * group_;
    return x;
  }

  Tangents of(Tangents x) const {
    of_each(x);
    return x;
  }

  /// Gradients that are not needed have no heads.
  Gradients of(Gradients x, const Needs& needs) const {
    for (size_t i = 0; i < x.size(); ++i) {
      if (needs[i]) x[i] = of_operand(i, x[i]);
    }
    return x;
  }

  /// Of operand i, or of its gradient.
  Tensor of_operand(size_t i, const Tensor& x) const {
    const bool of_keys = i == 1 || i == 2;
    if (of_keys) return all_ ? x : x.narrow(-3, first_, count_);
    return of_query_heads(x, Operands::kInnerRanks[i]);
  }

 private:
  /// Unless it is broadcast over them. `dimension`, counted from the end, has the heads.
  Tensor of_query_heads(const Tensor& x, int64_t dimension) const {
    if (all_ || x.dim() < dimension || x.size(-dimension) == 1) return x;
    return x.narrow(-dimension, first_ * group_, count_ * group_);
  }

  template <class Tensors>
  void of_each(Tensors& x) const {
    for (size_t i = 0; i < Operands::kDifferentiable; ++i) {
      if (x[i]) x[i] = of_operand(i, *x[i]);
    }
  }

  int64_t first_;
  int64_t count_;
  int64_t group_;
  bool all_;
};

/// Whether a gradient that is asked for is summed over heads: those cannot be worked on apart then.
inline bool sums_over_heads(const Operands& x, const Needs& needs) {
  const auto tensors = x.tensors();
  for (size_t i = 3; i < needs.size(); ++i) {
    const int64_t dimension = Operands::kInnerRanks[i];
    if (needs[i] && (tensors[i]->dim() < dimension || tensors[i]->size(-dimension) == 1)) {
      return true;
    }
  }
  return false;
}

/// The heads in the order they are computed in. Each has results of its own, so that these do not
/// depend on how the heads are cut.
inline std::vector<Heads> ranges_of_heads(const Operands& x, const Needs& needs = {}) {
  constexpr int64_t kNumbers = 1 << 19;  // of a copy
  const int64_t heads = x.key.size(-3);
  int64_t at_once = heads;
  if (has_16_bits(x.query) && !sums_over_heads(x, needs)) {
    const int64_t batch = c10::multiply_integers(x.query.sizes().slice(0, x.query.dim() - 3));
    const int64_t rows = x.query.size(-3) / heads * x.query.size(-2);
    const int64_t widest = std::max(x.key.size(-1), x.value.size(-1));
    const int64_t of_head = batch * std::max(rows * x.value.size(-1), x.key.size(-2) * widest);
    const int64_t small = kNumbers / std::max<int64_t>(of_head, 1);
    const int64_t for_all_threads = (at::get_num_threads() + batch - 1) / batch;
    at_once = std::clamp(std::max(small, for_all_threads), int64_t{1}, heads);
  }
  std::vector<Heads> ranges;
  for (int64_t first = 0; first < heads; first += at_once) {
    ranges.emplace_back(x, first, std::min(at_once, heads - first));
  }
  return ranges;
}

}  // namespace qkv::cpu
