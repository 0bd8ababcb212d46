#pragma once

#include "kernels/cpu/backward_tile.inc.h"
#include "kernels/cpu/block_rows.inc.h"
#include "kernels/cpu/key_sums.inc.h"
#include "kernels/cpu/non_finite.inc.h"
#include "kernels/cpu/tile_product.inc.h"

// What P and dS of a tile of rows and a block of keys (backward_tile.inc.h) add to the gradients:
//
//     dV += P dO          dK += dS Q            dQ += dSᵀ K
//
// and dK and dQ are multiplied by the scale in the end.
//
//     P, dS  keys [ rows -> ]   x   dO, Q  rows [ D -> ]     =   dV, dK  keys [ D -> ]
//     Kᵀ       D  [ keys -> ]   x   dS     keys [ rows -> ]  =   dQᵀ       D [ rows -> ]
//     or, of up to 48 rows, where that leaves fewer lanes empty (sums_query_by_rows):
//     dSᵀ   rows  [ keys -> ]   x   K      keys [ D -> ]     =   dQ     rows [ D -> ]

namespace qkv::kernels::QKV_ISA {

/// f(first column, vectors, rows summed together): a matrix with so many columns, whole vectors,
/// cut into what is multiplied at a time.
template <class T, class F>
QKV_INLINE void for_each_columns(int64_t width, F f) {
  using S = Simd<T>;
  constexpr int kMost = S::kOuterVectors, kHalf = (kMost + 2) / 2;
  int64_t d = 0;
  const auto columns = [&](auto vectors, auto together) __attribute__((always_inline)) {
    f(d, vectors, together);
    d += vectors() * S::kWidth;
  };
  int64_t left = width / S::kWidth;
  for (; left >= kMost && left != kMost + 1; left -= kMost) {
    columns(Constant<kMost>{}, Constant<S::kOuterRows>{});
  }
  // One vector alone would leave most registers empty.
  if (left == kMost + 1) {
    columns(Constant<kHalf>{}, Constant<rows_together<T, kHalf>()>{});
    left -= kHalf;
  }
  if (left == 3) columns(Constant<3>{}, Constant<rows_together<T, 3>()>{});
  if (left == 2) columns(Constant<2>{}, Constant<rows_together<T, 2>()>{});
  if (left == 1) columns(Constant<1>{}, Constant<rows_together<T, 1>()>{});
}

/// c[n][d] += sum over r < rows of a[n][r] · b[r][d]. Rows of c have `width` numbers, whole
/// vectors.
template <class T, int kRows, class Sum>
inline void multiply_add_rows(int64_t keys, int64_t rows, const T* a, const T* b, int64_t b_row,
                              int64_t width, Sums<Sum> c) {
  for_each_columns<T>(
      width, [&](int64_t d, auto vectors, auto together) __attribute__((always_inline)) {
        multiply_add<T, vectors(), together()>(keys, rows, a, kRows, UnitStride{}, b + d, b_row,
                                               c.from(0, d));
      });
}

template <class Scores, int kVectors>
class GradientProducts {
 public:
  using Work = BackwardTile<Scores, kVectors>;
  using T = typename Scores::Number;
  using S = Simd<T>;
  static constexpr int kRows = Work::kRows;

  static int64_t scratch_numbers(const Problem<T>& p) {
    const bool copies = !Scores::kInNumbers || (sums_query_by_rows(p) && !has_whole_vectors(p));
    const int64_t keys = copies ? kBackwardBlockKeys : 0;
    return (kRows + keys) * spread_row<T>(p.head_dim) + kRows * spread_row<T>(p.value_dim);
  }

  /// `work` is of the tile and the block.
  GradientProducts(const Work& work, T* scratch)
      : work_(work),
        p_(work.p),
        needs_key_(work.params.grad_key.data != nullptr),
        needs_value_(work.params.grad_value.data != nullptr),
        packed_query_(scratch),
        packed_grad_out_(scratch + kRows * spread_row<T>(p_.head_dim)),
        packed_key_(packed_grad_out_ + kRows * spread_row<T>(p_.value_dim)) {}

  /// Of a unit: those that `work` has are multiplied.
  static int64_t numbers_of_keys(const Problem<T>&, int64_t) { return 0; }
  void load_keys(KeyRange, T*) {}

  /// Of a tile whose rows `work` has loaded.
  void load_rows() {
    const Storage storage = p_.key_value_storage;
    if (needs_key_) {
      query_ = rows_of_tile(work_.tile, p_.query, storage, p_.head_dim, packed_query_);
    }
    if (needs_value_) {
      grad_out_ =
          rows_of_tile(work_.tile, work_.params.grad_out, storage, p_.value_dim, packed_grad_out_);
    }
    knows_finite_ = false;
  }

  /// The keys first_key .. first_key + count, which `work` has loaded.
  void load_block(int64_t first_key, int count, bool partial) {
    first_key_ = first_key;
    count_ = count;
    partial_ = partial;
  }

  /// Adds to dK and dV of the block's keys, unless there is nullptr.
  void add_to_keys(KeySums<T>* of_key, KeySums<T>* of_value) {
    const auto for_each_gradient = [&](auto add) __attribute__((always_inline)) {
      if (of_value != nullptr) add(work_.p_tile, grad_out_, *of_value);
      if (of_key != nullptr) add(work_.ds_tile, query_, *of_key);
    };
    if (partial_ && !rows_finite()) {
      for_each_gradient([&](const T* pairs, const Rows<T>& rows, KeySums<T>& sums) {
        multiply_add_kept_rows<T, kRows>(count_, work_.tile.rows, pairs, rows.first, rows.stride,
                                         work_.mask.bits, sums.width,
                                         sums.to_add_to(first_key_, first_key_ + count_));
      });
      return;
    }
    work_.seen.for_each_strip(count_, [&](KeyRange seen, int r, int rows_seen) {
      for_each_gradient([&](const T* pairs, const Rows<T>& rows, KeySums<T>& sums) {
        multiply_add_rows<T, kRows>(seen.end - seen.begin, rows_seen,
                                    pairs + seen.begin * kRows + r, rows.from(r).first, rows.stride,
                                    sums.width,
                                    sums.to_add_to(first_key_ + seen.begin, first_key_ + seen.end));
      });
    });
  }

  /// Adds to dQ of the tile, without the scale, or writes it if there is none yet.
  void add_to_rows(Sums<T> grad_query) {
    const Rows<T> key = numbers_of_key();
    const bool leaves_out = partial_ && !all_finite<T>(key.first, key.stride, count_, p_.head_dim);
    if constexpr (kVectors < kBackwardVectors) {
      if (work_.query_by_rows) {
        if (!leaves_out) return add_by_rows(key, grad_query);
        return multiply_add_kept_keys_by_rows<T, kRows>(work_.tile.rows, count_, p_.head_dim,
                                                        key.first, key.stride, work_.ds_tile,
                                                        work_.mask.bits, grad_query);
      }
    }
    if (leaves_out) {
      return multiply_add_kept_keys<T, kVectors>(count_, p_.head_dim, key.first, key.stride,
                                                 work_.ds_tile, work_.mask.bits, grad_query.first);
    }
    work_.seen.for_each_part([&](int first_vector, auto vectors, KeyRange seen) {
      const int64_t r = first_vector * S::kWidth;
      multiply_add<T, vectors()>(
          p_.head_dim, seen.end - seen.begin, key.first + seen.begin * key.stride, UnitStride{},
          key.stride, work_.ds_tile + seen.begin * kRows + r, kRows, grad_query.from(0, r));
    });
  }

 private:
  static bool has_whole_vectors(const Problem<T>& p) { return p.head_dim % S::kWidth == 0; }

  void add_by_rows(const Rows<T>& key, Sums<T> grad_query) const {
    work_.seen.for_each_rows([&](int r, int rows, KeyRange seen) {
      for_each_columns<T>(
          round_up_to_vector<T>(p_.head_dim), [&](int64_t d, auto vectors,
                                                  auto together) __attribute__((always_inline)) {
            multiply_add<T, vectors(), together()>(
                rows, seen.end - seen.begin, work_.ds_tile + seen.begin * kRows + r, UnitStride{},
                kRows, key.first + seen.begin * key.stride + d, key.stride, grad_query.from(r, d));
          });
    });
  }

  Rows<T> numbers_of_key() const {
    if constexpr (Scores::kInNumbers) {
      const Rows<T> key = spread_rows<T>(work_.key, count_, p_.head_dim, work_.key_rows);
      // A vector of columns must not reach beyond the last key of a tensor.
      const bool is_copy = key.first != work_.key.first || p_.key_value_storage != Storage::kSame;
      if (is_copy || has_whole_vectors(p_) || !work_.query_by_rows) return key;
      return copy_rows<T>(key.first, key.stride, count_, p_.head_dim, packed_key_);
    } else {
      return rows_of_block(work_.tile, p_.key, p_.key_value_storage, first_key_, count_,
                           p_.head_dim, packed_key_);
    }
  }

  bool rows_finite() {
    if (!knows_finite_) {
      const auto finite = [&](const Rows<T>& rows, int64_t width) {
        return all_finite<T>(rows.first, rows.stride, work_.tile.rows, width);
      };
      rows_finite_ = (!needs_key_ || finite(query_, p_.head_dim)) &&
                     (!needs_value_ || finite(grad_out_, p_.value_dim));
      knows_finite_ = true;
    }
    return rows_finite_;
  }

  const Work& work_;
  const Problem<T>& p_;
  bool needs_key_, needs_value_;
  T* packed_query_;     // [rows][D]
  T* packed_grad_out_;  // [rows][Dv]
  T* packed_key_;       // [keys][D], unless `work` has numbers that will do
  Rows<T> query_{}, grad_out_{};
  bool knows_finite_ = false, rows_finite_ = false;
  int64_t first_key_ = 0;  // of the block
  int count_ = 0;
  bool partial_ = false;
};

}  // namespace qkv::kernels::QKV_ISA
