#include "cuda/stream.h"

#include <c10/util/Exception.h>

// The stream of the emulated device, whose memory is the CPU's.

namespace qkv::cuda {

struct Stream::Guard {};

Stream::Stream(const at::Tensor&) : guard_(nullptr), stream_(nullptr) {}
Stream::~Stream() = default;

void check(const char* op, int error) {
  TORCH_CHECK(error == 0, op, ": a launch returned ", error);
}

}  // namespace qkv::cuda
