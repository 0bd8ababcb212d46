#pragma once

#include "kernels/cpu/isa.h"
#include "kernels/cpu/weights_of_few_rows.inc.h"
#include "kernels/cpu/weights_tile.inc.h"

// How the weights are cut into units of work: tiles of query rows, with all their keys.

namespace qkv::kernels::QKV_ISA {

template <class Products, class T>
inline int64_t weights_units(const Problem<T>& p) {
  return p.batch * p.kv_heads * RowTile<Products::kRows>::count_of_head(p);
}

template <class Products, class T>
inline int64_t weights_scratch_bytes(const Problem<T>& p) {
  if (are_few_rows(p, Products::kFewRows)) return weights_of_few_rows_bytes(p, Products::kFewRows);
  return WeightsTile<Products>::bytes(p);
}

/// Tiles of a head run from the last to the first, as in a forward.
template <class Products, class T>
inline void attention_weights(const WeightsParams<T>& params, int64_t unit, void* scratch) {
  const Problem<T>& p = params.forward.problem;
  if constexpr (Products::kFewRows > 0) {
    if (are_few_rows(p, Products::kFewRows)) {
      const auto tile = RowTile<Simd<T>::kWidth>::of_head(p, unit, 0);
      Products::with_few_rows(p.key_value_storage, [&](auto stored, auto products) {
        with_row_count<decltype(products)>(tile.rows, [&](auto rows) {
          WeightsOfFewRows<decltype(products), T, decltype(stored), rows()>(
              params, tile, static_cast<T*>(scratch))
              .run();
        });
      });
      return;
    }
  }
  const int64_t tiles = RowTile<Products::kRows>::count_of_head(p);
  const auto tile = RowTile<Products::kRows>::of_head(p, unit / tiles, tiles - 1 - unit % tiles);
  const typename Products::Turn none(params.forward, 0, scratch);
  WeightsTile<Products>(params, tile, none, scratch).run();
}

}  // namespace qkv::kernels::QKV_ISA
