#pragma once

#include <cmath>

#include "cuda_emulation/device.h"

// kernels/cuda/tensor_cores.cuh on the emulated device, where each is described. A lane's part of a
// product is computed from what the other lanes hold, so that one that comes with something else
// than its share is seen in the result.

namespace qkv::kernels::device {

/// When a copy that goes on beside a thread is carried out: at the first moment that it may be, or
/// at the last, to show who does not wait for it.
enum class Copies { kAtOnce, kWhenWaitedFor };
void set_copies(Copies copies);

/// What the device has; at first no tensor cores, and one multiprocessor.
void set_tensor_cores(bool has);
bool has_tensor_cores();
void set_multiprocessors(int count);
int multiprocessors();

void copy_async(void* to, const void* from, bool exist);
void wait_for_copies();

namespace detail {

/// x of every lane of the warp, by its number; it stays as it is until all have left it.
template <class T>
class OfLanes {
 public:
  explicit OfLanes(const T& x) : x_(x) {
    const uint64_t* addresses = exchange(reinterpret_cast<uintptr_t>(&x_));
    for (int lane = 0; lane < kWarp; ++lane) {
      of_lane_[lane] = reinterpret_cast<const T*>(static_cast<uintptr_t>(addresses[lane]));
    }
  }
  ~OfLanes() { exchange(0); }
  OfLanes(const OfLanes&) = delete;
  OfLanes& operator=(const OfLanes&) = delete;

  const T& operator[](int lane) const { return *of_lane_[lane]; }

 private:
  const T x_;
  const T* of_lane_[kWarp];
};

template <class Element>
float number_of(uint32_t word, int i) {
  return Element{static_cast<uint16_t>(word >> 16 * i)};
}

/// What float32 has no room for is cut off, as tensor cores do it.
inline float cut_off(double x) {
  float y = static_cast<float>(x);
  if (std::fabs(static_cast<double>(y)) <= std::fabs(x) || !std::isfinite(x)) return y;
  uint32_t word;
  memcpy(&word, &y, sizeof(y));
  --word;
  memcpy(&y, &word, sizeof(y));
  return y;
}

}  // namespace detail

template <class Element>
void multiply_add(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4], const Element*) {
  struct Fragments {
    float a[4][2], b[2][2];
  } own;
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 4; ++i) own.a[i][half] = detail::number_of<Element>(a[i], half);
    own.b[0][half] = detail::number_of<Element>(b0, half);
    own.b[1][half] = detail::number_of<Element>(b1, half);
  }
  const detail::OfLanes<Fragments> lanes(own);
  const int lane = thread() % kWarp;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int beside = k % 8 / 2;
      sum += static_cast<double>(lanes[row % 8 * 4 + beside].a[row / 8 + k / 8 * 2][k % 2]) *
             lanes[column * 4 + beside].b[k / 8][k % 2];
    }
    c[i] = detail::cut_off(sum);
  }
}

/// Numbers of more bits than tf32 has are taken for NaN: what a device does with them is not known.
inline void multiply_add(const float (&a)[4], float b0, float b1, float (&c)[4]) {
  struct Fragments {
    float a[4], b[2];
  } own{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const auto unless_more_bits = [](float& x) {
    uint32_t word;
    memcpy(&word, &x, sizeof(x));
    if ((word & 0x1fff) != 0) x = NAN;
  };
  for (float& x : own.a) unless_more_bits(x);
  for (float& x : own.b) unless_more_bits(x);
  const detail::OfLanes<Fragments> lanes(own);
  const int lane = thread() % kWarp;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = c[i];
    for (int k = 0; k < 8; ++k) {
      sum += static_cast<double>(lanes[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2]) *
             lanes[column * 4 + k % 4].b[k / 4];
    }
    c[i] = detail::cut_off(sum);
  }
}

inline float rounded_to_tf32(float x) {
  uint32_t word;
  memcpy(&word, &x, sizeof(x));
  if (std::isfinite(x)) word += 0x1000;
  word &= 0xffffe000;
  memcpy(&x, &word, sizeof(x));
  return x;
}

template <class Element>
uint32_t rounded_pair(float first, float second, const Element*) {
  return Element::rounded(first).bits | static_cast<uint32_t>(Element::rounded(second).bits) << 16;
}

template <bool kTransposed, class Element>
void load_matrices(const Element* row, uint32_t (&x)[4]) {
  detail::check_alignment(row, 16);
  const detail::OfLanes<const Element*> rows(row);
  const int lane = thread() % kWarp;
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t numbers[2] = {};
    for (int i = 0; i < 2; ++i) {
      const int along = lane % 4 * 2 + i;
      const Element* from =
          kTransposed ? rows[matrix * 8 + along] + lane / 4 : rows[matrix * 8 + lane / 4] + along;
      if (detail::check_shared<false>(from, sizeof(Element))) memcpy(&numbers[i], from, 2);
    }
    x[matrix] = numbers[0] | static_cast<uint32_t>(numbers[1]) << 16;
  }
}

inline float approximate_exp(float x) { return expf(x); }

}  // namespace qkv::kernels::device
