#include "cuda_emulation/tensor_cores.h"

#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#define QKV_ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define QKV_ADDRESS_SANITIZER
#endif
#endif
#if defined(QKV_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif

namespace qkv::kernels::device {

namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kFaultsKept = 100;
constexpr uint16_t kPoison = 0xffa5;

/// What is known of one 4-byte word of shared memory since the last barrier.
struct SharedWord {
  int16_t writer = -1;
  int16_t reader = -1;   // one of them
  bool written = false;  // ever
  bool more_readers = false;
};

enum class Waiting { kNo, kBarrier, kShuffle, kDone };

/// 16 bytes on their way to shared memory.
struct Copy {
  void* to;
  const void* from;  // nullptr: zeros
};

struct Fiber {
  ucontext_t start;
  jmp_buf context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool started = false;
  Waiting waiting = Waiting::kNo;
  bool vote = false;
  uint64_t offered = 0;
  std::vector<Copy> copies;  // that were begun and not waited for
};

/// Never destroyed: tensors are freed when the program ends.
std::mutex& memory_mutex = *new std::mutex;
std::map<uintptr_t, size_t>& memory = *new std::map<uintptr_t, size_t>;  // begin -> bytes
std::vector<Fault> faults;
std::vector<std::string> launches;
Order order = Order::kForward;
int64_t largest_grid = INT64_MAX;
int64_t bytes_of_multiprocessor = kBytesOfMultiprocessor;
Copies copies = Copies::kAtOnce;
bool tensor_cores = false;
int multiprocessor_count = 1;

/// The device: there is one, and it runs one kernel at a time.
struct Device {
  const char* kernel = "";
  const std::function<void()>* body = nullptr;
  int threads = 0;
  int64_t blocks = 0;
  int64_t block = 0;
  int current = 0;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<int> block_order;  // of threads
  std::vector<uint64_t> exchanged;
  bool vote = false;
  jmp_buf scheduler;
  std::vector<char> shared;
  std::vector<SharedWord> words;
  // The allocation that was touched last.
  uintptr_t begin = 0, end = 0;
#if defined(QKV_ADDRESS_SANITIZER)
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
#endif
} device;

void report(FaultKind kind, uint64_t address, bool shared, int other_thread = -1) {
  if (faults.size() >= kFaultsKept) return;
  faults.push_back(
      {kind, device.kernel, device.block, device.current, other_thread, address, shared});
}

bool is_poison(const void* address, size_t bytes) {
  if (bytes % 2 != 0 || reinterpret_cast<uintptr_t>(address) % 2 != 0) {
    // A single byte of a mask: a5 and ff are neither true nor false.
    const auto byte = *static_cast<const uint8_t*>(address);
    return bytes == 1 && (byte == (kPoison & 0xff) || byte == kPoison >> 8);
  }
  for (size_t i = 0; i < bytes; i += 2) {
    uint16_t x;
    memcpy(&x, static_cast<const char*>(address) + i, 2);
    if (x != kPoison) return false;
  }
  return true;
}

void to_scheduler(bool last) {
  Fiber& fiber = *device.fibers[device.current];
#if defined(QKV_ADDRESS_SANITIZER)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack, device.scheduler_stack,
                                 device.scheduler_stack_bytes);
#endif
  if (last || _setjmp(fiber.context) == 0) _longjmp(device.scheduler, 1);
#if defined(QKV_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

void fiber_main() {
#if defined(QKV_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(nullptr, &device.scheduler_stack, &device.scheduler_stack_bytes);
#endif
  (*device.body)();
  device.fibers[device.current]->waiting = Waiting::kDone;
  to_scheduler(true);
}

void resume(int thread) {
  Fiber& fiber = *device.fibers[thread];
  device.current = thread;
#if defined(QKV_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(&device.scheduler_fake_stack, fiber.stack.get(), kStackBytes);
#endif
  if (_setjmp(device.scheduler) == 0) {
    if (fiber.started) _longjmp(fiber.context, 1);
    fiber.started = true;
    setcontext(&fiber.start);
  }
#if defined(QKV_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(device.scheduler_fake_stack, nullptr, nullptr);
#endif
}

void prepare(int threads) {
  while (static_cast<int>(device.fibers.size()) < threads) {
    device.fibers.push_back(std::make_unique<Fiber>());
  }
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = *device.fibers[t];
    fiber.started = false;
    fiber.waiting = Waiting::kNo;
    fiber.copies.clear();
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
  }
}

bool all_of_block(Waiting waiting) {
  for (int t = 0; t < device.threads; ++t) {
    if (device.fibers[t]->waiting != waiting) return false;
  }
  return true;
}

bool all_of_warp(int first, Waiting waiting) {
  const int end = std::min(first + kWarp, device.threads);
  for (int t = first; t < end; ++t) {
    if (device.fibers[t]->waiting != waiting) return false;
  }
  return true;
}

void forget_accesses() {
  for (SharedWord& word : device.words) {
    word.writer = word.reader = -1;
    word.more_readers = false;
  }
}

void run_block() {
  prepare(device.threads);
  std::fill(device.words.begin(), device.words.end(), SharedWord());
  // Words are poison too, for what reads them in spite of a fault.
  std::fill(device.shared.begin(), device.shared.end(), static_cast<char>(0xa5));
  for (;;) {
    for (int t : device.block_order) {
      if (device.fibers[t]->waiting == Waiting::kNo) resume(t);
    }
    // Nobody can go on by himself. Warps whose lanes have all come to a shuffle do.
    bool goes_on = false;
    for (int first = 0; first < device.threads; first += kWarp) {
      if (!all_of_warp(first, Waiting::kShuffle)) continue;
      const int end = std::min(first + kWarp, device.threads);
      for (int t = first; t < end; ++t) {
        device.exchanged[t] = device.fibers[t]->offered;
        device.fibers[t]->waiting = Waiting::kNo;
      }
      goes_on = true;
    }
    if (goes_on) continue;
    if (all_of_block(Waiting::kDone)) return;
    if (all_of_block(Waiting::kBarrier)) {
      device.vote = false;
      for (int t = 0; t < device.threads; ++t) {
        device.vote |= device.fibers[t]->vote;
        device.fibers[t]->waiting = Waiting::kNo;
      }
      forget_accesses();
      continue;
    }
    for (int t = 0; t < device.threads; ++t) {
      if (device.fibers[t]->waiting == Waiting::kDone) continue;
      device.current = t;  // the first that waits in vain
      report(FaultKind::kDeadlock, 0, true);
      break;
    }
    return;  // fibers are started anew with the next block
  }
}

}  // namespace

std::string Fault::text() const {
  static const char* const kNames[] = {"access out of bounds", "read of what nobody wrote",
                                       "misaligned access", "race", "deadlock"};
  char where[64];
  snprintf(where, sizeof(where), shared ? "shared memory + %llu" : "address 0x%llx",
           static_cast<unsigned long long>(address));
  std::string text = std::string(kNames[static_cast<int>(kind)]) + " in kernel " + kernel +
                     ", block " + std::to_string(block) + ", thread " + std::to_string(thread);
  if (other_thread >= 0) text += " and thread " + std::to_string(other_thread);
  return text + ", " + where;
}

std::vector<Fault> take_faults() { return std::exchange(faults, {}); }

std::vector<std::string> take_launches() { return std::exchange(launches, {}); }

void register_memory(void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  memory[reinterpret_cast<uintptr_t>(data)] = bytes;
}

void unregister_memory(void* data) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  memory.erase(reinterpret_cast<uintptr_t>(data));
  device.begin = device.end = 0;
}

void poison(void* data, size_t bytes) {
  constexpr uint64_t kPoisons = kPoison * uint64_t(0x0001000100010001);
  for (size_t i = 0; i < bytes; i += sizeof(kPoisons)) {
    memcpy(static_cast<char*>(data) + i, &kPoisons, std::min(bytes - i, sizeof(kPoisons)));
  }
}

void set_order(Order new_order) { order = new_order; }

void set_largest_grid(int64_t blocks) { largest_grid = blocks; }

void set_bytes_of_multiprocessor(int64_t bytes) { bytes_of_multiprocessor = bytes; }
int64_t most_shared_bytes(int blocks) { return bytes_of_multiprocessor / blocks; }

void set_copies(Copies new_copies) { copies = new_copies; }
void set_tensor_cores(bool has) { tensor_cores = has; }
bool has_tensor_cores() { return tensor_cores; }
void set_multiprocessors(int count) { multiprocessor_count = count; }
int multiprocessors() { return multiprocessor_count; }

int thread() { return device.current; }
int64_t block() { return device.block; }
int64_t blocks() { return device.blocks; }

bool barrier_or(bool x) {
  Fiber& fiber = *device.fibers[device.current];
  fiber.vote = x;
  fiber.waiting = Waiting::kBarrier;
  to_scheduler(false);
  return device.vote;
}

void barrier() { barrier_or(false); }

char* shared_memory() { return device.shared.data(); }

void copy_async(void* to, const void* from, bool exist) {
  detail::check_alignment(to, 16);
  detail::check_alignment(from, 16);
  device.fibers[device.current]->copies.push_back({to, exist ? from : nullptr});
  if (copies == Copies::kAtOnce) wait_for_copies();
}

void wait_for_copies() {
  static const char kZeros[16] = {};
  Fiber& fiber = *device.fibers[device.current];
  for (const auto& [to, from] : std::exchange(fiber.copies, {})) {
    const bool reads = from == nullptr || detail::check_global(from, 16, false);
    if (!detail::check_shared<true>(to, 16) || !reads) continue;
    memcpy(to, from != nullptr ? from : kZeros, 16);
  }
}

namespace detail {

void report_misaligned(const void* address) {
  report(FaultKind::kMisaligned, reinterpret_cast<uintptr_t>(address), false);
}

bool check_global(const void* pointer, size_t bytes, bool write) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address < device.begin || address + bytes > device.end) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto after = memory.upper_bound(address);
    if (after == memory.begin() ||
        address + bytes > std::prev(after)->first + std::prev(after)->second) {
      report(FaultKind::kOutOfBounds, address, false);
      return false;
    }
    device.begin = std::prev(after)->first;
    device.end = device.begin + std::prev(after)->second;
  }
  // Of a vector each word.
  const size_t word = bytes > 8 ? 4 : bytes;
  for (size_t i = 0; i < bytes && !write; i += word) {
    if (!is_poison(static_cast<const char*>(pointer) + i, word)) continue;
    report(FaultKind::kUninitialised, address + i, false);
    break;
  }
  return true;
}

template <bool kWrite>
bool check_shared(const void* pointer, size_t bytes) {
  const auto* address = static_cast<const char*>(pointer);
  const ptrdiff_t offset = address - device.shared.data();
  if (offset < 0 || offset + bytes > device.shared.size()) {
    report(FaultKind::kOutOfBounds, static_cast<uint64_t>(offset), true);
    return false;
  }
  const auto me = static_cast<int16_t>(device.current);
  for (size_t w = offset / 4; w <= (offset + bytes - 1) / 4; ++w) {
    SharedWord& word = device.words[w];
    if constexpr (kWrite) {
      if (word.writer >= 0 && word.writer != me) {
        report(FaultKind::kRace, w * 4, true, word.writer);
      } else if (word.reader >= 0 && (word.reader != me || word.more_readers)) {
        report(FaultKind::kRace, w * 4, true, word.reader);
      }
      word.writer = me;
      word.written = true;
    } else {
      if (!word.written) {
        report(FaultKind::kUninitialised, w * 4, true);
      } else if (word.writer >= 0 && word.writer != me) {
        report(FaultKind::kRace, w * 4, true, word.writer);
      }
      if (word.reader >= 0 && word.reader != me) word.more_readers = true;
      word.reader = me;
    }
  }
  return true;
}

template bool check_shared<false>(const void*, size_t);
template bool check_shared<true>(const void*, size_t);

const uint64_t* exchange(uint64_t x) {
  Fiber& fiber = *device.fibers[device.current];
  fiber.offered = x;
  fiber.waiting = Waiting::kShuffle;
  to_scheduler(false);
  return &device.exchanged[device.current / kWarp * kWarp];
}

void run(const char* name, int64_t blocks, int threads, int64_t shared_bytes,
         const std::function<void()>& thread_body) {
  device.kernel = name;
  launches.emplace_back(name);
  device.body = &thread_body;
  device.threads = threads;
  device.blocks = std::min(blocks, largest_grid);
  device.exchanged.resize(threads);
  // Of the size that was asked for and no byte more, at an address as the device's is.
  device.shared.resize(shared_bytes);
  device.shared.shrink_to_fit();
  device.words.assign((shared_bytes + 3) / 4, SharedWord());
  device.block_order.resize(threads);
  for (int t = 0; t < threads; ++t) {
    device.block_order[t] = order == Order::kForward ? t : threads - 1 - t;
  }
  for (int64_t b = 0; b < device.blocks; ++b) {
    device.block = order == Order::kForward ? b : device.blocks - 1 - b;
    run_block();
  }
}

}  // namespace detail

}  // namespace qkv::kernels::device
