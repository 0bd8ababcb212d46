#pragma once

#include <torch/torch.h>

// What this machine gives at best, measured like everything else: in the same run, in turns.

namespace limits {

/// Multiply-adds of one call of multiply_add_*, by each thread.
constexpr int64_t kMultiplyAdds = int64_t(1) << 24;

/// Whether this processor has the instructions that the kernels would use at best.
bool has_float32();
bool has_bfloat16();
bool has_float16();

/// kMultiplyAdds multiply-adds of float32 in registers, on every thread of ATen's.
void multiply_add_float32();

/// The same of bfloat16, summed in float32: of tiles where the processor has AMX.
void multiply_add_bfloat16();

/// The same of tiles of float16.
void multiply_add_float16();

/// Reads a dense tensor from memory, on every thread of ATen's.
void read(const torch::Tensor& x);

}  // namespace limits
