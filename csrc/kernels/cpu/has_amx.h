#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qkv::kernels {

/// Whether this process may multiply tiles of bfloat16 (AMX-BF16). Threads have room for tiles only
/// once Linux (5.16 on) has been asked for it, which this does, for all threads and for good.
inline bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kBFloat16 = 1u << 22, kTiles = 1u << 24;  // bits of edx of leaf 7
  constexpr long kRequestPermission = 0x1023;                  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;                               // a component of XSAVE
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kBFloat16) == 0 || (edx & kTiles) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

/// Whether a processor that has_amx() multiplies tiles of float16 too (AMX-FP16).
inline bool has_amx_fp16() {
#if defined(__x86_64__)
  constexpr unsigned kFloat16 = 1u << 21;  // of eax of leaf 7, subleaf 1
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kFloat16) != 0;
#else
  return false;
#endif
}

}  // namespace qkv::kernels
