#pragma once

#include "operands.h"

// Kernels read and write rows whose numbers lie together. Where a tensor has its columns together
// instead, as those of convolutions do, (B, H, D, N) transposed, they work on a copy that has rows.

namespace qkv::cpu {

/// to = from, of the same sizes.
void copy(const Tensor& from, const Tensor& to);

/// x, or a copy if its last dimension is strided. Dimensions in which it is broadcast still are.
Tensor in_rows(const Tensor& x);

/// Where kernels write what put() takes to `result`: itself, if it has rows and the kernels' dtype.
Tensor rows_for(const Tensor& result, at::ScalarType real);
inline Tensor rows_for(const Tensor& result) { return rows_for(result, result.scalar_type()); }

inline void put(const Tensor& written, const Tensor& result) {
  if (!written.is_same(result)) copy(written, result);
}

}  // namespace qkv::cpu
