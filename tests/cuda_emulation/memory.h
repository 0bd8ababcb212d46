#pragma once

// From the first call on, tensors on the CPU lie in memory that the emulated device knows: an
// access outside of a tensor, or a read of what nobody wrote, is a fault.

namespace qkv::kernels::device {

void watch_tensors();

}  // namespace qkv::kernels::device
