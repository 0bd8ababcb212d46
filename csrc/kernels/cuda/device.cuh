#pragma once

#include <stdint.h>

// What kernels ask of the device: their place in the grid, barriers, shuffles, memory. Compiled by
// nvcc this is a thin layer over CUDA; by a host compiler it is the emulation in
// tests/cuda_emulation, in which every access is checked. Kernels touch memory by these functions
// only.

#if !defined(__CUDACC__)
#include "cuda_emulation/device.h"
#else

#include <cuda_runtime_api.h>

/// A kernel that is run by blocks of `threads` threads, `blocks` of which should fit a
/// multiprocessor.
#define QKV_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define QKV_PARAMS const __grid_constant__
#define QKV_DEVICE __device__ __forceinline__
/// What most calls do without: it must not take registers from them.
#define QKV_DEVICE_ASIDE inline __device__ __noinline__
#define QKV_INLINE __host__ __device__ __forceinline__

namespace qkv::kernels::device {

constexpr int kWarp = 32;

QKV_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
QKV_DEVICE int64_t block() { return blockIdx.x; }
QKV_DEVICE int64_t blocks() { return gridDim.x; }

/// All threads of the block arrive before one goes on; what they wrote is seen by all.
QKV_DEVICE void barrier() { __syncthreads(); }

/// The same, and whether any thread came with true.
QKV_DEVICE bool barrier_or(bool x) { return __syncthreads_or(x) != 0; }

/// The x of the lane whose number differs in these bits. All lanes of the warp take part.
template <class T>
QKV_DEVICE T shuffle_xor(T x, int bits) {
  return __shfl_xor_sync(0xffffffff, x, bits);
}

/// The x of a lane.
template <class T>
QKV_DEVICE T shuffle(T x, int lane) {
  return __shfl_sync(0xffffffff, x, lane);
}

/// Bit l: lane l came with true.
QKV_DEVICE uint32_t ballot(bool x) { return __ballot_sync(0xffffffff, x); }

/// The block's shared memory, as much as it was launched with.
QKV_DEVICE char* shared_memory() {
  extern __shared__ __align__(16) char qkv_shared_memory[];
  return qkv_shared_memory;
}

template <class T>
QKV_DEVICE T load_shared(const T* from) {
  return *from;
}
template <class T>
QKV_DEVICE void store_shared(T* to, T x) {
  *to = x;
}

/// kCount numbers that lie one after the other, aligned to 16 bytes if they are as many.
template <int kCount, class T>
QKV_DEVICE void load_shared(const T* from, T (&to)[kCount]) {
  constexpr int kVector = 16 / sizeof(T);
  if constexpr (kCount % kVector == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += kVector) {
      const int4 vector = *reinterpret_cast<const int4*>(from + i);
      memcpy(to + i, &vector, sizeof(vector));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = from[i];
  }
}
template <int kCount, class T>
QKV_DEVICE void store_shared(T* to, const T (&x)[kCount]) {
  constexpr int kVector = 16 / sizeof(T);
  if constexpr (kCount % kVector == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += kVector) {
      int4 vector;
      memcpy(&vector, x + i, sizeof(vector));
      *reinterpret_cast<int4*>(to + i) = vector;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = x[i];
  }
}

template <class T>
QKV_DEVICE T load_global(const T* from) {
  return *from;
}
template <class T>
QKV_DEVICE void store_global(T* to, T x) {
  *to = x;
}

/// kCount numbers that lie one after the other, aligned to the bytes they take, or to 16.
template <int kCount, class T>
QKV_DEVICE void load_global(const T* from, T (&to)[kCount]) {
  constexpr int kBytes = kCount * sizeof(T);
  static_assert(kBytes == 8 || kBytes % 16 == 0);
  if constexpr (kBytes == 8) {
    const int2 vector = *reinterpret_cast<const int2*>(from);
    memcpy(to, &vector, sizeof(vector));
  } else {
    constexpr int kVector = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kCount; i += kVector) {
      const int4 vector = *reinterpret_cast<const int4*>(from + i);
      memcpy(to + i, &vector, sizeof(vector));
    }
  }
}

/// How much shared memory a block may take so that `blocks` of them fit a multiprocessor of the
/// current device.
inline int64_t most_shared_bytes(int blocks) {
  int device = 0, of_multiprocessor = 0, of_block = 0, reserved = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
  const int64_t bytes = of_multiprocessor / blocks - reserved;
  return bytes < of_block ? bytes : of_block;
}

/// Runs kernel(arguments..), the arguments of exactly its parameters' types, in `blocks` blocks on
/// a cudaStream_t. A cudaError_t, 0 if all is well.
template <class Kernel, class... Arguments>
int launch(const char*, Kernel kernel, int64_t blocks, int threads, int64_t shared_bytes,
           void* stream, const Arguments&... arguments) {
  constexpr int64_t kWithoutAsking = 48 << 10;
  if (blocks == 0) return 0;
  if (shared_bytes > kWithoutAsking) {
    // As much as there is: it is the kernel's, and other threads launch it with other sizes.
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(most_shared_bytes(1)));
    if (error != cudaSuccess) return error;
  }
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                          dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                          pointers, static_cast<size_t>(shared_bytes),
                          static_cast<cudaStream_t>(stream));
}

}  // namespace qkv::kernels::device

#endif
