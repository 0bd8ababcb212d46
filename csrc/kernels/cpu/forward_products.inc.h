#pragma once

#include "kernels/cpu/block_rows.inc.h"
#include "kernels/cpu/few_rows_of_numbers.inc.h"
#include "kernels/cpu/forward_tile.inc.h"
#include "kernels/cpu/non_finite.inc.h"
#include "kernels/cpu/tile_product.inc.h"
#include "kernels/cpu/values_in_lanes.inc.h"
#include "kernels/cpu/weights_in_place.inc.h"
#include "kernels/cpu/work_beside.inc.h"

// The products of a forward tile in float32 or float64. K and V are read where they lie; those
// stored in 16 bits are converted block by block, or once for all tiles that take turns, which also
// share copies of rows far apart (block_rows.inc.h); a tile of one vector of rows converts V in
// registers:
//
//     S[keys][rows] = K · (scale · Qᵀ)        Oᵀ[Dv][rows] += Vᵀ · P
//
// Processors may have an exponential of their own, Exp, and weigh scores beside products.

namespace qkv::kernels::QKV_ISA {

constexpr int kForwardVectors = 3;  // of rows in a tile

template <class T, class Exp = ExpOfNonpositive<T>, bool kBeside = false>
class ForwardProducts : public WeightsInPlace<ForwardProducts<T, Exp, kBeside>, T,
                                              kForwardVectors * Simd<T>::kWidth> {
 public:
  using Real = T;
  static constexpr int kVectors = kForwardVectors;
  static constexpr int kRows = kVectors * Simd<T>::kWidth;
  using Weigher = ExactWeigher<T, Exp>;
  static constexpr bool kScales = true;  // scores
  static constexpr bool kRoundsWeights = false;
  static constexpr bool kWeighsBeside = kBeside;  // products of scores
  static constexpr int kBlockKeys = kForwardBlockKeys;
  /// Up to so many rows of a head have kernels of their own (few_rows.inc.h).
  static constexpr int kFewRows = FewRowsOfNumbers<T, T>::kMostRows;

  static constexpr int64_t kBytesOfNumber = sizeof(T);  // as K and V are multiplied

  /// f(a number as stored, the products of few rows)
  template <class F>
  static void with_few_rows(Storage storage, F f) {
    with_stored<T>(storage,
                   [&](auto stored) { f(stored, FewRowsOfNumbers<T, decltype(stored)>{}); });
  }

  static int64_t out_rows(const Problem<T>& p) { return p.value_dim; }

  /// Of a key/value head: nothing is.
  static int64_t prepared_bytes(const Problem<T>&) { return 0; }
  static void prepare(const Problem<T>&, const RowTile<1>&, void*) {}

  static int64_t own_bytes(const Problem<T>& p) {
    return p.head_dim * kRows * static_cast<int64_t>(sizeof(T));
  }
  static int64_t block_bytes(const Problem<T>& p) {
    // Wider rows may lie less far apart.
    const int64_t key_row = spread_row<T>(p.head_dim), value_row = spread_row<T>(p.value_dim);
    const int64_t row = key_row > value_row ? key_row : value_row;
    return kBlockKeys * row * static_cast<int64_t>(sizeof(T));
  }

  /// K and V of the keys that tiles take in turn, converted or spread once for all.
  class Turn {
   public:
    /// Of so many keys, 0 if they are read where they lie.
    static int64_t bytes(const Problem<T>& p, int64_t keys) {
      const Storage storage = p.key_value_storage;
      if (!wants_copies<T>(p.key, storage) && !wants_copies<T>(p.value, storage)) return 0;
      const int64_t row = spread_row<T>(p.head_dim) + spread_row<T>(p.value_dim);
      return keys * row * static_cast<int64_t>(sizeof(T));
    }

    Turn(const ForwardParams<T>& params, int64_t, void* memory)
        : p_(params.problem), memory_(static_cast<T*>(memory)) {}

    void load(const RowTile<kRows>& tile, KeyRange keys) {
      const int64_t count = keys.end - keys.begin;
      const Storage storage = p_.key_value_storage;
      keys_ = keys;
      key_ = copies_of_rows(tile, p_.key, storage, keys.begin, count, p_.head_dim, memory_);
      value_ = copies_of_rows(tile, p_.value, storage, keys.begin, count, p_.value_dim,
                              memory_ + count * spread_row<T>(p_.head_dim));
    }

    bool has(int64_t first_key, int keys) const {
      return keys_.begin <= first_key && first_key + keys <= keys_.end;
    }
    Rows<T> key(int64_t first_key) const { return key_.from(first_key - keys_.begin); }
    Rows<T> value(int64_t first_key) const { return value_.from(first_key - keys_.begin); }

   private:
    const Problem<T>& p_;
    T* memory_;
    KeyRange keys_{0, 0};
    Rows<T> key_{}, value_{};
  };

  ForwardProducts(const ForwardParams<T>& params, const RowTile<kRows>& tile, const Turn& turn,
                  void* own, void* block)
      : p_(params.problem),
        tile_(tile),
        turn_(turn),
        query_t_(static_cast<T*>(own)),
        block_(static_cast<T*>(block)) {
    tile.pack_transposed(p_.query, p_.head_dim, p_.scale, query_t_, p_.key_value_storage);
  }

  template <int kVectors, class Finish>
  QKV_INLINE void scores(int64_t first_key, int keys, int first_row, Finish finish) const {
    const Rows<T> k = key(first_key, keys);
    multiply<T, kVectors>(keys, p_.head_dim, k.first, k.stride, UnitStride{}, query_t_ + first_row,
                          kRows, few_at_a_time(finish));
  }

  /// Weights of scores, while those of the next keys are multiplied (work_beside.inc.h), of a
  /// multiple of kMostRowsBeside keys: see(x) gets the scores of a few keys before they are
  /// weighed.
  template <int kVectors, class See, class Weigh>
  QKV_INLINE void weights_beside(int64_t first_key, int keys, int first_row, T* weights, See see,
                                 Weigh weigh) const {
    const Rows<T> rows = key(first_key, keys);
    product_with_work<T, kVectors>(
        keys, p_.head_dim, rows.first, rows.stride, query_t_ + first_row, kRows,
        see, [&](int64_t k, auto vector, auto& x) __attribute__((always_inline)) {
          weigh(k, vector, x);
          T* to = weights + k * kRows + vector() * Simd<T>::kWidth;
          Simd<T>::store(to, x[0]);
          Simd<T>::store(to + kRows, x[1]);
        });
  }

  /// bits is nullptr if all pairs are kept.
  template <int kVectors>
  void add_values(int64_t first_key, int keys, int, const T* weights, const uint8_t* bits,
                  Sums<T> out_t) const {
    if (takes_values_in_lanes<T, kVectors>(keys, p_.value_dim) && bits == nullptr &&
        p_.key_value_storage != Storage::kSame && !turn_.has(first_key, keys)) {
      add_stored_values(first_key, keys, weights, out_t);
      return;
    }
    const Rows<T> stored = turn_.has(first_key, keys)
                               ? turn_.value(first_key)
                               : rows_of(p_.value, first_key, keys, p_.value_dim);
    const Rows<T> v = spread_rows<T>(stored, keys, p_.value_dim, block_);
    if (bits != nullptr && !all_finite<T>(v.first, v.stride, keys, p_.value_dim)) {
      if (!out_t.has_any) set_to_zero(out_t.first, out_rows(p_) * kRows);
      multiply_add_kept_keys<T, kVectors, kRows>(keys, p_.value_dim, v.first, v.stride, weights,
                                                 bits, out_t.first);
    } else {
      multiply_add<T, kVectors>(p_.value_dim, keys, v.first, UnitStride{}, v.stride, weights, kRows,
                                out_t);
    }
  }

 private:
  Rows<T> key(int64_t first_key, int keys) const {
    return turn_.has(first_key, keys) ? turn_.key(first_key)
                                      : rows_of(p_.key, first_key, keys, p_.head_dim);
  }

  /// Of one vector of rows.
  void add_stored_values(int64_t first_key, int keys, const T* weights, Sums<T> out_t) const {
    const int64_t stride = p_.value.row_stride;
    with_stored<T>(p_.key_value_storage, [&](auto stored) {
      using Stored = decltype(stored);
      if constexpr (sizeof(Stored) < sizeof(T)) {
        const Stored* values =
            tile_.template stored_keys_of_head<Stored>(p_.value) + first_key * stride;
        add_values_in_lanes<T>(p_.value_dim, keys, values, stride, weights, kRows, out_t);
      }
    });
  }

  Rows<T> rows_of(const Operand<const T>& x, int64_t first_key, int keys, int64_t width) const {
    return rows_of_block(tile_, x, p_.key_value_storage, first_key, keys, width, block_);
  }

  const Problem<T>& p_;
  const RowTile<kRows>& tile_;
  const Turn& turn_;
  T* query_t_;  // [D][rows], scale folded in
  T* block_;    // of keys or values, converted or spread
};

}  // namespace qkv::kernels::QKV_ISA
