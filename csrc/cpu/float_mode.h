#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace qkv::cpu {

/// Whether subnormal numbers count as zeros (torch.set_flush_denormal), which is a matter of each
/// thread. Those that help the calling thread take it over for as long; else bits would depend on
/// which of them took a unit of work.
class FloatMode {
 public:
  FloatMode() : mode_(of_this_thread()) {}  // that of the calling thread

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
  static unsigned of_this_thread() { return _mm_getcsr(); }
  static void set(unsigned mode) { _mm_setcsr(mode); }
#else  // each thread keeps its own
  static unsigned of_this_thread() { return 0; }
  static void set(unsigned) {}
#endif

  unsigned mode_;
};

}  // namespace qkv::cpu
