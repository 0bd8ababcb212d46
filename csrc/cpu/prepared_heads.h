#pragma once

#include "cpu/units.h"
#include "kernels/params.h"

namespace qkv::cpu {

/// What prepare(head, memory) makes of each key/value head.
template <class T, class Prepare>
c10::DataPtr prepare_heads(const kernels::Problem<T>& problem, int64_t bytes_of_head,
                           const Prepare& prepare) {
  const int64_t heads = problem.batch * problem.kv_heads;
  auto prepared = c10::GetCPUAllocator()->allocate(heads * bytes_of_head);
  if (bytes_of_head > 0) {
    for_each_unit(heads, 0, [&](int64_t head, void*) { prepare(head, prepared.get()); });
  }
  return prepared;
}

}  // namespace qkv::cpu
