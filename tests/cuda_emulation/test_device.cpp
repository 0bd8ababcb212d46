// The emulated device finds the faults it is there to find, planted one a kernel.

#include <gtest/gtest.h>

#define QKV_ISA emulated
#include "cuda_emulation/tensor_cores.h"
#include "kernels/half.h"

namespace {

namespace device = qkv::kernels::device;
using device::FaultKind;

constexpr int kThreads = 64;

struct Memory {
  float numbers[kThreads];
  Memory() {
    device::poison(numbers, sizeof(numbers));
    device::register_memory(numbers, sizeof(numbers));
  }
  ~Memory() { device::unregister_memory(numbers); }
};

float* shared() { return reinterpret_cast<float*>(device::shared_memory()); }

/// Every fault that a kernel causes.
template <class Kernel>
std::vector<device::Fault> faults_of(Kernel kernel, float* numbers, int64_t blocks = 1) {
  device::take_faults();
  device::launch("planted", kernel, blocks, kThreads, kThreads * sizeof(float), nullptr, numbers);
  return device::take_faults();
}

template <class Kernel>
void expect_only(FaultKind kind, Kernel kernel, float* numbers) {
  const auto faults = faults_of(kernel, numbers);
  ASSERT_FALSE(faults.empty());
  for (const auto& fault : faults) EXPECT_EQ(fault.kind, kind) << fault.text();
}

TEST(EmulatedDevice, RunsEveryThreadOfEveryBlock) {
  Memory memory;
  const auto kernel = [](float* numbers) {
    const int t = device::thread();
    device::store_shared(shared() + t, static_cast<float>(t));
    device::barrier();
    const float neighbour = device::load_shared(shared() + (t + 1) % kThreads);
    const float partner = device::shuffle_xor(static_cast<float>(t), 1);
    const bool any = device::barrier_or(t == 17);
    if (device::block() == device::blocks() - 1) {
      device::store_global(numbers + t, neighbour + 100.0f * partner + (any ? 0.5f : 0.0f));
    }
  };
  for (const auto order : {device::Order::kForward, device::Order::kBackward}) {
    device::set_order(order);
    for (const auto& fault : faults_of(kernel, memory.numbers, 3)) ADD_FAILURE() << fault.text();
    for (int t = 0; t < kThreads; ++t) {
      EXPECT_EQ(memory.numbers[t], (t + 1) % kThreads + 100.0f * (t ^ 1) + 0.5f);
    }
  }
  device::set_order(device::Order::kForward);
}

TEST(EmulatedDevice, FindsAccessesOutsideOfGlobalMemory) {
  Memory memory;
  expect_only(
      FaultKind::kOutOfBounds,
      [](float* numbers) { device::store_global(numbers + device::thread() + 1, 1.0f); },
      memory.numbers);
  expect_only(
      FaultKind::kOutOfBounds, [](float* numbers) { (void)device::load_global(numbers - 1); },
      memory.numbers);
}

TEST(EmulatedDevice, FindsAccessesOutsideOfSharedMemory) {
  Memory memory;
  expect_only(
      FaultKind::kOutOfBounds,
      [](float*) { device::store_shared(shared() + device::thread() + 1, 1.0f); }, memory.numbers);
}

TEST(EmulatedDevice, FindsReadsOfWhatNobodyWrote) {
  Memory memory;
  expect_only(
      FaultKind::kUninitialised,
      [](float* numbers) { (void)device::load_global(numbers + device::thread()); },
      memory.numbers);
  expect_only(
      FaultKind::kUninitialised,
      [](float*) { (void)device::load_shared(shared() + device::thread()); }, memory.numbers);
}

TEST(EmulatedDevice, FindsRacesBetweenBarriers) {
  Memory memory;
  const auto write_then_read = [](float*) {
    device::store_shared(shared() + device::thread(), 1.0f);
    (void)device::load_shared(shared() + (device::thread() + 1) % kThreads);
  };
  const auto read_then_write = [](float*) {
    device::store_shared(shared() + device::thread(), 1.0f);
    device::barrier();
    (void)device::load_shared(shared() + (device::thread() + 1) % kThreads);
    device::store_shared(shared() + device::thread(), 2.0f);
  };
  const auto both_write = [](float*) { device::store_shared(shared(), 1.0f); };
  for (const auto order : {device::Order::kForward, device::Order::kBackward}) {
    device::set_order(order);
    for (const auto& kernel : {+write_then_read, +read_then_write, +both_write}) {
      const auto faults = faults_of(kernel, memory.numbers);
      int races = 0;
      for (const auto& fault : faults) {
        races += fault.kind == FaultKind::kRace;
        EXPECT_NE(fault.thread, fault.other_thread) << fault.text();
      }
      EXPECT_GT(races, 0);
    }
  }
  device::set_order(device::Order::kForward);
}

TEST(EmulatedDevice, FindsBarriersThatNotAllComeTo) {
  Memory memory;
  expect_only(
      FaultKind::kDeadlock,
      [](float*) {
        if (device::thread() != 5) device::barrier();
      },
      memory.numbers);
  expect_only(
      FaultKind::kDeadlock,
      [](float*) {
        if (device::thread() % 32 != 3) (void)device::shuffle_xor(1.0f, 1);
      },
      memory.numbers);
}

TEST(EmulatedDevice, FindsMisalignedVectors) {
  Memory memory;
  expect_only(
      FaultKind::kMisaligned,
      [](float*) {
        const float four[4] = {1.0f, 2.0f, 3.0f, 4.0f};
        if (device::thread() == 0) device::store_shared<4>(shared() + 1, four);
      },
      memory.numbers);
}

/// Numbers that products keep apart: of A the row and the column, of B one for each column.
TEST(EmulatedDevice, MultipliesTilesAsTensorCoresDo) {
  using Element = qkv::kernels::emulated::Float16;
  Memory memory;
  const auto kernel = [](float* numbers) {
    const int lane = device::thread() % 32, row = lane / 4, column = lane % 4 * 2;
    const Element* type = nullptr;
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) {  // A[r][k] = r + k / 32
      const float r = row + i % 2 * 8, k = column + i / 2 * 8;
      a[i] = device::rounded_pair(r + k / 32, r + (k + 1) / 32, type);
    }
    uint32_t b[2];
    for (int i = 0; i < 2; ++i) {  // B[k][n] = 1 where k = n + 3
      const int k = column + i * 8;
      b[i] = device::rounded_pair(k == row + 3, k + 1 == row + 3, type);
    }
    float c[4] = {100.0f, 100.0f, 100.0f, 100.0f};
    device::multiply_add(a, b[0], b[1], c, type);
    for (int i = 0; i < 4; ++i) {
      const float r = row + i / 2 * 8, n = column + i % 2;
      if (c[i] != 100.0f + r + (n + 3) / 32) device::store_global(numbers, 1.0f);
    }
  };
  memory.numbers[0] = 0.0f;
  for (const auto& fault : faults_of(kernel, memory.numbers)) ADD_FAILURE() << fault.text();
  EXPECT_EQ(memory.numbers[0], 0.0f);
}

TEST(EmulatedDevice, LoadsMatricesAsTheyAreAndTransposed) {
  using Element = qkv::kernels::emulated::Float16;
  Memory memory;
  const auto kernel = [](float* numbers) {
    // The first warp only: four matrices of 8 x 8 need 512 bytes. [m][r][c] = 64 · m + 8 · r + c
    auto* elements = reinterpret_cast<uint16_t*>(device::shared_memory());
    const int lane = device::thread();
    if (lane < 32) {
      uint32_t words[4];
      for (int i = 0; i < 4; ++i) words[i] = (lane * 8 + 2 * i) | (lane * 8 + 2 * i + 1) << 16;
      device::store_shared(reinterpret_cast<uint32_t*>(elements) + lane * 4, words);
    }
    device::barrier();
    if (lane >= 32) return;
    const auto* row = reinterpret_cast<const Element*>(elements) + lane * 8;
    uint32_t x[4], transposed[4];
    device::load_matrices<false>(row, x);
    device::load_matrices<true>(row, transposed);
    for (uint32_t m = 0; m < 4; ++m) {
      const uint32_t r = lane / 4, c = lane % 4 * 2;
      const uint32_t along = 64 * m + 8 * r + c, across = 64 * m + 8 * c + r;
      const bool right =
          x[m] == (along | (along + 1) << 16) && transposed[m] == (across | (across + 8) << 16);
      if (!right) device::store_global(numbers, 1.0f);
    }
  };
  memory.numbers[0] = 0.0f;
  device::launch("planted", kernel, 1, kThreads, 512, nullptr, &memory.numbers[0]);
  for (const auto& fault : device::take_faults()) ADD_FAILURE() << fault.text();
  EXPECT_EQ(memory.numbers[0], 0.0f);
}

/// Read after a barrier, but not waited for: seen where copies come at the last moment. Waited for,
/// but read without a barrier: seen anyway.
TEST(EmulatedDevice, FindsCopiesThatNobodyWaitsFor) {
  alignas(16) float from[kThreads] = {};
  device::register_memory(from, sizeof(from));
  const auto copy = [](float* numbers, bool waits, bool meets) {
    if (device::thread() % 4 == 0) {
      device::copy_async(shared() + device::thread(), numbers + device::thread(), true);
    }
    if (waits) device::wait_for_copies();
    if (meets) device::barrier();
    (void)device::load_shared(shared() + device::thread());
  };
  const auto right = [copy](float* numbers) { copy(numbers, true, true); };
  const auto not_waited = [copy](float* numbers) { copy(numbers, false, true); };
  const auto not_met = [copy](float* numbers) { copy(numbers, true, false); };
  for (const auto copies : {device::Copies::kAtOnce, device::Copies::kWhenWaitedFor}) {
    device::set_copies(copies);
    EXPECT_TRUE(faults_of(right, from).empty());
    expect_only(FaultKind::kRace, not_met, from);
  }
  expect_only(FaultKind::kUninitialised, not_waited, from);
  device::set_copies(device::Copies::kAtOnce);
  device::unregister_memory(from);
}

TEST(EmulatedDevice, SaysWhereAFaultIs) {
  Memory memory;
  const auto faults = faults_of(
      [](float* numbers) {
        if (device::block() == 2 && device::thread() == 7) {
          device::store_global(numbers + kThreads, 1.0f);
        }
      },
      memory.numbers, 4);
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_EQ(faults[0].kernel, "planted");
  EXPECT_EQ(faults[0].block, 2);
  EXPECT_EQ(faults[0].thread, 7);
  EXPECT_EQ(faults[0].address, reinterpret_cast<uint64_t>(memory.numbers + kThreads));
  EXPECT_NE(faults[0].text().find("out of bounds in kernel planted, block 2, thread 7"),
            std::string::npos)
      << faults[0].text();
}

}  // namespace
