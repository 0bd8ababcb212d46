#pragma once

#include "kernels/cpu/block_rows.inc.h"
#include "kernels/cpu/forward_tile.inc.h"
#include "kernels/cpu/non_finite.inc.h"
#include "kernels/cpu/tile_product.inc.h"
#include "kernels/cpu/weights_in_place.inc.h"

// The products of a forward tile in the numbers that the query is stored in. K and V are read where
// they lie, or, if they are stored in 16 bits, converted block by block:
//
//     S[keys][rows] = K · (scale · Qᵀ)        Oᵀ[Dv][rows] += Vᵀ · P

namespace qkv::kernels::QKV_ISA {

constexpr int kForwardVectors = 3;  // of rows in a tile

template <class T>
class ForwardSource
    : public WeightsInPlace<ForwardSource<T>, T, kForwardVectors * Simd<T>::kWidth> {
 public:
  using Real = T;
  static constexpr int kVectors = kForwardVectors;
  static constexpr int kRows = kVectors * Simd<T>::kWidth;
  static constexpr bool kRoundsWeights = false;
  static constexpr bool kTakesFewRows = true;

  /// Each tile for itself. With more tiles than these a copy of them in float32 is cheaper.
  static bool reads_16_bits(const Problem<T>& p) {
    return sizeof(T) == 4 && rows_of_kv_head(p) <= 4 * kRows;
  }

  static int64_t out_rows(const Problem<T>& p) { return p.value_dim; }

  /// Of a key/value head: nothing is.
  static int64_t prepared_bytes(const Problem<T>&) { return 0; }
  static void prepare(const Problem<T>&, const RowTile<1>&, void*) {}

  static int64_t own_bytes(const Problem<T>& p) {
    return p.head_dim * kRows * static_cast<int64_t>(sizeof(T));
  }
  static int64_t block_bytes(const Problem<T>& p) {
    const int64_t widest = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
    return kForwardBlockKeys * spread_row<T>(widest) * static_cast<int64_t>(sizeof(T));
  }

  ForwardSource(const ForwardParams<T>& params, const RowTile<kRows>& tile, void* own, void* block)
      : p_(params.problem),
        tile_(tile),
        query_t_(static_cast<T*>(own)),
        block_(static_cast<T*>(block)) {
    tile.pack_transposed(p_.query, p_.head_dim, p_.scale, query_t_);
  }

  template <int kVectors, class Finish>
  QKV_INLINE void scores(int64_t first_key, int keys, int first_row, Finish finish) const {
    const Rows<T> k = rows_of(p_.key, first_key, keys, p_.head_dim);
    multiply<T, kVectors>(keys, p_.head_dim, k.first, k.stride, UnitStride{}, query_t_ + first_row,
                          kRows, finish);
  }

  /// bits is nullptr if all pairs are kept.
  template <int kVectors>
  void add_values(int64_t first_key, int keys, int, const T* weights, const uint8_t* bits,
                  T* out_t) const {
    const Rows<T> v = spread_rows<T>(rows_of(p_.value, first_key, keys, p_.value_dim), keys,
                                     p_.value_dim, block_);
    if (bits != nullptr && !all_finite<T>(v.first, v.stride, keys, p_.value_dim)) {
      multiply_add_kept_keys<T, kVectors, kRows>(keys, p_.value_dim, v.first, v.stride, weights,
                                                 bits, out_t);
    } else {
      multiply_add<T, kVectors>(p_.value_dim, keys, v.first, UnitStride{}, v.stride, weights, kRows,
                                out_t, kRows);
    }
  }

 private:
  Rows<T> rows_of(const Operand<const T>& x, int64_t first_key, int keys, int64_t width) const {
    return rows_of_block(tile_, x, p_.key_value_storage, first_key, keys, width, block_);
  }

  const Problem<T>& p_;
  const RowTile<kRows>& tile_;
  T* query_t_;  // [D][rows], scale folded in
  T* block_;    // of keys or values, converted or spread
};

}  // namespace qkv::kernels::QKV_ISA
