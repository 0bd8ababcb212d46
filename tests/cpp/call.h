#pragma once

#include "arguments.h"
#include "samples.h"

// What the public operator makes of a sample before it calls an internal one.

namespace samples {

/// A checked call, its seed drawn.
inline qkv::Call call_of(const Sample& s) {
  qkv::Call call = qkv::checked_call("test", qkv::as_arguments(s.query, s.key, s.value, s.options));
  qkv::Operands& x = call.operands;
  torch::manual_seed(1);
  if (x.dropout_p > 0.0) {
    x.dropout_seed = torch::randint(std::numeric_limits<int64_t>::max(),
                                    x.query.sizes().slice(0, x.query.dim() - 3), torch::kLong);
  }
  return call;
}

}  // namespace samples
