#pragma once

#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>

#include <algorithm>

// Questions about sizes that a traced graph may not know ("unbacked", as of a tensor of what
// nonzero() found). These neither fix such a size nor end in an error that it is not known.

namespace qkv {

/// Whether two sizes are the same. If nobody knows, they are: the graph checks it when it runs.
inline bool are_same(const c10::SymInt& a, const c10::SymInt& b) {
  return a.sym_eq(b).expect_true(__FILE__, __LINE__);
}

/// Whether size a is a multiple of size b, as none is of 0. If nobody knows, it is: as above.
inline bool is_multiple(const c10::SymInt& a, const c10::SymInt& b) {
  return b.sym_ne(0).expect_true(__FILE__, __LINE__) && are_same(a % b, 0);
}

/// Whether a size is known to be 1, and thus to be broadcast.
inline bool is_one(const c10::SymInt& x) { return TORCH_GUARD_OR_FALSE(x.sym_eq(1)); }

/// Whether a size is known to be another.
inline bool is_known_to_be(const c10::SymInt& a, const c10::SymInt& b) {
  return TORCH_GUARD_OR_FALSE(a.sym_eq(b));
}

/// Whether a dense tensor's stride a is less than its stride b: if nobody knows, because a size
/// might be 0 or 1, b is a multiple of a then.
inline bool is_smaller_stride(const c10::SymInt& a, const c10::SymInt& b) {
  if (TORCH_GUARD_OR_FALSE(a.sym_ge(b))) return false;
  return TORCH_GUARD_OR_FALSE(a.sym_lt(b)) || is_known_to_be(b % a, 0);
}

/// Whether two shapes are known to be the same.
inline bool are_known_to_be_same(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), &is_known_to_be);
}

}  // namespace qkv
