#pragma once

#include "kernels/cpu/attention_weights.inc.h"
#include "kernels/cpu/few_rows.inc.h"
#include "kernels/cpu/forward_tile.inc.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/merge.inc.h"
#include "kernels/cpu/worth_fetching.inc.h"

// How the forward pass is cut into units of work: tiles of query rows (forward_tile.inc.h), or, if
// those of a key/value head fill only a few tiles, these and ranges of its keys, whose results are
// merged (merge.inc.h). Few rows have a kernel of their own (few_rows.inc.h).
//
// If K and V of a head are too large for a second-level cache, or not multiplied where they lie, up
// to eight of its tiles take turns: each takes in the same keys, a quarter of a MiB, before they
// all go on to the next. Where there are no more keys than that, a tile is done after its one turn.
//
// Products: how a tile's are computed (forward_tile.inc.h).

namespace qkv::kernels::QKV_ISA {

constexpr int64_t kKeysOfForwardSplit = 1024;  // at least

/// Ranges that the keys of a tile are cut into: the more, the fewer tiles a head has.
template <class Products, class T>
inline int64_t forward_splits(const Problem<T>& problem) {
  const int64_t most = problem.keys / kKeysOfForwardSplit;
  const int64_t tiles = RowTile<Products::kRows>::count_of_head(problem);
  const int64_t splits = (most > kMaxForwardSplits ? kMaxForwardSplits : most) / tiles;
  return splits < 1 ? 1 : splits;
}

template <class Products, class T>
inline KeyRange keys_of_forward_split(const Problem<T>& problem, int64_t split) {
  const int64_t splits = forward_splits<Products>(problem);
  const int64_t blocks = (problem.keys + kForwardBlockKeys - 1) / kForwardBlockKeys;
  const int64_t end = blocks * (split + 1) / splits * kForwardBlockKeys;
  return {blocks * split / splits * kForwardBlockKeys, end < problem.keys ? end : problem.keys};
}

constexpr int64_t kMaxTilesInTurn = 8;
constexpr int64_t kBytesOfTurn = 256 * 1024;  // of K and V
constexpr int64_t kBytesOfLargeHead = 4 * kBytesOfTurn;

template <class Products, class T>
inline int64_t bytes_of_key(const Problem<T>& p) {
  return (p.head_dim + p.value_dim) * Products::kBytesOfNumber;
}

/// Whole blocks, as many as there are of a small head.
template <class Products, class T>
inline int64_t keys_of_turn(const Problem<T>& p) {
  int64_t keys = kBytesOfTurn / (bytes_of_key<Products>(p) + 1) + 1;  // a key may have none
  if (keys > p.keys) keys = p.keys;
  return (keys + Products::kBlockKeys - 1) / Products::kBlockKeys * Products::kBlockKeys;
}

/// Whether K and V of a head do not stay in a second-level cache.
template <class Products, class T>
inline bool is_large_head(const Problem<T>& p) {
  return p.keys * bytes_of_key<Products>(p) >= kBytesOfLargeHead;
}

/// Whether tiles that take turns share more than a cache: copies of K or V.
template <class Products, class T>
inline bool shares_turns(const Problem<T>& p) {
  return Products::Turn::bytes(p, 1) > 0;
}

/// Whether K and V are prepared for all tiles of a head: by Products that do so, unless the tiles
/// are one unit, which packs them for itself.
template <class Products, class T>
inline bool is_prepared(const Problem<T>& p, int64_t in_turn) {
  return Products::prepared_bytes(p) > 0 && in_turn < RowTile<Products::kRows>::count_of_head(p);
}

/// Whether tile t, the first of so many in turn, reads K and V from far away: those of a large
/// head, or those of any, as one of the two tiles that run first, at once on two threads.
template <class Products, class T>
inline bool first_tile_fetches(const Problem<T>& p, int64_t t, int64_t count) {
  const int64_t tiles_before = RowTile<Products::kRows>::count_of_head(p) - (t + count);
  const bool begins_head = tiles_before < 2 && p.keys > Products::kBlockKeys;
  const bool reads_stored =
      Products::prepared_bytes(p) == 0 && (count == 1 || !shares_turns<Products>(p));
  return reads_stored && is_worth_fetching(p) && (begins_head || is_large_head<Products>(p));
}

/// Whether each tile has one turn, as all of the keys fit in it.
template <class Products, class T>
inline bool has_one_turn(const Problem<T>& p, int64_t in_turn) {
  return in_turn == 1 || p.keys <= keys_of_turn<Products>(p);
}

/// How many tiles of a head take turns: as many as leave each of `threads` threads 8 units, or, of
/// those that share copies, up to four if they leave it 4. No bit of a result depends on it.
template <class Products, class T>
inline int64_t forward_tiles_in_turn(const ForwardParams<T>& params, int64_t threads) {
  const Problem<T>& p = params.problem;
  const bool share = shares_turns<Products>(p), is_large = is_large_head<Products>(p);
  if (!share && !is_large) return 1;
  const int64_t tiles = RowTile<Products::kRows>::count_of_head(p);
  const int64_t of_thread = p.batch * p.kv_heads * tiles * forward_splits<Products>(p) / threads;
  const auto leaving = [=](int64_t units, int64_t most) {
    const int64_t in_turn = of_thread / units < most ? of_thread / units : most;
    return in_turn < 1 ? 1 : in_turn < tiles ? in_turn : tiles;
  };
  const int64_t several = leaving(8, kMaxTilesInTurn), few = share ? leaving(4, 4) : 1;
  const int64_t in_turn = several > few ? several : few;
  if (is_prepared<Products>(p, in_turn)) return is_large ? several : 1;
  return in_turn;
}

/// One unit of work is one range of keys, or all, for one tile or for tiles that take turns.
template <class Products, class T>
inline int64_t forward_units(const ForwardParams<T>& params, int64_t in_turn) {
  const Problem<T>& p = params.problem;
  const int64_t tiles = (RowTile<Products::kRows>::count_of_head(p) + in_turn - 1) / in_turn;
  return p.batch * p.kv_heads * tiles * forward_splits<Products>(p);
}

/// What a unit is: tiles of a head and one of the `splits` ranges of its keys. Tiles of a head run
/// from the last to the first: under a causal mask the last ones have most keys, and starting with
/// them leaves small pieces to even out the threads. Units of several tiles are large: those of two
/// heads take turns, so that the last of all are the smallest of both.
struct ForwardUnit {
  int64_t head, first_tile, tiles, split, splits;
};
template <class Products, class T>
inline ForwardUnit forward_unit(const Problem<T>& p, int64_t in_turn, int64_t unit) {
  const int64_t tiles = RowTile<Products::kRows>::count_of_head(p);
  const int64_t splits = forward_splits<Products>(p), turns = (tiles + in_turn - 1) / in_turn;
  const int64_t heads = p.batch * p.kv_heads, side_by_side = in_turn > 1 ? 2 : 1;
  if (unit >= heads * turns * splits) return {heads, 0, 0, 0, splits};  // after the last
  const int64_t first_head = unit / (side_by_side * turns * splits) * side_by_side;
  const int64_t count = heads - first_head < side_by_side ? heads - first_head : side_by_side;
  const int64_t of_splits = unit / splits - first_head * turns;
  const int64_t first = (turns - 1 - of_splits / count) * in_turn;
  return {first_head + of_splits % count, first, tiles - first < in_turn ? tiles - first : in_turn,
          unit % splits, splits};
}

/// How many numbers ForwardParams::partial has; 0 if it is not needed.
template <class Products, class T>
inline int64_t forward_partial_size(const ForwardParams<T>& params) {
  const Problem<T>& p = params.problem;
  const int64_t splits = forward_splits<Products>(p);
  return splits == 1 ? 0 : p.batch * p.kv_heads * splits * rows_of_kv_head(p) * partial_row(p);
}

/// Where a tile's rows are in partial[head][split][row].
template <class Products, class T>
inline T* partial_of_tile(const ForwardParams<T>& params, int64_t head, int64_t split, int64_t t) {
  const Problem<T>& p = params.problem;
  const int64_t row = (head * forward_splits<Products>(p) + split) * rows_of_kv_head(p) +
                      RowTile<Products::kRows>::first_row_of(p, t);
  return params.partial + row * partial_row(p);
}

/// One of the tiles that take turns. It lies in scratch, before the memory of its own.
template <class Products>
struct TileInTurn {
  using T = typename Products::Real;

  RowTile<Products::kRows> rows, rows_of_next;
  ForwardTile<Products> tile;

  TileInTurn(const ForwardParams<T>& params, int64_t head, int64_t t, KeyRange keys, bool fetches,
             const typename Products::Turn& turn, void* block)
      : rows(RowTile<Products::kRows>::of_head(params.problem, head, t)),
        tile(params, rows, keys, fetches, turn, reinterpret_cast<char*>(this) + kBytes, block) {}

  /// Tile t of `head` is the one that the thread goes on to.
  void fetch_ahead(const Problem<T>& p, int64_t head, int64_t t) {
    rows_of_next = RowTile<Products::kRows>::of_head(p, head, t);
    tile.fetch_ahead(rows_of_next);
  }

  static void* operator new(decltype(sizeof(0)), char* where) { return where; }
  static void operator delete(void*, char*) {}

  static int64_t bytes(const Problem<T>& p) {
    return kBytes + whole_lines(ForwardTile<Products>::own_bytes(p));
  }

 private:
  static constexpr int64_t kBytes =
      (2 * sizeof(RowTile<Products::kRows>) + sizeof(ForwardTile<Products>) + 127) / 64 * 64;
};

/// Of a block, of tiles that take turns, of what these share.
template <class Products, class T>
inline int64_t forward_scratch_bytes(const ForwardParams<T>& params, int64_t in_turn) {
  const Problem<T>& p = params.problem;
  const bool share = in_turn > 1 && !is_prepared<Products>(p, in_turn);
  const int64_t shared = share ? Products::Turn::bytes(p, keys_of_turn<Products>(p)) : 0;
  const int64_t tiles_at_once = has_one_turn<Products>(p, in_turn) ? 1 : in_turn;
  const int64_t tiles = whole_lines(ForwardTile<Products>::block_bytes(p)) +
                        tiles_at_once * TileInTurn<Products>::bytes(p) + shared;
  const int64_t rows = few_rows_scratch_bytes(p, Products::kFewRows);
  return tiles > rows ? tiles : rows;
}

/// Few rows and some of their keys: to partial, or merged at once if these are all.
template <class Products, class T>
inline void forward_few_rows(const ForwardParams<T>& params, const ForwardUnit& unit, T* scratch) {
  const Problem<T>& p = params.problem;
  const auto tile = RowTile<Simd<T>::kWidth>::of_head(p, unit.head, 0);
  const bool all = unit.splits == 1;
  T* result = all ? scratch : partial_of_tile<Products>(params, unit.head, unit.split, 0);
  T* rest = all ? scratch + rows_of_kv_head(p) * partial_row(p) : scratch;
  Products::with_few_rows(p.key_value_storage, [&](auto stored, auto products) {
    few_rows<decltype(products), T, decltype(stored)>(
        params, tile, keys_of_forward_split<Products>(p, unit.split), result, rest);
  });
  if (all) merge(params, tile, 1, result);
}

/// Tiles of a head and keys of theirs, tile after tile, or so many keys of each in turn.
template <class Products, class T>
class UnitOfTiles {
 public:
  UnitOfTiles(const ForwardParams<T>& params, int64_t in_turn, int64_t unit, void* scratch)
      : params_(params),
        p_(params.problem),
        unit_(forward_unit<Products>(p_, in_turn, unit)),
        next_(forward_unit<Products>(p_, in_turn, unit + params.units_to_next)),
        keys_(keys_of_forward_split<Products>(p_, unit_.split)),
        tiles_at_once_(has_one_turn<Products>(p_, in_turn) ? 1 : in_turn),
        block_(static_cast<char*>(scratch)),
        memory_(block_ + whole_lines(ForwardTile<Products>::block_bytes(p_))),
        shared_(params, keys_of_turn<Products>(p_), memory_ + tiles_at_once_ * Tile::bytes(p_)) {}

  void run() {
    if (tiles_at_once_ == 1) {
      share(keys_of_all_tiles());
      for (int64_t i = 0; i < unit_.tiles; ++i) {
        Tile* tile = start(i, memory_);
        tile->tile.run_until(keys_.end);
        finish(i, tile);
      }
      return;
    }
    Tile* tile[kMaxTilesInTurn];
    for (int64_t i = 0; i < unit_.tiles; ++i) tile[i] = start(i, memory_ + i * Tile::bytes(p_));
    const int64_t step = unit_.tiles == 1 ? p_.keys : keys_of_turn<Products>(p_);
    for (int64_t end = keys_.begin; end < keys_.end;) {
      end = end + step < keys_.end ? end + step : keys_.end;
      share(next_keys_of_any(tile, end));
      for (int64_t i = 0; i < unit_.tiles; ++i) tile[i]->tile.run_until(end);
    }
    for (int64_t i = 0; i < unit_.tiles; ++i) finish(i, tile[i]);
  }

 private:
  using Rows = RowTile<Products::kRows>;
  using Tile = TileInTurn<Products>;

  Rows rows_of(int64_t i) const { return Rows::of_head(p_, unit_.head, unit_.first_tile + i); }

  void share(KeyRange keys) {
    if (unit_.tiles > 1 && !keys.empty()) shared_.load(rows_of(0), keys);
  }

  Tile* start(int64_t i, char* memory) const {
    const bool fetches = i == 0 && first_tile_fetches<Products>(p_, unit_.first_tile, unit_.tiles);
    Tile* tile = new (memory)
        Tile(params_, unit_.head, unit_.first_tile + i, keys_, fetches, shared_, block_);
    // One block of keys is too little to gain by it.
    if (unit_.splits > 1 || p_.keys <= Products::kBlockKeys || params_.out.data == nullptr) {
      return tile;
    }
    if (tiles_at_once_ == 1 && i + 1 < unit_.tiles) {
      tile->fetch_ahead(p_, unit_.head, unit_.first_tile + i + 1);
    } else if (const int64_t of_next = tiles_at_once_ == 1 ? 0 : i;
               next_.head < p_.batch * p_.kv_heads && of_next < next_.tiles) {
      tile->fetch_ahead(p_, next_.head, next_.first_tile + of_next);
    }
    return tile;
  }

  void finish(int64_t i, Tile* tile) const {
    if (unit_.splits == 1) {
      tile->tile.write_results();
    } else {
      tile->tile.write_partial(
          partial_of_tile<Products>(params_, unit_.head, unit_.split, unit_.first_tile + i));
    }
    tile->~Tile();
  }

  KeyRange keys_of_all_tiles() const {
    const KeyRange seen = keys_of_any(p_.band, rows_of(0).first_query(),
                                      rows_of(unit_.tiles - 1).last_query(), p_.keys);
    return KeyRange{first_of_eight(seen.begin), seen.end}.intersection(keys_);
  }

  /// What tiles that take turns take in next, up to `end`: at most keys_of_turn.
  KeyRange next_keys_of_any(Tile* const* tile, int64_t end) const {
    KeyRange any{end, 0};
    for (int64_t i = 0; i < unit_.tiles; ++i) {
      const KeyRange keys = tile[i]->tile.next_keys(end);
      if (keys.empty()) continue;
      if (keys.begin < any.begin) any.begin = keys.begin;
      if (keys.end > any.end) any.end = keys.end;
    }
    return any;
  }

  const ForwardParams<T>& params_;
  const Problem<T>& p_;
  const ForwardUnit unit_, next_;
  const KeyRange keys_;
  const int64_t tiles_at_once_;
  char* const block_;
  char* const memory_;
  typename Products::Turn shared_;
};

template <class Products, class T>
inline void attention_forward(const ForwardParams<T>& params, int64_t in_turn, int64_t unit,
                              void* scratch) {
  const Problem<T>& p = params.problem;
  if constexpr (Products::kFewRows > 0) {
    if (are_few_rows(p, Products::kFewRows) && params.out.data != nullptr) {
      forward_few_rows<Products>(params, forward_unit<Products>(p, in_turn, unit),
                                 static_cast<T*>(scratch));
      return;
    }
  }
  UnitOfTiles<Products, T>(params, in_turn, unit, scratch).run();
}

/// After all units, if there is a partial: one unit is one key/value head.
template <class Products, class T>
inline void merge_forward(const ForwardParams<T>& params, int64_t head) {
  const Problem<T>& p = params.problem;
  for (int64_t t = 0; t < RowTile<Products::kRows>::count_of_head(p); ++t) {
    const auto tile = RowTile<Products::kRows>::of_head(p, head, t);
    merge(params, tile, forward_splits<Products>(p), partial_of_tile<Products>(params, head, 0, t));
  }
}

template <class Products, class T>
inline int64_t forward_prepared_bytes(const ForwardParams<T>& params, int64_t in_turn) {
  const Problem<T>& p = params.problem;
  return is_prepared<Products>(p, in_turn) ? p.batch * p.kv_heads * Products::prepared_bytes(p) : 0;
}

/// Before all units; one unit is one key/value head.
template <class Products, class T>
inline void prepare_forward(const ForwardParams<T>& params, int64_t head) {
  const Problem<T>& p = params.problem;
  Products::prepare(p, RowTile<1>::of_head(p, head, 0),
                    static_cast<char*>(params.prepared) + head * Products::prepared_bytes(p));
}

template <class Products, class T>
inline bool has_scores_of_derivatives(const Problem<T>& p) {
  return !are_few_rows(p, Products::kFewRows);
}

/// few_rows_backward goes with Products, if they take few rows.
template <class Products>
constexpr ForwardKernels<typename Products::Real> make_forward_kernels(
    const BackwardKernels<typename Products::Real>* few_rows_backward) {
  using T = typename Products::Real;
  return {
      forward_tiles_in_turn<Products, T>,
      forward_units<Products, T>,
      forward_scratch_bytes<Products, T>,
      forward_partial_size<Products, T>,
      forward_prepared_bytes<Products, T>,
      prepare_forward<Products, T>,
      attention_forward<Products, T>,
      merge_forward<Products, T>,
      weights_units<Products, T>,
      weights_scratch_bytes<Products, T>,
      attention_weights<Products, T>,
      has_scores_of_derivatives<Products, T>,
      few_rows_backward,
  };
}

}  // namespace qkv::kernels::QKV_ISA
