#pragma once

#include "kernels/cpu/backward_ahead.inc.h"
#include "kernels/cpu/backward_rows.inc.h"
#include "kernels/cpu/score_products.inc.h"
#include "kernels/cpu/seen_keys.inc.h"
#include "kernels/cpu/work_beside.inc.h"

// P and dS of one tile of rows and one block of keys, recomputed from lse: the common part of the
// backward kernel and of the mask's gradient. S and dP are multiplied here, what follows is
// backward_rows.inc.h's, or happens beside these products.
//
//              rows (lanes) ->
//     Qᵀ   D  [ ............ ]
//     dOᵀ Dv  [ ............ ]
//     P  keys [ ............ ]
//     dS keys [ ............ ]

namespace qkv::kernels::QKV_ISA {

// A tile has 6 vectors of rows: the longer it is, the less often dK and dV are loaded and stored.
// Few rows take a tile of 1, 2 or 3.
constexpr int kBackwardVectors = 6;

/// Vectors of rows in a tile: a function of the number of rows alone.
template <class T>
inline int backward_vectors(const Problem<T>& problem) {
  const int64_t vectors = round_up_to_vector<T>(rows_of_kv_head(problem)) / Simd<T>::kWidth;
  return vectors <= 3 ? static_cast<int>(vectors) : kBackwardVectors;
}

template <class T>
inline int64_t backward_row_tiles(const Problem<T>& problem) {
  const int64_t rows_of_tile = backward_vectors(problem) * Simd<T>::kWidth;
  return (rows_of_kv_head(problem) + rows_of_tile - 1) / rows_of_tile;
}

/// How dQ of a tile is summed: dQᵀ[D][rows], or, where a head has few rows, dQ[rows][D], in several
/// whole vectors of columns, if an eighth fewer lanes are left empty so. Each sum is the same.
template <class T>
inline bool sums_query_by_rows(const Problem<T>& p) {
  if (p.head_dim < 2 * Simd<T>::kWidth) return false;
  const int64_t rows = rows_of_kv_head(p), vectors = backward_vectors(p);
  return vectors < kBackwardVectors &&
         8 * rows * round_up_to_vector<T>(p.head_dim) <= 7 * p.head_dim * vectors * Simd<T>::kWidth;
}

/// Numbers of dQ of a tile.
template <class T>
inline int64_t grad_query_size(const Problem<T>& p) {
  return sums_query_by_rows(p) ? rows_of_kv_head(p) * round_up_to_vector<T>(p.head_dim)
                               : p.head_dim * backward_vectors(p) * Simd<T>::kWidth;
}

/// Calls f with the number of vectors in a tile of this problem.
template <class T, class F>
inline void with_backward_vectors(const Problem<T>& problem, F f) {
  switch (backward_vectors(problem)) {
    case 1:
      return f(Constant<1>{});
    case 2:
      return f(Constant<2>{});
    case 3:
      return f(Constant<3>{});
    default:
      return f(Constant<kBackwardVectors>{});
  }
}

/// Whether something sums all of dS of a tile, not only what products take.
template <class T>
inline bool needs_whole_tile(const BackwardParams<T>& params) {
  return params.problem.softcap != T(0) || params.slope_gradient_of_rows != nullptr ||
         params.grad_mask.data != nullptr;
}

/// multiply_lines, which fetches what comes next: the same for tiles of any height.
template <int kVectors, bool kScaled, bool kOfWeights = false, class T, class Factor>
QKV_ONE_COPY void multiply_block(int64_t keys, int64_t depth, Rows<Factor> lines,
                                 const Factor* columns, int64_t row, T scale, T* c,
                                 BackwardAhead& ahead) {
  multiply_lines<kVectors, kScaled>(
      keys, depth, lines, columns, row, /*add=*/false, scale,
      c, [&]() __attribute__((always_inline)) { ahead.fetch_next<kOfWeights>(); });
}

/// What one tile of rows and one block of keys need, in both backward kernels.
template <class Scores, int kVectors>
struct BackwardTile : BackwardRows<typename Scores::Number, kVectors> {
  using T = typename Scores::Number;
  using Factor = typename Scores::Factor;
  using Base = BackwardRows<T, kVectors>;
  using Base::alibi, Base::kRows, Base::mask, Base::p, Base::params, Base::stays, Base::tile;
  using S = Simd<T>;
  Factor* query_t;                     // [D][rows]
  Factor* grad_out_t;                  // [Dv][rows]
  T* p_tile;                           // [keys][rows], R ∘ P
  T* ds_tile;                          // [keys][rows]
  T* cap_tile;                         // [keys][rows], the derivative of the softcap
  T* key_rows;                         // [keys][D], converted or spread
  Factor* key_lines;                   // [keys][D], copied: in the same place
  Factor* value_lines;                 // [keys][Dv], copied
  Rows<Factor> key_factors;            // of the block
  Rows<Factor> value_factors;          // of the block
  Rows<T> key;                         // of the block, if factors are numbers
  T* score_gradients = nullptr;        // dS of all keys that the rows see, if it is made before
  KeyRange copied{0, 0};               // keys that load_keys made copies of
  Rows<T> copied_keys, copied_values;  // from copied.begin on
  BackwardAhead ahead;                 // of the tile and the block
  T* end_of_scratch;
  bool whole;                  // nothing is left out: all of P and dS is written
  bool query_by_rows;          // how dQ is summed
  SeenKeys<T, kVectors> seen;  // of the block

  static int64_t scratch_numbers(const Problem<T>& p) {
    const int64_t tiles = p.softcap != T(0) ? 4 : 3;
    return Scores::column_factors(p.head_dim, kRows) + Scores::column_factors(p.value_dim, kRows) +
           (tiles * kBackwardBlockKeys + kBackwardBlockKeys / 8) * kRows +
           kBackwardBlockKeys * (spread_row<T>(p.head_dim) + spread_row<T>(p.value_dim));
  }

  BackwardTile(const BackwardParams<T>& backward, T* scratch, bool whole_tile = true)
      : Base(backward), whole(whole_tile), query_by_rows(sums_query_by_rows(p)) {
    static_assert(sizeof(Factor) == sizeof(T));
    query_t = reinterpret_cast<Factor*>(scratch);
    grad_out_t = query_t + Scores::column_factors(p.head_dim, kRows);
    p_tile = scratch + Scores::column_factors(p.head_dim, kRows) +
             Scores::column_factors(p.value_dim, kRows);
    ds_tile = p_tile + kBackwardBlockKeys * kRows;
    mask.bias = ds_tile + kBackwardBlockKeys * kRows;
    cap_tile = mask.bias + kBackwardBlockKeys * kRows;
    key_rows = p.softcap != T(0) ? cap_tile + kBackwardBlockKeys * kRows : cap_tile;
    key_lines = reinterpret_cast<Factor*>(key_rows);
    T* lines = key_rows + kBackwardBlockKeys * spread_row<T>(p.head_dim);
    value_lines = reinterpret_cast<Factor*>(lines);
    lines += kBackwardBlockKeys * spread_row<T>(p.value_dim);
    mask.bits = reinterpret_cast<uint8_t*>(lines);
    stays = mask.bits + kBackwardBlockKeys / 8 * kRows;
    end_of_scratch = scratch + scratch_numbers(p);
    // Fixed-point gradients read it with dS, of which alone they make something then.
    if (params.grad_weights.data != nullptr) set_to_zero(p_tile, kBackwardBlockKeys * kRows);
  }

  /// Of copies of so many keys and their values, if they are multiplied in numbers and several
  /// tiles of rows would convert or spread them each.
  static int64_t numbers_of_copies(const Problem<T>& p, int64_t count) {
    const Storage storage = p.key_value_storage;
    const bool wanted = wants_copies<T>(p.key, storage) || wants_copies<T>(p.value, storage);
    const bool has_several = rows_of_kv_head(p) > kBackwardVectors * S::kWidth;
    if (!Scores::kInNumbers || !wanted || !has_several) return 0;
    return count * (spread_row<T>(p.head_dim) + spread_row<T>(p.value_dim));
  }

  /// Copies those of `keys` that any row sees to `to`, if there are numbers_of_copies.
  QKV_ONE_COPY void load_keys(KeyRange keys, T* to) {
    keys = keys_to_copy(p).intersection(keys);
    if (keys.empty()) return;
    const int64_t count = keys.end - keys.begin;
    if (numbers_of_copies(p, count) == 0) return;
    const Storage storage = p.key_value_storage;
    copied = keys;
    copied_keys = copies_of_rows(tile, p.key, storage, keys.begin, count, p.head_dim, to);
    copied_values = copies_of_rows(tile, p.value, storage, keys.begin, count, p.value_dim,
                                   to + count * spread_row<T>(p.head_dim));
  }

  QKV_ONE_COPY void load_rows() {
    const Storage storage = p.key_value_storage;
    const int lanes = whole ? kRows : static_cast<int>(round_up_to_vector<T>(tile.rows));
    Scores::pack_columns(tile, p.query, p.head_dim, p.scale, storage, query_t, lanes);
    Scores::pack_columns(tile, params.grad_out, p.value_dim, T(1), storage, grad_out_t, lanes);
    with_stored<T>(storage, [&](auto stored) {
      using Stored = decltype(stored);
      const auto grad_out = tile.template stored_rows_in<Stored>(params.grad_out),
                 out = tile.template stored_rows_in<Stored>(params.out),
                 out_rest = tile.template stored_rows_in<Stored>(params.out_rest);
      Base::load_numbers(
          [&](int r) { return dot_with_exact<T>(grad_out[r], out[r], out_rest[r], p.value_dim); });
    });
  }

  /// P and dS of the keys first_key .. first_key + count, or dS alone.
  QKV_ONE_COPY TileState load_block(int64_t first_key, int count) {
    const TileState state = see_block(first_key, count);
    if (state == TileState::kEmpty) return state;
    load_lines(first_key, count);
    if (score_gradients != nullptr) {
      ds_tile = of_key(score_gradients, first_key);
      return state;
    }
    seen.for_each_piece(count, [&](int first_vector, auto vectors, KeyRange keys) {
      load_piece<vectors()>(first_vector, first_key, keys, state == TileState::kPartial);
    });
    return state;
  }

  /// Of all keys that the rows see: P to `score_gradients`, dW to `grads`; <dW, P> of each row is
  /// added to dots.
  QKV_ONE_COPY void load_weights(int64_t first_key, int count, T* grads, T* dots) {
    const TileState state = see_block(first_key, count);
    if (state == TileState::kEmpty) return;
    load_lines(first_key, count);
    const KeyRange next{first_key + count, first_key + count + kBackwardBlockKeys};
    ahead.begin_weights(params, tile, next.intersection(Base::keys_of_rows()));
    alignas(64) T of_block[kRows] = {};
    seen.for_each_piece(count, [&](int first_vector, auto vectors, KeyRange keys) {
      load_weights_of_piece<vectors()>(first_vector, first_key, keys, state == TileState::kPartial,
                                       grads, of_block);
    });
    for (int r = 0; r < kRows; ++r) dots[r] += of_block[r];
  }

  /// Then these become dS.
  QKV_ONE_COPY void weights_backward(int64_t first_key, int count, const T* grads) {
    const TileState state = see_block(first_key, count);
    if (state == TileState::kEmpty) return;
    seen.for_each_piece(count, [&](int first_vector, auto vectors, KeyRange keys) {
      const int64_t row = first_vector * S::kWidth, key = first_key + keys.begin;
      Base::template weights_backward<vectors()>(
          static_cast<int>(keys.begin), static_cast<int>(keys.end - keys.begin), first_vector,
          state == TileState::kPartial, of_key(grads, key) + row,
          of_key(score_gradients, key) + row);
    });
  }

  void add_slope_gradient(int64_t first_key, int count, T* sums) const {
    Base::template add_slope_gradient<kVectors>(first_key, count, ds_tile, sums);
  }

  void through_softcap(TileState state, int count) {
    Base::template through_softcap<kVectors>(0, count, 0, state == TileState::kPartial, cap_tile,
                                             ds_tile);
  }

 private:
  /// Which pairs of the block there are.
  TileState see_block(int64_t first_key, int count) {
    const TileState state = Base::load_pairs(first_key, count);
    if (state == TileState::kPartial && !whole) {
      seen.see_by_band(p, tile, first_key, count);
    } else if (state != TileState::kEmpty) {
      seen.see_all(tile, count, whole);
    }
    return state;
  }

  /// What the block's products take of the keys.
  void load_lines(int64_t first_key, int count) {
    const bool has_copies = copied.begin <= first_key && first_key + count <= copied.end;
    const int64_t of_copies = first_key - copied.begin;
    const auto lines_of = [&](const Operand<const T>& x, int64_t width, const Rows<T>& copies,
                              Factor* to) {
      if constexpr (Scores::kInNumbers) {
        if (has_copies) return copies.from(of_copies);
      }
      return Scores::lines(tile, x, p.key_value_storage, first_key, count, width, to);
    };
    key_factors = lines_of(p.key, p.head_dim, copied_keys, key_lines);
    value_factors = lines_of(p.value, p.value_dim, copied_values, value_lines);
    if constexpr (Scores::kInNumbers) key = key_factors;
  }

  /// Of numbers of all keys that the rows see: those from `key` on.
  template <class Number>
  Number* of_key(Number* numbers, int64_t key) const {
    return numbers + (key - first_of_eight(Base::keys_of_rows().begin)) * kRows;
  }

  template <int kCount>
  void load_weights_of_piece(int first_vector, int64_t first_key, KeyRange range, bool partial,
                             T* grads, T* dots) {
    const int count = static_cast<int>(range.end - range.begin),
              first_row = first_vector * S::kWidth, offset = static_cast<int>(range.begin);
    T* const to = of_key(score_gradients, first_key + range.begin) + first_row;
    grads = of_key(grads, first_key + range.begin) + first_row;
    if (!make_weights_beside<kCount>(first_row, range, partial, to)) {
      multiply_block<kCount, /*kScaled=*/!Scores::kScales, /*kOfWeights=*/true>(
          count, Scores::depth(p.head_dim), key_factors.from(range.begin), query_t + first_row,
          kRows, p.scale, to, ahead);
      Base::template to_weights<kCount, typename Scores::Exp>(first_key, offset, count,
                                                              first_vector, to);
    }
    Base::template load_grad_weights<kCount>(first_key + range.begin, count, first_vector, grads);
    Base::template add_dots<kCount>(offset, count, first_vector, partial, to, grads, dots);
  }

  template <int kCount>
  void load_piece(int first_vector, int64_t first_key, KeyRange range, bool partial) {
    const int count = static_cast<int>(range.end - range.begin),
              first_row = first_vector * S::kWidth;
    const int64_t first = range.begin * kRows + first_row;
    const bool of_weights = params.grad_weights.data != nullptr;
    if (of_weights) {
      Base::template load_grad_weights<kCount>(first_key + range.begin, count, first_vector,
                                               ds_tile + first);
    }
    if constexpr (Scores::kWeighsBeside) {
      if (!of_weights && weighs_beside(count, partial)) {
        return weigh_beside<kCount>(first_row, range.begin, count, p_tile + first, ds_tile + first);
      }
    }
    multiply_block<kCount, /*kScaled=*/!Scores::kScales>(
        count, Scores::depth(p.head_dim), key_factors.from(range.begin), query_t + first_row, kRows,
        p.scale, p_tile + first, ahead);
    if (!of_weights) {
      multiply_block<kCount, /*kScaled=*/false>(
          count, Scores::depth(p.value_dim), value_factors.from(range.begin),
          grad_out_t + first_row, kRows, T(1), ds_tile + first, ahead);
    }
    Base::template softmax_backward<kCount, typename Scores::Exp>(
        first_key, static_cast<int>(range.begin), count, first_vector, partial, p_tile + first,
        ds_tile + first, cap_tile + first);
  }

  /// Whether P and dS of a piece are made beside products: nothing happens to scores but the
  /// softmax, and columns stay in a first-level cache. They have the bits that passes give them,
  /// for other rows of a tile may decide which way a piece goes.
  bool weighs_beside(int keys, bool partial) const {
    const bool plain = !partial && p.softcap == T(0) && !mask.has_bias(p) &&
                       p.alibi_slopes.data == nullptr && p.dropout.threshold == 0;
    return plain && keys % kMostRowsBeside == 0 && Scores::depth(p.head_dim) <= kDepthAtATime &&
           Scores::depth(p.value_dim) <= kDepthAtATime;
  }

  /// P and dS as softmax_backward makes them, but S and dP are not stored.
  template <int kCount>
  QKV_ONE_COPY void weigh_beside(int first_row, int64_t first, int keys, T* weights, T* gradients) {
    weights_beside<kCount, /*kOfWeights=*/false>(first_row, key_factors.from(first), keys, weights);
    multiply_with_work<kCount, /*kOfWeights=*/false>(
        keys, p.value_dim, value_factors.from(first),
        grad_out_t + first_row, [&](int64_t at, int v, auto& x) __attribute__((always_inline)) {
          const auto delta = S::load(Base::delta + first_row + v * S::kWidth);
          S::store(gradients + at, S::load(weights + at) * (x[0] - delta));
          S::store(gradients + at + kRows, S::load(weights + at + kRows) * (x[1] - delta));
        });
  }

  /// P of a piece beside products; false, and nothing is done, where it is for passes to make.
  template <int kCount>
  QKV_ONE_COPY bool make_weights_beside(int first_row, KeyRange range, bool partial, T* weights) {
    const int count = static_cast<int>(range.end - range.begin);
    if constexpr (Scores::kWeighsBeside) {
      if (!weighs_beside(count, partial)) return false;
      weights_beside<kCount, /*kOfWeights=*/true>(first_row, key_factors.from(range.begin), count,
                                                  weights);
      return true;
    }
    return false;
  }

  template <int kCount, bool kOfWeights>
  QKV_INLINE void weights_beside(int first_row, Rows<Factor> lines, int keys, T* weights) {
    multiply_with_work<kCount, kOfWeights>(
        keys, p.head_dim, lines,
        query_t + first_row, [&](int64_t at, int v, auto& x) __attribute__((always_inline)) {
          const int row = first_row + v * S::kWidth;
#pragma GCC unroll 2
          for (auto& score : x) {
            if constexpr (!Scores::kScales) score = rounded_product(score, S::set(p.scale));
            score = score - S::load(Base::lse + row) - S::load(Base::lse_rest + row);
          }
          Base::template to_probabilities<typename Scores::Exp>(x);
          S::store(weights + at, x[0]);
          S::store(weights + at + kRows, x[1]);
        });
  }

  /// work(at, v, x) gets what two keys and a vector of rows were multiplied to, and where that is
  /// in a tile.
  template <int kCount, bool kOfWeights, class Work>
  QKV_INLINE void multiply_with_work(int keys, int64_t width, Rows<Factor> lines,
                                     const Factor* columns, Work work) {
    product_with_work<Factor, kCount>(
        keys, Scores::depth(width), lines.first, lines.stride, columns, kRows,
        [](auto&) __attribute__((always_inline)){},
        [&](int64_t key, auto v, auto& x) __attribute__((always_inline)) {
          if (v() == 0) {
            ahead.fetch_next<kOfWeights>();
            ahead.fetch_next<kOfWeights>();
          }
          work(key * kRows + v() * S::kWidth, v(), x);
        });
  }
};

}  // namespace qkv::kernels::QKV_ISA
