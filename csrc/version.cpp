#include <qkv/version.h>
#include <torch/version.h>

namespace qkv {

const char* version() { return QKV_VERSION; }

const char* torch_version() { return TORCH_VERSION; }

bool ensure_loaded() { return true; }

}  // namespace qkv
