#include "limits.h"

#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/cpu/has_amx.h"
#endif

namespace limits {

namespace {

template <class F>
void on_every_thread(F f) {
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) f();
  });
}

// As many sums as hide the latency of a multiply-add on any processor with these instructions.
constexpr int kSums = 24;

#if defined(__x86_64__)

/// x, but the compiler no longer knows it: equal sums would be computed once.
template <class T>
__attribute__((always_inline)) inline T unknown(T x) {
  __asm__ volatile("" : "+v"(x));
  return x;
}

__attribute__((target("avx512f"))) void avx512() {
  __m512 sum[kSums], a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
#pragma GCC unroll 24
  for (auto& s : sum) s = unknown(_mm512_setzero_ps());
  for (int64_t i = 0; i < kMultiplyAdds / (16 * kSums); ++i) {
    __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 24
    for (auto& s : sum) s = _mm512_fmadd_ps(a, b, s);
  }
#pragma GCC unroll 24
  for (auto& s : sum) __asm__ volatile("" ::"v"(s));
}

__attribute__((target("avx2,fma"))) void avx2() {
  __m256 sum[12], a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
#pragma GCC unroll 12
  for (auto& s : sum) s = unknown(_mm256_setzero_ps());
  for (int64_t i = 0; i < kMultiplyAdds / (8 * 12); ++i) {
    __asm__ volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
    for (auto& s : sum) s = _mm256_fmadd_ps(a, b, s);
  }
#pragma GCC unroll 12
  for (auto& s : sum) __asm__ volatile("" ::"x"(s));
}

__attribute__((target("avx512f,avx512bf16"))) void avx512_bf16() {
  __m512 sum[kSums];
  __m512i a = _mm512_set1_epi32(0x3f003f00), b = _mm512_set1_epi32(0x3e803e80);
#pragma GCC unroll 24
  for (auto& s : sum) s = unknown(_mm512_setzero_ps());
  for (int64_t i = 0; i < kMultiplyAdds / (32 * kSums); ++i) {
    __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 24
    for (auto& s : sum) {
      s = _mm512_dpbf16_ps(s, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
  }
#pragma GCC unroll 24
  for (auto& s : sum) __asm__ volatile("" ::"v"(s));
}

/// Products of tiles of 16 x 32 and 32 x 16 numbers. Four sums in turn are enough, and more are
/// slower where another machine shares the core (amx_tiles.h).
template <class Multiply>
void amx(Multiply multiply_four) {
  struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static const Shapes shapes;
  __asm__ volatile("ldtilecfg %0" ::"m"(shapes));  // and sets the tiles to zero
  for (int64_t i = 0; i < kMultiplyAdds / (4 * 16 * 16 * 32); ++i) multiply_four();
  __asm__ volatile("tilerelease");
}

void amx_bfloat16() {
  amx([] {
    __asm__ volatile(
        "tdpbf16ps %tmm7, %tmm6, %tmm0\n tdpbf16ps %tmm7, %tmm6, %tmm1\n"
        "tdpbf16ps %tmm7, %tmm6, %tmm2\n tdpbf16ps %tmm7, %tmm6, %tmm3");
  });
}

/// The same of tdpfp16ps, in bytes as in amx_registers.h.
void amx_float16() {
  amx([] {
    __asm__ volatile(
        ".byte 0xc4, 0xe2, 0x43, 0x5c, 0xc6\n .byte 0xc4, 0xe2, 0x43, 0x5c, 0xce\n"
        ".byte 0xc4, 0xe2, 0x43, 0x5c, 0xd6\n .byte 0xc4, 0xe2, 0x43, 0x5c, 0xde");
  });
}

bool amx_is_here() {
  static const bool is_here = qkv::kernels::has_amx();
  return is_here;
}

#endif

}  // namespace

#if defined(__x86_64__)
bool has_float32() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_bfloat16() { return __builtin_cpu_supports("avx512bf16"); }
void multiply_add_float32() { on_every_thread(__builtin_cpu_supports("avx512f") ? avx512 : avx2); }
void multiply_add_bfloat16() { on_every_thread(amx_is_here() ? amx_bfloat16 : avx512_bf16); }
bool has_float16() { return amx_is_here() && qkv::kernels::has_amx_fp16(); }
void multiply_add_float16() { on_every_thread(amx_float16); }
#else
bool has_float32() { return false; }
bool has_bfloat16() { return false; }
void multiply_add_float32() {}
void multiply_add_bfloat16() {}
bool has_float16() { return false; }
void multiply_add_float16() {}
#endif

void read(const torch::Tensor& x) {
  const auto* words = static_cast<const uint64_t*>(x.const_data_ptr());
  const auto count = static_cast<int64_t>(x.nbytes() / sizeof(uint64_t));
  // One stream alone waits for its next page: each thread reads several places at a time.
  constexpr int64_t kStreams = 8, kLine = 8;
  at::parallel_for(0, count, 1 << 14, [&](int64_t begin, int64_t end) {
    uint64_t sum[kLine] = {};
    const int64_t each = (end - begin) / kStreams / kLine * kLine;
    const auto add_line = [&](const uint64_t* line) {
      for (int l = 0; l < kLine; ++l) sum[l] ^= line[l];
    };
    for (int64_t i = 0; i < each; i += kLine) {
      for (int64_t s = 0; s < kStreams; ++s) {
        const uint64_t* line = words + begin + s * each + i;
        __builtin_prefetch(line + 8 * kLine);
        add_line(line);
      }
    }
    for (int64_t i = begin + kStreams * each; i + kLine <= end; i += kLine) add_line(words + i);
    benchmark::DoNotOptimize(sum);
  });
}

}  // namespace limits
