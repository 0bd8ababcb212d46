#pragma once

#include "kernels/cuda/simt/product.cuh"
#include "kernels/cuda/simt/weights.cuh"

// S', the derivative of the scores along directions Q', K', mask', slope' of the operands (a prime
// is a derivative along them): the common part of forward mode and second order.
//
//     U  = scale · Q Kᵀ                  S  = f(U)  + mask  - slope  · dist         f = softcap
//     U' = scale · (Q' Kᵀ + Q K'ᵀ)       S' = f'(U) U' + mask' - slope' · dist
//
// With t = tanh(U / c): f'(U) = 1 - t², and its own derivative is f''(U) U' = -2/c · t (1 - t²) U'.

namespace qkv::kernels::simt {

/// Scores of one batch element that move.
template <class T>
class MovingScores : public Scores<T> {
 public:
  QKV_DEVICE MovingScores(const Problem<T>& problem, const Directions<T>& along, int64_t batch)
      : Scores<T>(problem, batch),
        p_(problem),
        along_(along),
        mask_t_(batch_offset(problem, batch, along.attn_mask.batch_stride)),
        slopes_t_(along.alibi_slopes.data +
                  batch_offset(problem, batch, along.alibi_slopes.batch_stride)) {}

  /// S' of a pair that is kept, from its U'.
  QKV_DEVICE T derivative(const RowTile& rows, const KeptPair<T>& x, T product_t) const {
    T score_t = cap_slope(x) * product_t;
    const int64_t head = device::load_shared(rows.head + x.r);
    if (along_.attn_mask.data != nullptr) {
      const int64_t at = mask_t_ + head * along_.attn_mask.head_stride +
                         device::load_shared(rows.query + x.r) * along_.attn_mask.row_stride +
                         x.key * along_.attn_mask.column_stride;
      score_t += mask_number<T>(p_.attn_mask.type, along_.attn_mask.data, at);
    }
    if (along_.alibi_slopes.data != nullptr) {
      const T slope_t = device::load_global(slopes_t_ + head * along_.alibi_slopes.head_stride);
      score_t -= slope_t * this->distance(rows, x.r, x.key);
    }
    return score_t;
  }

  /// f'(U), and its derivative f''(U) U'.
  QKV_DEVICE T cap_slope(const KeptPair<T>& x) const { return T(1) - x.cap * x.cap; }
  QKV_DEVICE T cap_slope_t(const KeptPair<T>& x, T product_t) const {
    if (p_.softcap == T(0)) return T(0);
    return T(-2) / p_.softcap * x.cap * (cap_slope(x) * product_t);
  }

 private:
  const Problem<T>& p_;
  const Directions<T>& along_;
  int64_t mask_t_;  // offset of the batch element in mask'
  const T* slopes_t_;
};

/// Whether there is an S'.
template <class T>
QKV_DEVICE bool scores_move(const Directions<T>& along) {
  return along.query.data != nullptr || along.key.data != nullptr ||
         along.attn_mask.data != nullptr || along.alibi_slopes.data != nullptr;
}

/// How many terms products with what moves have: none, if it stays.
struct MovingDepths {
  int64_t query;    // D or 0: of Q'Kᵀ
  int64_t key;      // D or 0: of Q K'ᵀ
  int64_t value;    // Dv or 0: of dO V'ᵀ
  int64_t weights;  // Dv or 0: of dO Vᵀ, which is multiplied with P'

  template <class T>
  static QKV_DEVICE MovingDepths of(const Problem<T>& p, const Directions<T>& along) {
    return {along.query.data != nullptr ? p.head_dim : 0,
            along.key.data != nullptr ? p.head_dim : 0,
            along.value.data != nullptr ? p.value_dim : 0,
            scores_move(along) || along.sinks.data != nullptr ? p.value_dim : 0};
  }
};

/// Columns of one operand, then those of another with the same factor.
template <class Operand>
struct SideBySide {
  using Stored = typename Operand::Stored;

  const Operand& first;
  const Operand& second;
  int64_t width;  // of the first

  QKV_DEVICE Place<Stored> place(int row, int64_t column) const {
    return column < width ? first.place(row, column) : second.place(row, column - width);
  }

  QKV_DEVICE Real<Stored> scaled(Real<Stored> x) const { return first.scaled(x); }

  template <int kCount>
  QKV_DEVICE bool lies_in_pieces(int64_t columns) const {
    return first.template lies_in_pieces<kCount>(width) &&
           second.template lies_in_pieces<kCount>(columns - width);
  }
};

/// A side of a product and its direction: Q and Q', K and K', V and V'.
template <class Operand>
struct Moving {
  Operand operand;
  Operand direction;

  QKV_DEVICE SideBySide<Operand> operand_first(int64_t width) const {
    return {operand, direction, width};
  }
  QKV_DEVICE SideBySide<Operand> direction_first(int64_t width) const {
    return {direction, operand, width};
  }
};

/// K and K', or V and V', of a key/value head, and a tile of them.
template <class Element, class T>
QKV_DEVICE Moving<TileKeys<Element>> moving_keys(const Problem<T>& p, const Operand<const T>& x,
                                                 const Operand<const T>& x_t, int64_t batch,
                                                 int64_t kv_head) {
  return {TileKeys<Element>::of_head(p, x, batch, kv_head),
          TileKeys<Element>::of_head(p, x_t, batch, kv_head)};
}
template <class Element>
QKV_DEVICE Moving<TileKeys<Element>> tile_of(const Moving<TileKeys<Element>>& keys, int64_t first,
                                             int count) {
  return {keys.operand.tile(first, count), keys.direction.tile(first, count)};
}

/// Pairs to other registers.
template <class T>
QKV_DEVICE void assign_pairs(const T (&from)[kLeastOwn][kOthersOfThread],
                             T (&to)[kLeastOwn][kOthersOfThread]) {
#pragma unroll
  for (int i = 0; i < kLeastOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOthersOfThread; ++j) to[i][j] = from[i][j];
  }
}

// Products come in twos, with an operand and with its direction, in loops that are not unrolled:
// products are most of a kernel's code, and of the time that it takes to compile.

/// s = U and s_t = U'. That is one product too, [Q' Q] [K K']ᵀ; what stays has no terms in it.
template <bool kOwnsKeys, class Element, class T>
QKV_DEVICE void multiply_scores(const Moving<TileRows<Element>>& query,
                                const Moving<TileKeys<Element>>& key, int64_t head_dim,
                                const MovingDepths& depth, Stages<T> stages,
                                T (&s)[kLeastOwn][kOthersOfThread],
                                T (&s_t)[kLeastOwn][kOthersOfThread]) {
#pragma unroll 1
  for (int moved = 0; moved < 2; ++moved) {
    const auto rows = query.direction_first(moved ? depth.query : 0);
    const auto keys = key.operand_first(moved ? depth.query : head_dim);
    const int64_t terms = moved ? depth.query + depth.key : head_dim;
    if constexpr (kOwnsKeys) {
      multiply_pairs<kLeastOwn>(keys, rows, terms, stages, s_t);
    } else {
      multiply_pairs<kLeastOwn>(rows, keys, terms, stages, s_t);
    }
    if (!moved) assign_pairs(s_t, s);
  }
}

/// g = dO Vᵀ and g_t = dO V'ᵀ.
template <bool kOwnsKeys, class Element, class T>
QKV_DEVICE void multiply_grad_out(const TileRows<Element>& grad_out,
                                  const Moving<TileKeys<Element>>& value, const MovingDepths& depth,
                                  Stages<T> stages, T (&g)[kLeastOwn][kOthersOfThread],
                                  T (&g_t)[kLeastOwn][kOthersOfThread]) {
#pragma unroll 1
  for (int moved = 0; moved < 2; ++moved) {
    const int64_t terms = moved ? depth.value : depth.weights;
    const auto keys = value.operand_first(moved ? 0 : terms);
    if constexpr (kOwnsKeys) {
      multiply_pairs<kLeastOwn>(keys, grad_out, terms, stages, g_t);
    } else {
      multiply_pairs<kLeastOwn>(grad_out, keys, terms, stages, g_t);
    }
    if (!moved) assign_pairs(g_t, g);
  }
}

/// c += a · operand + a_of_direction · direction, each only if it is asked for. Overwrites a.
template <int kColumns, class Operand, class T>
QKV_DEVICE void multiply_moving_columns(const OwnTile<T>& tile, bool with_operand,
                                        T (&a)[kLeastOwn][kOthersOfThread], bool with_direction,
                                        const T (&a_of_direction)[kLeastOwn][kOthersOfThread],
                                        const Moving<Operand>& b, int others, int64_t first_column,
                                        int64_t columns, Stages<T> stages,
                                        T (&c)[kLeastOwn][kColumns]) {
#pragma unroll 1
  for (int moved = with_operand ? 0 : 1; moved < (with_direction ? 2 : 1); ++moved) {
    if (moved) assign_pairs(a_of_direction, a);
    store_pairs(a, tile.numbers);
    multiply_columns(tile, b.operand_first(moved ? 0 : columns), others, first_column, columns,
                     stages, c);
  }
}

}  // namespace qkv::kernels::simt
