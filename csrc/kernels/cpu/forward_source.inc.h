#pragma once

#include "kernels/cpu/few_rows.inc.h"
#include "kernels/cpu/forward_tile.inc.h"
#include "kernels/cpu/non_finite.inc.h"
#include "kernels/cpu/tile_product.inc.h"

// The products of a forward tile in the numbers that query, key and value are stored in. K and V
// are read where they lie:
//
//     S[keys][rows] = K · (scale · Qᵀ)        Oᵀ[Dv][rows] += Vᵀ · P

namespace qkv::kernels::QKV_ISA {

template <class T>
class ForwardSource {
 public:
  using Real = T;
  static constexpr int kRows = kForwardRows<T>;
  static constexpr bool kRoundsWeights = false;
  static constexpr bool kTakesFewRows = true;

  /// Few rows read K and V in place, whatever they are stored in.
  static bool reads_16_bits(const Problem<T>& p) {
    return sizeof(T) == 4 && rows_of_kv_head(p) <= kFewRows<T>;
  }

  static int64_t out_rows(const Problem<T>& p) { return p.value_dim; }

  /// Of a key/value head: nothing is.
  static int64_t prepared_bytes(const Problem<T>&) { return 0; }
  static void prepare(const Problem<T>&, const RowTile<1>&, void*) {}

  static int64_t scratch_bytes(const Problem<T>& p) {
    return p.head_dim * kRows * static_cast<int64_t>(sizeof(T));
  }

  ForwardSource(const ForwardParams<T>& params, const RowTile<kRows>& tile, void* scratch)
      : p_(params.problem),
        keys_(tile.keys_of_head(p_.key)),
        values_(tile.keys_of_head(p_.value)),
        query_t_(static_cast<T*>(scratch)) {
    tile.pack_transposed(p_.query, p_.head_dim, p_.scale, query_t_);
  }

  template <int kVectors, class Finish>
  QKV_INLINE void scores(int64_t first_key, int keys, int first_row, Finish finish) const {
    multiply<T, kVectors>(keys, p_.head_dim, keys_ + first_key * p_.key.row_stride,
                          p_.key.row_stride, UnitStride{}, query_t_ + first_row, kRows, finish);
  }

  /// bits is nullptr if all pairs are kept.
  template <int kVectors>
  void add_values(int64_t first_key, int keys, int, const T* weights, const uint8_t* bits,
                  T* out_t) const {
    const int64_t row = p_.value.row_stride;
    const T* values = values_ + first_key * row;
    if (bits != nullptr && !all_finite<T>(values, row, keys, p_.value_dim)) {
      multiply_add_kept_keys<T, kVectors, kRows>(keys, p_.value_dim, values, row, weights, bits,
                                                 out_t);
    } else {
      multiply_add<T, kVectors>(p_.value_dim, keys, values, UnitStride{}, row, weights, kRows,
                                out_t, kRows);
    }
  }

  /// Everything has been added already.
  void finish_values() const {}

 private:
  const Problem<T>& p_;
  const T* keys_;
  const T* values_;
  T* query_t_;  // [D][rows], scale folded in
};

}  // namespace qkv::kernels::QKV_ISA
