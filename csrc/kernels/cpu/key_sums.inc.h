#pragma once

#include "kernels/band.h"
#include "kernels/cpu/block_rows.inc.h"
#include "kernels/cpu/math.inc.h"
#include "kernels/cpu/next_rows.inc.h"
#include "kernels/cpu/row_tile.inc.h"

// The gradient of some keys of a head, or of their values, while tiles of rows add to it. Its rows
// are whole vectors: where the gradient has such rows, it is summed up there, else in scratch.

namespace qkv::kernels::QKV_ISA {

template <class T, class Stored>
QKV_ONE_COPY void write_rows(const T* from, int64_t from_row, int64_t rows, int64_t width,
                             Stored* to, const Operand<T>& operand) {
  using S = Simd<T>;
  for (int64_t n = 0; n < rows; ++n, from += from_row, to += operand.row_stride) {
    int64_t d = 0;
    for (; d + S::kWidth <= width; d += S::kWidth) store_rounded<T>(to + d, S::load(from + d));
    if (d < width) store_first<T>(to + d, S::load(from + d), width - d);
  }
}

/// Sums [keys][from_row] of some keys of a head to where a gradient with `columns` has them,
/// rounded if it is stored in 16 bits.
template <class T>
inline void write_rows_of_keys(const Problem<T>& p, int64_t head, KeyRange keys, int64_t columns,
                               const T* from, int64_t from_row, const Operand<T>& gradient) {
  const auto tile = RowTile<1>::of_head(p, head, 0);
  with_stored<T>(p.key_value_storage, [&](auto stored) {
    auto* of_head = tile.template stored_keys_of_head<decltype(stored)>(gradient);
    write_rows(from, from_row, keys.end - keys.begin, columns,
               of_head + keys.begin * gradient.row_stride, gradient);
  });
}

template <class T>
class KeySums {
 public:
  int64_t width;  // of a row, whole vectors
  int64_t row;    // numbers from one to the next

  KeySums() = default;

  /// `columns` are those of the gradient, which is `scale` times the sums; `scratch` has room for
  /// all rows.
  KeySums(const Problem<T>& p, int64_t head, KeyRange keys, int64_t columns, T scale,
          const Operand<T>& gradient, T* scratch)
      : width(round_up_to_vector<T>(columns)),
        row(width),
        p_(&p),
        head_(head),
        keys_(keys),
        columns_(columns),
        scale_(scale),
        gradient_(&gradient),
        first_(scratch),
        begun_(keys.begin) {
    in_place_ = gradient.data != nullptr && p.key_value_storage == Storage::kSame &&
                columns == width && !shares_sets<T>(gradient.row_stride);
    if (!in_place_) return;
    row = gradient.row_stride;
    first_ = RowTile<1>::of_head(p, head, 0).keys_of_head(gradient) + keys.begin * row;
  }

  /// Those of the keys begin .. end, all of which the caller adds to now. If nothing was added to
  /// any of them before, they are left to be written; else new ones become zeros.
  Sums<T> to_add_to(int64_t begin, int64_t end) {
    const bool all_new = begin >= begun_;
    clear_up_to(all_new ? begin : end);
    if (begun_ < end) begun_ = end;
    return {first_ + (begin - keys_.begin) * row, row, !all_new};
  }

  /// Where those of the keys begin .. end lie.
  NextRows rows(int64_t begin, int64_t end) const {
    constexpr int64_t kBytes = sizeof(T);
    return {reinterpret_cast<const char*>(first_ + (begin - keys_.begin) * row), row * kBytes,
            width * kBytes, end - begin};
  }

  /// To the gradient, unless they are there.
  void write() {
    clear_up_to(keys_.end);
    if (scale_ != T(1)) multiply_by_scale();
    if (!in_place_) write_rows_of_keys(*p_, head_, keys_, columns_, first_, row, *gradient_);
  }

 private:
  void multiply_by_scale() {
    using S = Simd<T>;
    const auto scale = S::set(scale_);
    for (int64_t n = 0; n < keys_.end - keys_.begin; ++n) {
      T* line = first_ + n * row;
      for (int64_t d = 0; d < width; d += S::kWidth) S::store(line + d, S::load(line + d) * scale);
    }
  }

  void clear_up_to(int64_t end) {
    for (; begun_ < end; ++begun_) set_to_zero(first_ + (begun_ - keys_.begin) * row, width);
  }

  const Problem<T>* p_;
  int64_t head_;
  KeyRange keys_;
  int64_t columns_;
  T scale_;
  const Operand<T>* gradient_;
  T* first_;
  int64_t begun_;  // up to this key there are sums
  bool in_place_;
};

}  // namespace qkv::kernels::QKV_ISA
