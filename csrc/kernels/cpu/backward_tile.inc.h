#pragma once

#include "kernels/cpu/backward_rows.inc.h"
#include "kernels/cpu/block_rows.inc.h"
#include "kernels/cpu/tile_product.inc.h"

// P and dS of one tile of rows and one block of keys, recomputed from lse: the common part of the
// backward kernel and of the mask's gradient. S and dP are multiplied here, the rest is
// backward_rows.inc.h's.
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

template <class T>
constexpr int64_t round_up_to_vector(int64_t x) {
  return (x + Simd<T>::kWidth - 1) / Simd<T>::kWidth * Simd<T>::kWidth;
}

/// What one tile of rows and one block of keys need, in both backward kernels.
template <class T, int kVectors>
struct BackwardTile : BackwardRows<T, kVectors> {
  using Base = BackwardRows<T, kVectors>;
  using Base::alibi, Base::kRows, Base::mask, Base::p, Base::params, Base::stays, Base::tile;
  using S = Simd<T>;
  // The products are done in pieces of at most 3 vectors, which is what registers hold. Vectors
  // without a row are left out; and where the edge of the band runs through a block, so are the
  // keys that no row of a piece sees.
  static constexpr int kPieceVectors = kVectors > 3 ? kVectors / 2 : kVectors;
  static constexpr int kPieces = kVectors / kPieceVectors;
  static constexpr int kPiece = kPieceVectors * S::kWidth;

  T* query_t;     // [D][rows]
  T* grad_out_t;  // [Dv][rows]
  T* p_tile;      // [keys][rows], R ∘ P
  T* ds_tile;     // [keys][rows]
  T* cap_tile;    // [keys][rows], the derivative of the softcap
  T* key_rows;    // [keys][D], converted or spread
  T* value_rows;  // [keys][Dv], likewise
  Rows<T> key;    // of the block, after load_block
  T* end_of_scratch;
  bool whole;              // nothing is left out: all of P and dS is written
  KeyRange keys[kPieces];  // of the block, that the pieces have taken

  static int64_t scratch_numbers(const Problem<T>& p) {
    const int64_t tiles = p.softcap != T(0) ? 4 : 3;
    return (p.head_dim + p.value_dim + tiles * kBackwardBlockKeys + kBackwardBlockKeys / 8) *
               kRows +
           kBackwardBlockKeys * (spread_row<T>(p.head_dim) + spread_row<T>(p.value_dim));
  }

  BackwardTile(const BackwardParams<T>& backward, T* scratch, bool whole_tile = true)
      : Base(backward), whole(whole_tile) {
    query_t = scratch;
    grad_out_t = query_t + p.head_dim * kRows;
    p_tile = grad_out_t + p.value_dim * kRows;
    ds_tile = p_tile + kBackwardBlockKeys * kRows;
    mask.bias = ds_tile + kBackwardBlockKeys * kRows;
    cap_tile = mask.bias + kBackwardBlockKeys * kRows;
    key_rows = p.softcap != T(0) ? cap_tile + kBackwardBlockKeys * kRows : cap_tile;
    value_rows = key_rows + kBackwardBlockKeys * spread_row<T>(p.head_dim);
    T* end_of_tiles = value_rows + kBackwardBlockKeys * spread_row<T>(p.value_dim);
    mask.bits = reinterpret_cast<uint8_t*>(end_of_tiles);
    stays = mask.bits + kBackwardBlockKeys / 8 * kRows;
    end_of_scratch = scratch + scratch_numbers(p);
  }

  QKV_ONE_COPY void load_rows() {
    const Storage storage = p.key_value_storage;
    tile.pack_transposed(p.query, p.head_dim, p.scale, query_t, storage);
    tile.pack_transposed(params.grad_out, p.value_dim, T(1), grad_out_t, storage);
    with_stored<T>(storage, [&](auto stored) {
      using Stored = decltype(stored);
      Base::load_numbers([&](int r) {
        return dot_with_exact<T>(tile.template stored_row<Stored>(params.grad_out, r),
                                 tile.template stored_row<Stored>(params.out, r),
                                 tile.template stored_row<Stored>(params.out_rest, r), p.value_dim);
      });
    });
  }

  /// P and dS of the keys first_key .. first_key + count.
  QKV_ONE_COPY TileState load_block(int64_t first_key, int count) {
    const TileState state = Base::load_pairs(first_key, count);
    if (state == TileState::kEmpty) return state;
    const bool partial = state == TileState::kPartial;
    const auto rows_of = [&](const Operand<const T>& x, int64_t width, T* to) {
      return rows_of_block(tile, x, p.key_value_storage, first_key, count, width, to);
    };
    key = rows_of(p.key, p.head_dim, key_rows);
    const Rows<T> value = rows_of(p.value, p.value_dim, value_rows);
    for (int piece = 0; piece < kPieces; ++piece) {
      const int first_row = piece * kPiece;
      keys[piece] = keys_of_piece(first_row, first_key, count, partial);
      if (keys[piece].empty()) continue;
      with_vectors(first_row, [&](auto vectors) {
        load_piece<vectors()>(first_row, first_key, value, keys[piece], partial);
      });
    }
    return state;
  }

  /// Calls f with the number of vectors that a piece computes.
  template <class F>
  QKV_INLINE void with_vectors(int first_row, F f) const {
    const int rows = whole ? kPiece : tile.rows - first_row;
    if constexpr (kPieceVectors > 2) {
      if (rows > 2 * S::kWidth) return f(Constant<3>{});
    }
    if constexpr (kPieceVectors > 1) {
      if (rows > S::kWidth) return f(Constant<2>{});
    }
    f(Constant<1>{});
  }

  void add_slope_gradient(int64_t first_key, int count, T* sums) const {
    Base::template add_slope_gradient<kVectors>(first_key, count, ds_tile, sums);
  }

  void through_softcap(TileState state, int count) {
    Base::template through_softcap<kVectors>(0, count, 0, state == TileState::kPartial, cap_tile,
                                             ds_tile);
  }

 private:
  /// Those of the block that rows of a piece need: what they see by the band, cut at multiples
  /// of 8.
  KeyRange keys_of_piece(int first_row, int64_t first_key, int count, bool partial) const {
    if (whole) return {0, count};
    if (first_row >= tile.rows) return {0, 0};
    if (!partial) return {0, count};
    const int last_row = first_row + kPiece <= tile.rows ? first_row + kPiece - 1 : tile.rows - 1;
    const KeyRange seen = keys_of_any(p.band, tile.query[first_row], tile.query[last_row], p.keys);
    const int64_t begin = seen.begin > first_key ? (seen.begin - first_key) / 8 * 8 : 0;
    const int64_t end = (seen.end - first_key + 7) / 8 * 8;
    return {begin, end < count ? end : count};
  }

  template <int kCount>
  void load_piece(int first_row, int64_t first_key, Rows<T> value, KeyRange range, bool partial) {
    const int count = static_cast<int>(range.end - range.begin);
    const int64_t first = range.begin * kRows + first_row;
    product<kCount>(count, p.head_dim, key.first + range.begin * key.stride, key.stride,
                    query_t + first_row, p_tile + first);
    product<kCount>(count, p.value_dim, value.first + range.begin * value.stride, value.stride,
                    grad_out_t + first_row, ds_tile + first);
    Base::template softmax_backward<kCount>(first_key, static_cast<int>(range.begin), count,
                                            first_row / S::kWidth, partial, p_tile + first,
                                            ds_tile + first, cap_tile + first);
  }

  template <int kCount>
  static void product(int keys, int64_t depth, const T* a, int64_t a_row, const T* b, T* c) {
    multiply<T, kCount>(
        keys, depth, a, a_row, UnitStride{}, b,
        kRows, [=](int64_t k, int v, typename S::Number x) __attribute__((always_inline)) {
          S::store(c + k * kRows + v * S::kWidth, x);
        });
  }
};

}  // namespace qkv::kernels::QKV_ISA
