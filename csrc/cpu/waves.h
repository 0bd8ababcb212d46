#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "cpu/units.h"

namespace qkv::cpu {

/// Units of work whose results are buffers, and units that sum what is in them, in waves. Threads
/// take one unit after the other from a single queue, so that none waits at the end of a wave:
///
///     fill 0 | fill 1 | sum 0 | fill 2 | sum 1 | ..
///
/// A sum waits for its wave to be filled, a wave for the one whose buffers it takes over: two waves
/// have buffers at a time. What a unit waits for has been taken before it, by this thread or by one
/// that waits for nothing later.
class Waves {
 public:
  /// in_order: a wave is filled when that before it is.
  explicit Waves(bool in_order) : in_order_(in_order) {}

  void add(int64_t fills, int64_t sums) {
    const int64_t wave = static_cast<int64_t>(waves_.size());
    waves_.push_back({fills, sums});
    queue(/*sums=*/false, wave, fills);
    if (wave > 0) queue(/*sums=*/true, wave - 1, waves_[wave - 1].sums);
  }

  /// fill(wave, unit, scratch) and sum(wave, unit, scratch) for all units that were added.
  template <class Fill, class Sum>
  void run(int64_t scratch_bytes, Workspace& workspace, const Fill& fill, const Sum& sum) {
    if (waves_.empty()) return;
    const int64_t last = static_cast<int64_t>(waves_.size()) - 1;
    queue(/*sums=*/true, last, waves_[last].sums);
    std::vector<std::atomic<int64_t>> filled(waves_.size()), summed(waves_.size());
    const auto wait = [](const std::atomic<int64_t>& done, int64_t all) {
      while (done.load(std::memory_order_acquire) < all) std::this_thread::yield();
    };
    const bool waits = waves_.size() > 1 || waves_[0].sums > 0;
    const auto work = [&](int64_t at, void* scratch) {
      const Stretch& stretch = stretch_of(at);
      const int64_t wave = stretch.wave, unit = at - stretch.begin;
      if (stretch.sums) {
        wait(filled[wave], waves_[wave].fills);
        sum(wave, unit, scratch);
        summed[wave].fetch_add(1, std::memory_order_release);
      } else {
        if (in_order_ && wave > 0) wait(filled[wave - 1], waves_[wave - 1].fills);
        if (wave > 1) wait(summed[wave - 2], waves_[wave - 2].sums);
        fill(wave, unit, scratch);
        if (waits) filled[wave].fetch_add(1, std::memory_order_release);
      }
    };
    // A thread that took several at a time could take a whole wave, and the others would wait for
    // it.
    for_each_unit(size_, scratch_bytes, workspace, work, /*one_by_one=*/waits);
  }

 private:
  struct Wave {
    int64_t fills, sums;
  };
  /// Units of one wave, side by side in the queue.
  struct Stretch {
    int64_t begin;
    bool sums;
    int64_t wave;
  };

  void queue(bool sums, int64_t wave, int64_t units) {
    if (units > 0) stretches_.push_back({size_, sums, wave});
    size_ += units;
  }

  const Stretch& stretch_of(int64_t at) const {
    const auto after =
        std::upper_bound(stretches_.begin(), stretches_.end(), at,
                         [](int64_t x, const Stretch& stretch) { return x < stretch.begin; });
    return *(after - 1);
  }

  bool in_order_;
  int64_t size_ = 0;
  std::vector<Wave> waves_;
  std::vector<Stretch> stretches_;
};

}  // namespace qkv::cpu
