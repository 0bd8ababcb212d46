#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/half.h"

// What devices from sm_80 on have besides: products of tiles by a whole warp, the loads that bring
// numbers where these want them, and copies to shared memory that go on beside the threads' work.
//
//     C (16 x 8, float)  +=  A (16 x 16)  B (16 x 8)         Element: BFloat16 or Float16
//
// A lane has words of two numbers of A and B, the first in the lower half, and four numbers of C:
//
//     a[0]  row lane / 4, columns 2 · (lane % 4) and the one after it;   a[1] 8 rows below;
//     a[2]  8 columns to the right;   a[3] 8 rows below and 8 columns to the right
//     b[0]  column lane / 4, rows 2 · (lane % 4) and the one after it;   b[1] 8 rows below
//     c[0], c[1]  row lane / 4, columns 2 · (lane % 4) and the one after it;   c[2], c[3] 8 rows
//     below
//
// So sums of one product, rounded, are the left side of the next, without a word between lanes.
//
//     C (16 x 8, float)  +=  A (16 x 8)  B (8 x 8)           floats of 11 bits, tf32
//
//     a[0]  row lane / 4, column lane % 4;   a[1] 8 rows below;   a[2] 4 columns to the right;
//     a[3]  8 rows below and 4 columns to the right
//     b0    column lane / 4, row lane % 4;   b1 4 rows below

#if !defined(__CUDACC__)
#include "cuda_emulation/tensor_cores.h"
#else

namespace qkv::kernels::device {

using QKV_ISA::BFloat16;
using QKV_ISA::Float16;

QKV_DEVICE void multiply_add(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4],
                             const BFloat16*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
QKV_DEVICE void multiply_add(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4],
                             const Float16*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

QKV_DEVICE void multiply_add(const float (&a)[4], float b0, float b1, float (&c)[4]) {
  const auto word = [](float x) { return __float_as_uint(x); };
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(word(a[0])), "r"(word(a[1])), "r"(word(a[2])), "r"(word(a[3])), "r"(word(b0)),
        "r"(word(b1)));
}

/// The nearest number of tf32, and of two the one farther from 0.
QKV_DEVICE float rounded_to_tf32(float x) {
  uint32_t word;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
  return __uint_as_float(word);
}

/// Both numbers rounded to the nearest Elements, as a word.
QKV_DEVICE uint32_t rounded_pair(float first, float second, const BFloat16*) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}
QKV_DEVICE uint32_t rounded_pair(float first, float second, const Float16*) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

/// Four matrices of 8 x 8 Elements in shared memory. Lane l comes with the address of row l % 8 of
/// matrix l / 8, a multiple of 16 bytes. Of each it gets columns 2 · (l % 4) and the one after it
/// of row l / 4; or, transposed, rows 2 · (l % 4) and the one after it of column l / 4.
template <bool kTransposed, class Element>
QKV_DEVICE void load_matrices(const Element* row, uint32_t (&x)[4]) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  }
}

/// Begins to copy 16 bytes to shared memory, or zeros if there are none; both aligned to as many.
QKV_DEVICE void copy_async(void* to, const void* from, bool exist) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int bytes = exist ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes)
               : "memory");
}

/// Waits for all copies that this thread has begun. Others see them after a barrier.
QKV_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// e^x for x <= 0, to 2^-22 + |x| 2^-24 of it: what rounding takes from x log2 e is an error in the
/// exponent.
QKV_DEVICE float approximate_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}

/// Whether the current device has what this file is about.
inline bool has_tensor_cores() {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major >= 8;
}

inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

}  // namespace qkv::kernels::device

#endif
