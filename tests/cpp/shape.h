#pragma once

#include "kernels/cpu/isa.h"

namespace kernel_run {

using namespace qkv::kernels;

/// A problem that tests of the kernels run.
struct Shape {
  int64_t heads, kv_heads, queries, keys, head_dim, value_dim;
  Band band;
  bool options = false;                                   // softcap, ALiBi and sinks
  bool capped = false;                                    // a softcap alone
  bool drops = false;                                     // a quarter of the weights
  bool keys_far_apart = false, values_far_apart = false;  // rows that kernels copy
  bool has_nan = false;  // in 16-bit values of 4 keys after the last that a causal mask keeps
  double scale = 0.3;
  bool few_rows_in_tiles = false;  // in the backward

  bool has_softcap() const { return options || capped; }
};

inline int64_t rows_of_head(const Shape& shape) {
  return shape.heads / shape.kv_heads * shape.queries;
}

template <class T>
Problem<T> sizes_of(const Shape& shape) {
  Problem<T> p{};
  p.batch = 1;
  p.query_heads = shape.heads;
  p.kv_heads = shape.kv_heads;
  p.queries = shape.queries;
  p.keys = shape.keys;
  p.head_dim = shape.head_dim;
  p.value_dim = shape.value_dim;
  return p;
}

}  // namespace kernel_run
