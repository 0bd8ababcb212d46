#pragma once

#include "kernels/cpu/backward_splits.inc.h"
#include "kernels/cpu/backward_tile.inc.h"
#include "kernels/cpu/gradient_products.inc.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/key_sums.inc.h"
#include "kernels/cpu/mask_gradient.inc.h"
#include "kernels/cpu/weights_backward.inc.h"

// Backward attention (FlashAttention-2, arXiv:2307.08691, algorithm 2), five products a tile:
//
//     S = scale · K Qᵀ    dP = V dOᵀ    (to P and dS: backward_tile.inc.h)
//     dV += P dO          dK += scale · dS Q            dQ += scale · dSᵀ K
//                                       (gradient_products.inc.h)
//
// The keys of a head are cut into ranges ("splits", functions of sizes and of the band alone). One
// unit of work is a split, or several side by side where there are units enough for all threads: it
// owns dK and dV of its keys and walks over all rows that see them. If a head has several units,
// each leaves its part of dQ in a buffer of its own, and sum_grad_query adds them. So there are
// five products and no atomics. The parts of splits are added two and two, in a unit and from the
// buffers alike,
//
//     ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)        of seven; units have the two halves, or four pairs
//
// so there are the same bits on any number of threads.

namespace qkv::kernels::QKV_ISA {

/// How many numbers partial_grad_query takes for one key/value head: dQ [unit][row tile].
template <class T>
inline int64_t partial_grad_query_size(const BackwardParams<T>& params) {
  return params.units * backward_row_tiles(params.problem) * grad_query_size(params.problem);
}

/// Parts of dQ that a unit has at a time: those of 4 splits, of 2, of 1 and the one before.
constexpr int64_t kMostPartsOfUnit = 4;

template <class Scores, template <class, int> class Gradients, class T>
inline int64_t backward_scratch_bytes(const BackwardParams<T>& params) {
  const Problem<T>& p = params.problem;
  const int64_t widths = round_up_to_vector<T>(p.head_dim) + round_up_to_vector<T>(p.value_dim);
  int64_t keys = 0;  // of the longest unit
  for (int64_t unit = 0; unit < params.units; ++unit) {
    const KeyRange of_unit = keys_of_splits(params, splits_of_unit(params, unit));
    if (of_unit.end - of_unit.begin > keys) keys = of_unit.end - of_unit.begin;
  }
  using Tile = BackwardTile<Scores, kBackwardVectors>;
  using Products = Gradients<Scores, kBackwardVectors>;
  const int64_t numbers = Tile::scratch_numbers(p) + Products::scratch_numbers(p) +
                          own_score_gradients_size(params) + kMostPartsOfUnit * grad_query_size(p) +
                          widths * keys + Tile::numbers_of_copies(p, keys) +
                          Products::numbers_of_keys(p, keys);
  return numbers * static_cast<int64_t>(sizeof(T));
}

/// Parts begin .. end of `size` numbers, added up two and two where the first of them lies:
/// part(i, before) says where, nullptr if there is none. So may be the sum. Or it adds the part to
/// the sum `before` it, unless that is nullptr, and returns that. added(part) is called for one
/// that was added to another, which may be used anew.
template <class T, class Part, class Added>
inline T* sum_of_parts(int64_t begin, int64_t end, int64_t size, const Part& part,
                       const Added& added, T* before = nullptr) {
  using S = Simd<T>;
  if (end - begin == 1) return part(begin, before);
  const int64_t half = (begin + end + 1) / 2;
  T* const sum = sum_of_parts<T>(begin, half, size, part, added);
  T* const rest = sum_of_parts<T>(half, end, size, part, added, sum);
  if (sum == nullptr || rest == nullptr) return sum == nullptr ? rest : sum;
  if (rest == sum) return sum;
  for (int64_t x = 0; x < size; x += S::kWidth) {
    S::store(sum + x, S::load(sum + x) + S::load(rest + x));
  }
  added(rest);
  return sum;
}

/// dQ of tile `t` of a head, `size` numbers: the parts of its units, of which those have one for
/// which has_part(unit). Heads count from where partial_grad_query begins.
template <class T, class HasPart>
inline T* sum_of_units(const BackwardParams<T>& params, int64_t head, int64_t tiles, int64_t t,
                       int64_t size, HasPart has_part) {
  const auto part = [&](int64_t unit, T*) {
    const int64_t of_heads = head * params.units + unit;
    return has_part(unit) ? params.partial_grad_query + (of_heads * tiles + t) * size : nullptr;
  };
  return sum_of_parts<T>(0, params.units, size, part, [](T*) {});
}

/// dQ of a tile to where it belongs, from its sums, which may be nullptr if its rows see nothing;
/// `zeros` has room for them.
template <class T, int kRows>
inline void put_grad_query(const BackwardParams<T>& params, const RowTile<kRows>& tile,
                           bool by_rows, const T* sums, T* zeros) {
  using S = Simd<T>;
  const Problem<T>& p = params.problem;
  if (sums == nullptr) {
    set_to_zero(zeros, grad_query_size(p));
    sums = zeros;
  }
  if (by_rows) {
    const int64_t row = round_up_to_vector<T>(p.head_dim);
    with_stored<T>(p.key_value_storage, [&](auto stored) {
      const auto rows = tile.template stored_rows_in<decltype(stored)>(params.grad_query);
      for (int r = 0; r < tile.rows; ++r, sums += row) {
        const auto scaled = [&](int64_t d) __attribute__((always_inline)) {
          return S::load(sums + d) * S::set(p.scale);
        };
        int64_t d = 0;
        for (; d + S::kWidth <= p.head_dim; d += S::kWidth) {
          store_rounded<T>(rows[r] + d, scaled(d));
        }
        if (d < p.head_dim) store_first<T>(rows[r] + d, scaled(d), p.head_dim - d);
      }
    });
    return;
  }
  T scale_of_row[kRows];
  for (auto& s : scale_of_row) s = p.scale;
  tile.unpack_transposed(sums, p.head_dim, scale_of_row, params.grad_query, p.key_value_storage);
}

/// Some splits of a key/value head, all its rows.
template <class Scores, class Gradients, int kVectors>
class BackwardUnit {
 public:
  using T = typename Scores::Number;
  using Work = BackwardTile<Scores, kVectors>;
  using S = Simd<T>;
  static constexpr int kRows = Work::kRows;

  BackwardUnit(const BackwardParams<T>& params, int64_t first_head, int64_t unit, void* scratch)
      : params_(params),
        p_(params.problem),
        unit_(unit),
        head_(first_head + unit / params.units),
        splits_(splits_of_unit(params, unit % params.units)),
        work_(params, static_cast<T*>(scratch), needs_whole_tile(params)),
        gradients_(work_, work_.end_of_scratch),
        grad_query_size_(work_.query_by_rows ? grad_query_size(p_) : p_.head_dim * kRows) {
    own_score_gradients_ = work_.end_of_scratch + Gradients::scratch_numbers(p_);
    own_parts_ = own_score_gradients_ + own_score_gradients_size(params);
    T* own = own_parts_ + kMostPartsOfUnit * grad_query_size_;
    for (int64_t split = splits_.begin; split < splits_.end; ++split) {
      const KeyRange keys = keys_of_split(params, split);
      const int64_t i = split - splits_.begin;
      key_sums_[i] = KeySums<T>(p_, head_, keys, p_.head_dim, p_.scale, params.grad_key, own);
      own += (keys.end - keys.begin) * round_up_to_vector<T>(p_.head_dim);
      value_sums_[i] = KeySums<T>(p_, head_, keys, p_.value_dim, T(1), params.grad_value, own);
      own += (keys.end - keys.begin) * round_up_to_vector<T>(p_.value_dim);
    }
    copies_of_keys_ = own;
  }

  void run() {
    const int64_t tiles = backward_row_tiles(p_);
    for (int64_t t = 0; t < tiles; ++t) {
      work_.tile = t == 0 ? RowTile<kRows>::of_head(p_, head_, 0) : next_tile_;
      if (t + 1 < tiles) next_tile_ = RowTile<kRows>::of_head(p_, head_, t + 1);
      if (t == 0) load_keys();
      add_tile(t, tiles);
    }
    for (int64_t i = 0; i < splits_.end - splits_.begin; ++i) {
      if (params_.grad_key.data != nullptr) key_sums_[i].write();
      if (params_.grad_value.data != nullptr) value_sums_[i].write();
    }
  }

 private:
  void load_keys() {
    const KeyRange keys = keys_of_splits(params_, splits_);
    work_.load_keys(keys, copies_of_keys_);
    gradients_.load_keys(keys,
                         copies_of_keys_ + Work::numbers_of_copies(p_, keys.end - keys.begin));
  }

  void add_tile(int64_t t, int64_t tiles) {
    const int64_t size = grad_query_size_;
    const bool is_head = params_.units == 1;
    const bool needs_query = params_.grad_query.data != nullptr;
    if (work_.sees(keys_of_splits(params_, splits_))) {
      work_.load_rows();
      gradients_.load_rows();
    }
    work_.ahead.begin_tile(params_, work_.tile, t + 1 < tiles ? &next_tile_ : nullptr,
                           is_head && needs_query);
    if (takes_score_gradients(params_)) {
      T* const made = score_gradients_of_tile(params_, head_ * tiles + t);
      work_.score_gradients = made;
      if (made == nullptr) make_score_gradients(work_, own_score_gradients_, made);
    }
    // The first part is where the sum is to be, others lie one after the other.
    T* const sum = is_head ? own_parts_ : params_.partial_grad_query + (unit_ * tiles + t) * size;
    T* next = is_head ? own_parts_ + size : own_parts_;
    T* to = sum;
    const auto part = [&](int64_t split, T* before) -> T* {
      if (add_split(split, to, before)) return before;
      if (!needs_query || !work_.sees(keys_of_split(params_, split))) return nullptr;
      T* const written = to;
      to = next;
      next += size;
      return written;
    };
    const auto added = [&](T* last) {
      to = last;
      next = last + size;
    };
    const T* grad_query = sum_of_parts<T>(splits_.begin, splits_.end, size, part, added);
    if (is_head && needs_query) {
      put_grad_query(params_, work_.tile, work_.query_by_rows, grad_query, own_parts_);
    }
  }

  /// dQ of the keys of a split goes to grad_query, if they are seen. Or, where that leaves the
  /// same bits, it is added to `before`, unless this is nullptr: then the result is true.
  bool add_split(int64_t split, T* grad_query, T* before) {
    const bool by_rows = work_.query_by_rows;
    const int64_t row = by_rows ? round_up_to_vector<T>(p_.head_dim) : kRows;
    const RowTile<kRows>& tile = work_.tile;
    KeySums<T>& of_key = key_sums_[split - splits_.begin];
    KeySums<T>& of_value = value_sums_[split - splits_.begin];
    const bool needs_query = params_.grad_query.data != nullptr;
    alignas(64) T slope_gradient[kRows];
    set_to_zero(slope_gradient, kRows);
    bool has_grad_query = false, is_added = false;
    const KeyRange range = work_.keys_of_rows().intersection(keys_of_split(params_, split));
    for_each_block(range, work_.keys_of_all_rows(), [&](int64_t n, int block) {
      fetch_keys(n + block, split);
      const TileState state = work_.load_block(n, block);
      if (state == TileState::kEmpty) return;
      const bool partial = state == TileState::kPartial;
      if (params_.grad_mask.data != nullptr) {
        add_to_mask<kRows>(work_.ds_tile, tile, params_.grad_mask, n, block);
      }
      if (params_.slope_gradient_of_rows != nullptr) {
        work_.add_slope_gradient(n, block, slope_gradient);
      }
      if (p_.softcap != T(0)) work_.through_softcap(state, block);

      gradients_.load_block(n, block, partial);
      gradients_.add_to_keys(params_.grad_key.data != nullptr ? &of_key : nullptr,
                             params_.grad_value.data != nullptr ? &of_value : nullptr);
      if (!needs_query) return;
      // One product, of all pairs: where a part by itself has none, its 0 turns a -0 into 0.
      if (before != nullptr && n <= range.begin && n + block >= range.end && !partial) {
        is_added = has_grad_query = true;
        grad_query = before;
      }
      // Vectors without a row are read where parts are summed, and nowhere else.
      const bool writes_all =
          !partial && (by_rows || params_.splits == 1 || tile.rows > kRows - S::kWidth);
      if (!has_grad_query && !writes_all) {
        set_to_zero(grad_query, grad_query_size_);
        has_grad_query = true;
      }
      gradients_.add_to_rows(Sums<T>{grad_query, row, has_grad_query});
      has_grad_query = true;
    });
    if (needs_query && !range.empty() && !has_grad_query) {
      set_to_zero(grad_query, grad_query_size_);
    }
    if (params_.slope_gradient_of_rows != nullptr) {
      T* of_rows = params_.slope_gradient_of_rows + split * p_.batch * p_.query_heads * p_.queries;
      for (int r = 0; r < tile.rows; ++r) of_rows[tile.scalar(p_, r)] = slope_gradient[r];
    }
    return is_added;
  }

  /// Of the block of keys from `begin` on, of this split or the next: those that are new are
  /// fetched while the block before it is worked on.
  void fetch_keys(int64_t begin, int64_t split) {
    if (begin < end_of_fetched_) begin = end_of_fetched_;
    int64_t end = keys_of_split(params_, split).end;
    if (begin >= end && split + 1 < splits_.end) end = keys_of_split(params_, ++split).end;
    if (const int64_t end_of_seen = work_.keys_of_rows().end; end_of_seen < end) end = end_of_seen;
    if (begin + kBackwardBlockKeys < end) end = begin + kBackwardBlockKeys;
    if (begin >= end) return work_.ahead.begin_block({});
    end_of_fetched_ = end;
    const auto stored = [&](const Operand<const T>& x, int64_t width) {
      return next_rows<T>(work_.tile, x, p_.key_value_storage, {begin, end}, width);
    };
    const int64_t i = split - splits_.begin;
    work_.ahead.begin_block({stored(p_.key, p_.head_dim), stored(p_.value, p_.value_dim),
                             key_sums_[i].rows(begin, end), value_sums_[i].rows(begin, end)});
  }

  const BackwardParams<T>& params_;
  const Problem<T>& p_;
  int64_t unit_, head_;
  SplitRange splits_;
  RowTile<kRows> next_tile_;
  int64_t end_of_fetched_ = 0;  // keys
  Work work_;
  Gradients gradients_;
  int64_t grad_query_size_;
  T* own_score_gradients_;  // of weights, of a tile
  T* own_parts_;            // of dQ of a tile, kMostPartsOfUnit
  KeySums<T> key_sums_[kMostSplits], value_sums_[kMostSplits];
  T* copies_of_keys_;
};

/// dQ of one tile of rows, of which each unit left its part.
template <class T, int kVectors>
inline void sum_tile(const BackwardParams<T>& params, int64_t first_head, int64_t unit,
                     void* scratch) {
  constexpr int kRows = kVectors * Simd<T>::kWidth;
  const Problem<T>& p = params.problem;
  const int64_t tiles = backward_row_tiles(p);
  const int64_t head = unit / tiles, t = unit % tiles;
  const auto tile = RowTile<kRows>::of_head(p, first_head + head, t);
  const KeyRange seen = keys_of_any(p.band, tile.first_query(), tile.last_query(), p.keys);
  const auto has_part = [&](int64_t of_head) {
    const KeyRange keys = keys_of_splits(params, splits_of_unit(params, of_head));
    return !seen.intersection(keys).empty();
  };
  const T* sum = sum_of_units(params, head, tiles, t, grad_query_size(p), has_part);
  put_grad_query(params, tile, sums_query_by_rows(p), sum, static_cast<T*>(scratch));
}

/// Units count those of first_head, then of the next head; partial_grad_query begins with
/// first_head.
template <class Scores, template <class, int> class Gradients, class T>
inline void attention_backward(const BackwardParams<T>& params, int64_t first_head, int64_t unit,
                               void* scratch) {
  with_backward_vectors(params.problem, [&](auto vectors) {
    using Products = Gradients<Scores, vectors()>;
    BackwardUnit<Scores, Products, vectors()>(params, first_head, unit, scratch).run();
  });
}

/// One tile of rows of one key/value head. Units count the row tiles of first_head, then of the
/// next head.
template <class T>
inline void sum_grad_query(const BackwardParams<T>& params, int64_t first_head, int64_t unit,
                           void* scratch) {
  with_backward_vectors(params.problem, [&](auto vectors) {
    sum_tile<T, vectors()>(params, first_head, unit, scratch);
  });
}

/// Scores says how S and dP are multiplied (score_products.inc.h), Gradients how P and dS are.
template <class Scores, template <class, int> class Gradients = GradientProducts,
          class T = typename Scores::Number>
constexpr BackwardKernels<T> make_backward_kernels() {
  return {backward_row_tiles<T>,
          backward_splits<T>,
          least_units<T>,
          backward_scratch_bytes<Scores, Gradients, T>,
          partial_grad_query_size<T>,
          attention_backward<Scores, Gradients, T>,
          sum_grad_query<T>,
          score_gradients_size<T>,
          score_gradients<Scores, T>,
          mask_gradient_scratch_bytes<Scores, T>,
          mask_gradient<Scores, T>};
}

}  // namespace qkv::kernels::QKV_ISA
