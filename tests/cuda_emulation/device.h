#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <string>
#include <vector>

// The device of kernels/cuda/device.cuh on a CPU: the threads of a block are fibers that run until
// they wait for others, and every access to memory is checked. What a checker finds is kept as a
// Fault, and the kernel goes on, so that a test can say what it expects.

#define QKV_KERNEL(threads, blocks) void
#define QKV_PARAMS const
#define QKV_DEVICE inline
#define QKV_DEVICE_ASIDE inline
#define QKV_INLINE inline

namespace qkv::kernels::device {

constexpr int kWarp = 32;

enum class FaultKind {
  kOutOfBounds,    // outside of any allocation, or of the block's shared memory
  kUninitialised,  // read before anything was written
  kMisaligned,
  kRace,      // two threads touched a word between two barriers, and one of them wrote
  kDeadlock,  // a barrier or shuffle that not all threads come to
};

struct Fault {
  FaultKind kind;
  std::string kernel;
  int64_t block;
  int thread;
  int other_thread;  // of a race, else -1
  uint64_t address;  // in shared memory an offset
  bool shared;

  std::string text() const;
};

/// What was found since the last call.
std::vector<Fault> take_faults();

/// The kernels that were launched since the last call, in order.
std::vector<std::string> take_launches();

/// Memory that kernels may touch. What was not written since is poison: bytes a5 ff, repeated,
/// which no computation leaves (NaNs with a tail, in all types).
void register_memory(void* data, size_t bytes);
void unregister_memory(void* data);
void poison(void* data, size_t bytes);

/// The order in which fibers and blocks are run, to show what depends on it.
enum class Order { kForward, kBackward };
void set_order(Order order);

/// No more blocks at once than that, whatever is launched: kernels have to walk over the rest.
void set_largest_grid(int64_t blocks);

/// Bytes of shared memory that the blocks of a multiprocessor have together, which kernels may ask
/// for. At first what sm_86 and sm_89 have: some heads of the tests fit, others do not.
constexpr int64_t kBytesOfMultiprocessor = 100 << 10;
void set_bytes_of_multiprocessor(int64_t bytes);

int thread();
int64_t block();
int64_t blocks();
int64_t most_shared_bytes(int blocks);
void barrier();
bool barrier_or(bool x);
char* shared_memory();

namespace detail {

/// Both give false, after reporting a fault, if the access must not be carried out.
bool check_global(const void* address, size_t bytes, bool write);
template <bool kWrite>
bool check_shared(const void* address, size_t bytes);

void report_misaligned(const void* address);
inline void check_alignment(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) report_misaligned(address);
}

/// All lanes of the warp come with 8 bytes; those of each, by its number.
const uint64_t* exchange(uint64_t x);

void run(const char* name, int64_t blocks, int threads, int64_t shared_bytes,
         const std::function<void()>& thread_body);

}  // namespace detail

template <class T>
T shuffle(T x, int lane) {
  uint64_t word = 0;
  memcpy(&word, &x, sizeof(x));
  word = detail::exchange(word)[lane % kWarp];
  memcpy(&x, &word, sizeof(x));
  return x;
}
template <class T>
T shuffle_xor(T x, int bits) {
  return shuffle(x, thread() % kWarp ^ bits);
}
inline uint32_t ballot(bool x) {
  const uint64_t* votes = detail::exchange(x ? 1 : 0);
  uint32_t bits = 0;
  for (int lane = 0; lane < kWarp; ++lane) bits |= static_cast<uint32_t>(votes[lane]) << lane;
  return bits;
}

template <class T>
T load_shared(const T* from) {
  T x{};
  if (detail::check_shared<false>(from, sizeof(T))) memcpy(&x, from, sizeof(T));
  return x;
}
template <class T>
void store_shared(T* to, T x) {
  if (detail::check_shared<true>(to, sizeof(T))) memcpy(to, &x, sizeof(T));
}

/// Vectors as the device has them need alignment to 16 bytes.
template <int kCount, class T>
void load_shared(const T* from, T (&to)[kCount]) {
  if (kCount * sizeof(T) % 16 == 0) detail::check_alignment(from, 16);
  if (detail::check_shared<false>(from, sizeof(to))) {
    memcpy(to, from, sizeof(to));
  } else {
    memset(to, 0, sizeof(to));
  }
}
template <int kCount, class T>
void store_shared(T* to, const T (&x)[kCount]) {
  if (kCount * sizeof(T) % 16 == 0) detail::check_alignment(to, 16);
  if (detail::check_shared<true>(to, sizeof(x))) memcpy(to, x, sizeof(x));
}

template <class T>
T load_global(const T* from) {
  T x{};
  detail::check_alignment(from, alignof(T));
  if (detail::check_global(from, sizeof(T), false)) memcpy(&x, from, sizeof(T));
  return x;
}
template <class T>
void store_global(T* to, T x) {
  detail::check_alignment(to, alignof(T));
  if (detail::check_global(to, sizeof(T), true)) memcpy(to, &x, sizeof(T));
}
template <int kCount, class T>
void load_global(const T* from, T (&to)[kCount]) {
  static_assert(sizeof(to) == 8 || sizeof(to) % 16 == 0);
  detail::check_alignment(from, sizeof(to) == 8 ? 8 : 16);
  if (detail::check_global(from, sizeof(to), false)) {
    memcpy(to, from, sizeof(to));
  } else {
    memset(static_cast<void*>(to), 0, sizeof(to));
  }
}

template <class Kernel, class... Arguments>
int launch(const char* name, Kernel kernel, int64_t blocks, int threads, int64_t shared_bytes,
           void*, const Arguments&... arguments) {
  constexpr int kInvalidValue = 1;
  if (shared_bytes > most_shared_bytes(1)) return kInvalidValue;
  detail::run(name, blocks, threads, shared_bytes, [&] { kernel(arguments...); });
  return 0;
}

}  // namespace qkv::kernels::device
