#pragma once

#include "kernels/cpu/head_gradient.inc.h"
#include "kernels/cpu/tangent_tile.inc.h"

// The derivative of attention along directions of its operands, one tile of query rows, in one
// pass over the keys (to P and S': tangent_tile.inc.h). W is the weight of the sink, R what dropout
// multiplies the weights with.
//
//     lse' = rowsum(P ∘ S') + W ∘ sink'
//     O'   = (R ∘ P ∘ S') V + (R ∘ P) V' - lse' ∘ O
//
// If P ∘ S' is rounded before it is multiplied, what it adds up to then takes the place of its sum
// before O: what all values have in common still moves nothing.
//
//              rows (lanes) ->                         for each block of keys:
//     P     keys [ ............ ]                       lse'  += columns' sums of P ∘ S'
//     P ∘ S' keys [ ............ ]  over S'             O'ᵀ   += Vᵀ · (R ∘ P ∘ S') + V'ᵀ · (R ∘ P)
//     O'ᵀ  Dv  [ ............ ]
//
// With all directions these are 5 products, where the forward has 2. What does not move costs none.

namespace qkv::kernels::QKV_ISA {

/// One unit of work is one tile of rows of one key/value head.
template <class Products, class T>
inline int64_t jvp_units(const JvpParams<T>& params) {
  const Problem<T>& p = params.problem;
  return p.batch * p.kv_heads * TangentTile<Products>::tiles_of_head(p);
}

template <class T>
inline TangentMatrices<T> matrices_of(const JvpParams<T>& params) {
  return {params.problem, params.directions, /*grad_out=*/nullptr};
}

/// Of one key/value head; 0 if nothing is prepared.
template <class Products, class T>
inline int64_t jvp_prepared_bytes(const JvpParams<T>& params) {
  return Products::prepared_bytes(matrices_of(params));
}

template <class Products, class T>
inline void prepare_jvp(const JvpParams<T>& params, int64_t head, void* prepared) {
  const Problem<T>& p = params.problem;
  const int64_t group = p.query_heads / p.kv_heads, kv_head = head % p.kv_heads;
  Products::prepare(matrices_of(params),
                    RowTile<Products::kRows>::make(p, head / p.kv_heads, kv_head, kv_head * group,
                                                   group, /*first_row=*/0),
                    static_cast<char*>(prepared) + head * jvp_prepared_bytes<Products>(params));
}

template <class Products, class T>
inline int64_t jvp_scratch_bytes(const JvpParams<T>& params) {
  using Work = TangentTile<Products>;
  const Problem<T>& p = params.problem;
  const int64_t numbers = Work::scratch_numbers(matrices_of(params), /*keys=*/{0, 0}) +
                          Products::sum_rows(p.value_dim) * Work::kRows;
  return numbers * static_cast<int64_t>(sizeof(T));
}

/// Tiles of a head run from the last to the first, as in the forward.
template <class Products, class T>
inline void attention_jvp(const JvpParams<T>& params, void* prepared, int64_t unit, void* scratch) {
  using S = Simd<T>;
  using Work = TangentTile<Products>;
  using Number = typename S::Number;
  const Problem<T>& p = params.problem;
  const Directions<T>& along = params.directions;
  const int64_t tiles = Work::tiles_of_head(p), group = p.query_heads / p.kv_heads;
  const int64_t head = unit / tiles, kv_head = head % p.kv_heads;
  const int64_t first_row = (tiles - 1 - unit % tiles) * Work::kRows;

  const int64_t prepared_bytes = jvp_prepared_bytes<Products>(params);
  void* of_head =
      prepared_bytes == 0 ? nullptr : static_cast<char*>(prepared) + head * prepared_bytes;
  Work work(matrices_of(params), along, params.lse, params.lse_rest, /*keys=*/{0, 0}, of_head,
            static_cast<T*>(scratch));
  work.tile =
      RowTile<Work::kRows>::make(p, head / p.kv_heads, kv_head, kv_head * group, group, first_row);
  const auto& tile = work.tile;
  T* out_t = work.end_of_scratch;  // [Dv][rows], without - lse' ∘ O
  set_to_zero(out_t, Products::sum_rows(p.value_dim) * Work::kRows);
  alignas(64) T lse_t[Work::kRows] = {};
  alignas(64) T rounded[Work::kRows] = {};  // sums of P ∘ S' as multiplied
  bool rounds = false;
  if constexpr (Products::kRoundsTiles) {
    rounds = work.products.rounds_tiles() && p.dropout.threshold == 0 && work.scores_move();
  }

  const auto weigh = [&](int at, int v, auto, auto dropped, Number weight, Number score_t)
      __attribute__((always_inline)) {
    const auto weighted = weight * score_t;
    T* sum = lse_t + v * S::kWidth;
    S::store(sum, S::load(sum) + weighted);
    S::store(work.p_tile + at, dropped(weight));
    S::store(work.scores_t + at, dropped(weighted));
  };

  const KeyRange range = work.keys_of_rows();
  const bool keys_move = work.scores_move() || along.value.data != nullptr;
  if (keys_move && !range.empty()) {
    work.load_rows();
    for (int64_t n = Products::first_key(range.begin); n < range.end; n += Work::kBlockKeys) {
      const int block =
          range.end - n < Work::kBlockKeys ? static_cast<int>(range.end - n) : Work::kBlockKeys;
      const TileState state = work.load_block(n, block);
      if (state == TileState::kEmpty) continue;
      work.for_each_pair(state, block, weigh);
      if constexpr (Products::kRoundsTiles) {
        if (work.scores_move()) work.products.add_to_rows(kValue, work.scores_t, out_t, rounded);
      } else {
        if (work.scores_move()) work.products.add_to_rows(kValue, work.scores_t, out_t);
      }
      if (along.value.data != nullptr) work.products.add_to_rows(kValueT, work.p_tile, out_t);
    }
  }

  for (int r = 0; r < tile.rows; ++r) {
    const int64_t scalar = tile.scalar(p, r);
    T of_out = rounds ? rounded[r] : lse_t[r];
    if (along.sinks.data != nullptr) {
      const T weight =
          sink_weight(tile.number_of_head(p.sinks, r), params.lse[scalar], params.lse_rest[scalar]);
      const T moved = weight * tile.number_of_head(along.sinks, r);
      lse_t[r] += moved;
      of_out += moved;
    }
    params.lse_t[scalar] = lse_t[r];
    const T* out = tile.row(params.out, r);
    T* to = tile.row(params.out_t, r);
    for (int64_t d = 0; d < p.value_dim; ++d) {
      to[d * params.out_t.column_stride] = out_t[d * Work::kRows + r] - of_out * out[d];
    }
  }
}

}  // namespace qkv::kernels::QKV_ISA
