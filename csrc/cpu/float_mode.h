#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace qkv::cpu {

/// What arithmetic does beside its results, a matter of each thread. Whether subnormal numbers
/// count as zeros (torch.set_flush_denormal) those that help the calling thread take over for as
/// long; else bits would depend on which of them took a unit of work. Whatever the caller's modes,
/// numbers are rounded to the nearest, which exponentials rely on, and nothing traps: lanes that
/// nobody reads may divide by 0.
class FloatMode {
 public:
  FloatMode() : mode_((of_this_thread() & kSubnormals) | kUsual) {}  // that of the calling thread

  class Scope {
   public:
    explicit Scope(const FloatMode& mode) : before_(of_this_thread()) { set(mode.mode_); }
    ~Scope() { set(before_); }
    Scope(const Scope&) = delete;

   private:
    unsigned before_;
  };

 private:
#if defined(__x86_64__)
  static constexpr unsigned kSubnormals = 0x8040;  // bits for results and for operands
  static constexpr unsigned kUsual = 0x1f80;       // to the nearest, all exceptions masked

  static unsigned of_this_thread() { return _mm_getcsr(); }
  static void set(unsigned mode) { _mm_setcsr(mode); }
#else  // each thread keeps its own
  static constexpr unsigned kSubnormals = 0, kUsual = 0;

  static unsigned of_this_thread() { return 0; }
  static void set(unsigned) {}
#endif

  unsigned mode_;
};

}  // namespace qkv::cpu
