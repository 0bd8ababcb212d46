#pragma once

#include "kernels/cpu/head_gradient.inc.h"
#include "kernels/cpu/tangent_tile.inc.h"

// The derivative of attention along directions of its operands, one tile of query rows, in one
// pass over the keys or two (to P and S': tangent_tile.inc.h). W is the weight of the sink, R what
// dropout multiplies the weights with.
//
//     lse' = rowsum(P ∘ S') + W ∘ sink'
//     O'   = (R ∘ P ∘ S') V + (R ∘ P) V' - lse' ∘ O
//
// If P ∘ S' is rounded before it is multiplied, what it adds up to then takes the place of its sum
// before O: what all values have in common still moves nothing.
//
// Nor does what the S' of a row have in common, as when all keys do. If the forward's O differs
// from what P gives, as it is of rounded weights, of few rows or was stored in 16 bits, it would be
// multiplied with that. So a pass before finds the mean that P gives the S' of a row, which is
// taken from these and from sink'. So it does in second order, where lse' is to fit S' to the last
// digit, as what is left is multiplied with keys:
//
//     lse' = mean + rowsum(P ∘ (S' - mean)) + W ∘ (sink' - mean)
//     O'   = (R ∘ P ∘ (S' - mean)) V + (R ∘ P) V' - (lse' - mean) ∘ O
//
// Where the sink has nearly all the weight, mean - W ∘ mean is rowsum(P) ∘ mean (logsumexp.h).
//
//              rows (lanes) ->                         for each block of keys:
//     P     keys [ ............ ]                       lse'  += columns' sums of P ∘ S'
//     P ∘ S' keys [ ............ ]                      O'ᵀ   += Vᵀ · (R ∘ P ∘ S') + V'ᵀ · (R ∘ P)
//     O'ᵀ  Dv  [ ............ ]
//
// With all directions these are 5 products, where the forward has 2. What does not move costs none.

namespace qkv::kernels::QKV_ISA {

/// O' and lse' of one tile of rows.
template <class Products>
struct OutputTangent {
  using Work = TangentTile<Products>;
  using T = typename Products::Number;
  using S = Simd<T>;
  using Number = typename S::Number;
  static constexpr int kRows = Work::kRows;

  Work& work;
  T* out_t;  // [Dv][rows], without - (lse' - mean) ∘ O
  bool rounds;
  bool takes_means;
  alignas(64) T mean[kRows];     // of S', or 0
  alignas(64) T weights[kRows];  // that it is of
  alignas(64) T lse_t[kRows];    // lse' - mean
  alignas(64) T rounded[kRows];  // sums of P ∘ (S' - mean) as multiplied

  static int64_t scratch_numbers(const Problem<T>& p) {
    return Products::sum_rows(p.value_dim) * kRows;
  }

  OutputTangent(Work& tangent_tile, const JvpParams<T>& params, T* scratch)
      : work(tangent_tile), out_t(scratch), takes_means(params.takes_means && work.scores_move()) {
    rounds = false;
    if constexpr (Products::kRoundsTiles) {
      rounds = work.products.rounds_tiles() && work.p.dropout.threshold == 0 && work.scores_move();
    }
  }

  void start() {
    set_to_zero(out_t, scratch_numbers(work.p));
    set_to_zero(lse_t, kRows);
    set_to_zero(rounded, kRows);
    set_to_zero(mean, kRows);
    set_to_zero(weights, kRows);
  }

  /// Of the block that work has loaded, if it takes_means. Its tile of S becomes P.
  QKV_ONE_COPY void add_to_means(int keys) {
    struct Sums {
      Number weights, moved;
    };
    work.template for_each_pair</*kWeights=*/false>(
        keys,
        [&](int v) __attribute__((always_inline)) {
          return Sums{S::load(weights + v * S::kWidth), S::load(mean + v * S::kWidth)};
        },
        [&](Sums & sums, auto, int at, auto, auto, Number weight, Number score_t)
            __attribute__((always_inline)) {
              sums.weights = sums.weights + weight;
              sums.moved = S::fma(weight, score_t, sums.moved);
              S::store(work.p_tile + at, weight);
            },
        [&](int v, const Sums& sums) __attribute__((always_inline)) {
          S::store(weights + v * S::kWidth, sums.weights);
          S::store(mean + v * S::kWidth, sums.moved);
        });
  }

  /// After all blocks.
  void end_means() {
    for (int r = 0; r < kRows; ++r) {
      const T x = mean[r] / weights[r];
      mean[r] = x - x == T(0) ? x : T(0);  // of a row that keeps a key, if it is finite
    }
  }

  /// Of the block that work has loaded. R ∘ P ∘ (S' - mean) and R ∘ P, where V moves, go to the
  /// tiles `moved` and `still`, or to pairs of products that round tiles.
  /// has_weights: work.p_tile has P, as after add_to_means.
  /// kKeepsWeights: it has P afterwards, too, so `still` may be that tile only if nothing is
  /// dropped; else `moved` and `still` may be the tiles of S' and S.
  template <bool kKeepsWeights>
  QKV_ONE_COPY void add_block(int keys, bool has_weights, T* moved, T* still) {
    if constexpr (Products::kRoundsTiles) {
      if (work.products.rounds_tiles()) {
        with_constant(has_weights,
                      [&](auto has) { weigh_in_pairs<has() != 0, kKeepsWeights>(keys); });
        if (work.scores_move()) work.products.add_pairs_to_rows(kValue, kMoved, out_t);
        if (work.along.value.data != nullptr) {
          work.products.add_pairs_to_rows(kValueT, kStill, out_t);
        }
        return;
      }
    }
    with_constant(has_weights,
                  [&](auto has) { weigh_block<has() != 0, kKeepsWeights>(keys, moved, still); });
    if (work.scores_move()) work.products.add_to_rows(kValue, moved, out_t);
    if (work.along.value.data != nullptr) work.products.add_to_rows(kValueT, still, out_t);
  }

  void write(const JvpParams<T>& params) {
    const auto& tile = work.tile;
    const Problem<T>& p = work.p;
    alignas(64) T of_out[kRows];  // what O is multiplied with
    for (int r = 0; r < tile.rows; ++r) {
      const int64_t scalar = tile.scalar(p, r);
      const T rest = params.lse_rest[scalar];
      const Sink sink = sink_of_row(params, r);
      const T moved = sink.weight * (sink.moves - mean[r]);
      of_out[r] = (rounds ? rounded[r] : lse_t[r]) + moved;
      if (has_no_keys(rest)) of_out[r] = T(0);  // its output stays 0, whatever its sink does
      params.lse_t[scalar] =
          lse_t[r] + mean_with_sink(mean[r], weights[r], sink.weight, sink.moves);
    }
    with_stored<T>(params.out_storage,
                   [&](auto stored) { write_rows<decltype(stored)>(params, of_out); });
  }

 private:
  /// The tiles of add_block.
  template <bool kHasWeights, bool kKeepsWeights>
  void weigh_block(int keys, T* moved, T* still) {
    const bool is_there =
        (kHasWeights || kKeepsWeights) && still == work.p_tile && work.p.dropout.threshold == 0;
    const bool writes_still = work.along.value.data != nullptr && !is_there;
    struct OfRows {
      Number mean, lse_t;
    };
    work.template for_each_pair<kHasWeights>(
        keys,
        [&](int v) __attribute__((always_inline)) {
          return OfRows{S::load(mean + v * S::kWidth), S::load(lse_t + v * S::kWidth)};
        },
        [&](OfRows & rows, auto, int at, auto, auto dropped, Number weight, Number score_t)
            __attribute__((always_inline)) {
              const auto weighted = weight * (score_t - rows.mean);
              rows.lse_t = rows.lse_t + weighted;
              if constexpr (kKeepsWeights && !kHasWeights) S::store(work.p_tile + at, weight);
              if (writes_still) S::store(still + at, dropped(weight));
              S::store(moved + at, dropped(weighted));
            },
        [&](int v, const OfRows& rows)
            __attribute__((always_inline)) { S::store(lse_t + v * S::kWidth, rows.lse_t); });
  }

  /// The same, rounded to pairs of products.
  template <bool kHasWeights, bool kKeepsWeights>
  void weigh_in_pairs(int keys) {
    const bool writes_still = work.along.value.data != nullptr;
    using Pairs = typename Products::Pairs;
    auto *const moved = work.products.pairs(kMoved), *const still = work.products.pairs(kStill);
    struct OfRows {
      Number mean, lse_t, rounded, first_moved, first_still;
      int at;  // of the next pair
    };
    const auto put = [&](OfRows & rows, Number second_moved, Number second_still)
        __attribute__((always_inline)) {
      const auto pair = Pairs::round(rows.first_moved, second_moved);
      rows.rounded = Pairs::add(pair, rows.rounded);
      Pairs::store(moved + rows.at, pair);
      if (writes_still) {
        Pairs::store(still + rows.at, Pairs::round(rows.first_still, second_still));
      }
      rows.at += kRows;
    };
    work.template for_each_pair<kHasWeights>(
        keys,
        [&](int v) __attribute__((always_inline)) {
          const int r = v * S::kWidth;
          return OfRows{S::load(mean + r), S::load(lse_t + r), S::zero(), S::zero(), S::zero(), r};
        },
        [&](OfRows & rows, auto second, int at, auto, auto dropped, Number weight, Number score_t)
            __attribute__((always_inline)) {
              const auto weighted = weight * (score_t - rows.mean);
              rows.lse_t = rows.lse_t + weighted;
              if constexpr (kKeepsWeights && !kHasWeights) S::store(work.p_tile + at, weight);
              if constexpr (second() != 0) {
                put(rows, dropped(weighted), dropped(weight));
              } else {
                rows.first_moved = dropped(weighted);
                rows.first_still = dropped(weight);
              }
            },
        [&](int v, OfRows& rows) __attribute__((always_inline)) {
          if (keys % 2 != 0) put(rows, S::zero(), S::zero());
          S::store(lse_t + v * S::kWidth, rows.lse_t);
          T* sum = rounded + v * S::kWidth;
          S::store(sum, S::load(sum) + rows.rounded);
        });
  }

  /// O' of the sums and O: stored in 16 bits, with what rounding took from it.
  template <class Stored>
  QKV_ONE_COPY void write_rows(const JvpParams<T>& params, const T* of_out) const {
    const auto& tile = work.tile;
    const auto out = tile.template stored_rows_in<Stored>(params.out),
               out_rest = tile.template stored_rows_in<Stored>(params.out_rest);
    const auto to = tile.template stored_rows_in<Stored>(params.out_t);
    for (int r = 0; r < tile.rows; r += S::kWidth) {
      const int rows = tile.rows - r;
      put_columns<T>(
          out_t + r, kRows, work.p.value_dim,
          S::set(T(1)), [&](int l, int64_t d, Number x, int count) __attribute__((always_inline)) {
            if (l >= rows) return;
            const auto load = [=](const Stored* numbers) __attribute__((always_inline)) {
              return count == S::kWidth ? load_stored<T>(numbers + d)
                                        : load_first<T>(numbers + d, count);
            };
            auto exact = load(out[r + l]);
            if constexpr (sizeof(Stored) < sizeof(T)) exact = exact + load(out_rest[r + l]);
            const auto moved = x - S::set(of_out[r + l]) * exact;
            if (count == S::kWidth) {
              store_rounded<T>(to[r + l] + d, moved);
            } else {
              store_first<T>(to[r + l] + d, moved, count);
            }
          });
    }
  }

  struct Sink {
    T weight = T(0), moves = T(0);
  };

  Sink sink_of_row(const JvpParams<T>& params, int r) const {
    const Problem<T>& p = work.p;
    const auto& sinks_t = work.along.sinks;
    if (p.sinks.data == nullptr) return {};
    const int64_t scalar = work.tile.scalar(p, r);
    return {sink_weight(work.tile.number_of_head(p.sinks, r), params.lse[scalar],
                        params.lse_rest[scalar]),
            sinks_t.data != nullptr ? work.tile.number_of_head(sinks_t, r) : T(0)};
  }
};

/// Blocks of keys of which P and S' of a tile of rows are kept from one time that they are needed
/// to the next. With more keys they are computed again.
template <class T>
inline int64_t kept_blocks(const Problem<T>& p) {
  constexpr int64_t kMostKeys = 1 << 14;
  return p.keys <= kMostKeys ? backward_blocks(p) : 0;
}

/// The blocks of keys that the rows of a tile see, each in memory of its own from `kept` on unless
/// that is nullptr.
template <class Work>
struct SeenBlocks {
  Work& work;
  KeyRange keys;
  int64_t first_key;
  typename Work::T* kept;

  /// f(first key, keys)
  template <class F>
  void for_each(F f) const {
    for (int64_t n = first_key; n < keys.end; n += Work::kBlockKeys) {
      if (kept != nullptr) {
        work.use_block(kept + (n - first_key) / Work::kBlockKeys * Work::block_numbers(work.p));
      }
      const int64_t left = keys.end - n;
      f(n, left < Work::kBlockKeys ? static_cast<int>(left) : Work::kBlockKeys);
    }
  }
};

/// One unit of work is one tile of rows of one key/value head.
template <class Products, class T>
inline int64_t jvp_units(const JvpParams<T>& params) {
  const Problem<T>& p = params.problem;
  return p.batch * p.kv_heads * RowTile<Products::kRows>::count_of_head(p);
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

/// Where the keys of one key/value head are packed or copied; nullptr if nothing is prepared.
inline void* of_head(void* prepared, int64_t head, int64_t bytes) {
  return bytes == 0 ? nullptr : static_cast<char*>(prepared) + head * bytes;
}

template <class Products, class T>
inline void prepare_head(const TangentMatrices<T>& matrices, int64_t head, void* prepared) {
  Products::prepare(matrices, RowTile<Products::kRows>::of_head(matrices.p, head, 0),
                    of_head(prepared, head, Products::prepared_bytes(matrices)));
}

template <class Products, class T>
inline void prepare_jvp(const JvpParams<T>& params, int64_t head, void* prepared) {
  prepare_head<Products>(matrices_of(params), head, prepared);
}

template <class Products, class T>
inline int64_t jvp_scratch_bytes(const JvpParams<T>& params) {
  using Work = TangentTile<Products>;
  const Problem<T>& p = params.problem;
  const int64_t kept = params.takes_means ? kept_blocks(p) : 0;
  const int64_t numbers = Work::scratch_numbers(matrices_of(params)) +
                          OutputTangent<Products>::scratch_numbers(p) +
                          kept * Work::block_numbers(p);
  return numbers * static_cast<int64_t>(sizeof(T));
}

/// Tiles of a head run from the last to the first, as in the forward.
template <class Products, class T>
inline void attention_jvp(const JvpParams<T>& params, void* prepared, int64_t unit, void* scratch) {
  using Work = TangentTile<Products>;
  const Problem<T>& p = params.problem;
  const Directions<T>& along = params.directions;
  const int64_t tiles = RowTile<Work::kRows>::count_of_head(p), head = unit / tiles;

  Work work(matrices_of(params), along, params.lse, params.lse_rest,
            of_head(prepared, head, jvp_prepared_bytes<Products>(params)),
            static_cast<T*>(scratch));
  work.tile = RowTile<Work::kRows>::of_head(p, head, tiles - 1 - unit % tiles);
  OutputTangent<Products> output(work, params, work.end_of_scratch);
  output.start();

  const KeyRange range = work.keys_of_rows();
  const bool keys_move = work.scores_move() || along.value.data != nullptr;
  if (keys_move && !range.empty()) {
    work.load_rows();
    const bool keeps = output.takes_means && kept_blocks(p) > 0;
    T* const kept = work.end_of_scratch + output.scratch_numbers(p);
    const SeenBlocks<Work> blocks{work, range, Products::first_key(range.begin),
                                  keeps ? kept : nullptr};
    if (output.takes_means) {
      blocks.for_each([&](int64_t n, int keys) {
        if (work.load_block(n, keys) != TileState::kEmpty) output.add_to_means(keys);
      });
      output.end_means();
    }
    blocks.for_each([&](int64_t n, int keys) {
      const TileState state = keeps ? work.reload_block(n, keys) : work.load_block(n, keys);
      if (state == TileState::kEmpty) return;
      output.template add_block</*kKeepsWeights=*/false>(keys, /*has_weights=*/keeps, work.scores_t,
                                                         work.p_tile);
    });
  }
  output.write(params);
}

}  // namespace qkv::kernels::QKV_ISA
