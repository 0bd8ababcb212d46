#pragma once

// Everything: the operator (attention.h) and the modules (nn.h).

#include <qkv/attention.h>
#include <qkv/nn.h>
#include <qkv/version.h>

namespace qkv::detail {

// Keeps the library linked (see ensure_loaded) in every program that includes this.
inline const bool library_is_loaded = ensure_loaded();

}  // namespace qkv::detail
