#pragma once

#include "arguments.h"
#include "samples.h"

// What the public operator makes of a sample before it calls an internal one.

namespace samples {

/// A checked call, its seed drawn.
inline qkv::Call call_of(const Sample& s) {
  const auto& o = s.options;
  qkv::Arguments a;
  a.query = s.query;
  a.key = s.key;
  a.value = s.value;
  a.attn_mask = o.attn_mask();
  a.dropout_p = o.dropout_p();
  a.is_causal = o.is_causal();
  a.scale = o.scale();
  a.enable_gqa = o.enable_gqa();
  if (o.window()) a.window = {o.window()->first, o.window()->second};
  if (o.query_offset()) a.query_offset = *o.query_offset();
  a.softcap = o.softcap();
  a.alibi_slopes = o.alibi_slopes();
  a.sinks = o.sinks();
  a.key_mask = o.key_mask();
  qkv::Call call = qkv::checked_call("test", a);
  qkv::Operands& x = call.operands;
  torch::manual_seed(1);
  if (x.dropout_p > 0.0) {
    x.dropout_seed = torch::randint(std::numeric_limits<int64_t>::max(),
                                    x.query.sizes().slice(0, x.query.dim() - 3), torch::kLong);
  }
  return call;
}

}  // namespace samples
