#pragma once

#include <qkv/export.h>

// The one place where the version stands: CMakeLists.txt and setup.py read it from here.
#define QKV_VERSION "0.1.0"

namespace qkv {

/// The version of the library that is loaded, which may differ from QKV_VERSION of the headers.
QKV_API const char* version();

/// The torch version that the loaded library was built for, e.g. "2.11.0".
QKV_API const char* torch_version();

/// Registers the operators, by being linked. Programs that only use them by name (a TorchScript
/// model, say) would otherwise lose the library to the linker's --as-needed; including
/// <qkv/qkv.h> calls this.
QKV_API bool ensure_loaded();

}  // namespace qkv
