#pragma once

#include "kernels/cpu/attention_backward.inc.h"
#include "kernels/cpu/backward_rows.inc.h"
#include "kernels/cpu/few_rows.inc.h"
#include "kernels/cpu/few_rows_of_numbers.inc.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/key_sums.inc.h"
#include "kernels/cpu/mask_gradient.inc.h"
#include "kernels/cpu/worth_fetching.inc.h"

// Backward attention for as few query rows of a key/value head as few_rows.inc.h takes. As there,
// vectors run along rows, of K, which are read twice, of V, which are read once, and of dK and dV,
// which are written once, where they belong:
//
//     S[k][r] = <K_k, Q_r>           dP[k][r] = <V_k, dO_r>       sums over lanes
//     dV_k = sum of P[k][r] · dO_r   dK_k = sum of dS[k][r] · Q_r
//     dQ_r += dS[k][r] · K_k         in registers
//
// The scores are the forward's to the bit, so that its lse serves as it is. S, dP, and then P and
// dS, are dense; where masks, softcap, ALiBi or dropout change them they lie as in other tiles
// meanwhile, a row in a lane, so that it is the same code (backward_rows.inc.h).
//
// A unit of work is a split of the keys of a head, as in attention_backward.inc.h. It leaves dS of
// its keys where a mask's gradient is asked for, a few numbers for each row of K, and a pass over
// those adds them up, whatever the mask is broadcast over.

namespace qkv::kernels::QKV_ISA {

/// dQ of all rows of a head, in whole vectors.
template <class T>
inline int64_t few_rows_grad_query_size(const Problem<T>& p) {
  return rows_of_kv_head(p) * round_up_to_vector<T>(p.head_dim);
}

/// Tiles of the keys of a block and a vector of rows: what work.softmax_backward takes.
template <class T>
struct PairsInLanes {
  T *scores, *grads, *caps;
  bool are_clear = false;

  /// Lanes without a row are read as well.
  void clear() {
    if (are_clear) return;
    set_to_zero(scores, kFewRowsBlockKeys * Simd<T>::kWidth);
    set_to_zero(grads, kFewRowsBlockKeys * Simd<T>::kWidth);
    are_clear = true;
  }
};

/// How scratch is laid out.
template <class Products, class T, int kRows>
struct FewRowsMemory {
  using Query = typename Products::Query;

  T *scores, *grads;  // [keys][kRows]: S, dP, then P, dS
  PairsInLanes<T> in_lanes;
  T* bias;                        // [keys][a vector]
  T *query_rows, *grad_out_rows;  // [kRows][D], [kRows][Dv], whole vectors
  T* grad_query;                  // [kRows][D], whole vectors
  T* lines;                       // [keys][D] or [keys][Dv], of a gradient not written in place
  Query *query, *grad_out;        // as they are multiplied
  uint8_t *kept, *stays;          // bits of pairs
  int64_t bytes = 0;

  /// Only counts them if scratch is nullptr.
  FewRowsMemory(const Problem<T>& p, void* scratch) {
    constexpr int64_t kBlock = kFewRowsBlockKeys, kWidth = Simd<T>::kWidth;
    const int64_t key_row = round_up_to_vector<T>(p.head_dim),
                  value_row = round_up_to_vector<T>(p.value_dim);
    char* const memory = static_cast<char*>(scratch);
    const auto take = [&](int64_t count, auto*&... parts) {
      const auto one = [&](auto*& part) {
        part = memory == nullptr ? nullptr : reinterpret_cast<decltype(part + 0)>(memory + bytes);
        bytes += whole_lines(count * static_cast<int64_t>(sizeof(*part)));
      };
      (one(parts), ...);
    };
    take(kBlock * kRows, scores, grads);
    take(kBlock * kWidth, in_lanes.scores, in_lanes.grads, in_lanes.caps, bias);
    take(kRows * key_row, query_rows, grad_query);
    take(kRows * value_row, grad_out_rows);
    take(kBlock * (key_row > value_row ? key_row : value_row), lines);
    take(Products::query_size(kRows, p.head_dim), query);
    take(Products::query_size(kRows, p.value_dim), grad_out);
    take(kBlock / 8 * kWidth, kept, stays);
  }
};

/// in_lanes[key][a vector] = dense[key][kRows]; lanes after the rows are left alone.
template <int kRows, class T>
inline void put_in_lanes(int keys, const T* dense, T* in_lanes) {
  for (int k = 0; k < keys; ++k) {
    for (int r = 0; r < kRows; ++r) in_lanes[k * Simd<T>::kWidth + r] = dense[k * kRows + r];
  }
}

/// The other way round, of the first `rows`.
template <int kRows, class T>
inline void take_from_lanes(int keys, int rows, const T* in_lanes, T* dense) {
  for (int k = 0; k < keys; ++k) {
    for (int r = 0; r < kRows; ++r) {
      dense[k * kRows + r] = r < rows ? in_lanes[k * Simd<T>::kWidth + r] : T(0);
    }
  }
}

/// Where dS of a row is left, key by key.
template <class T, int kRows>
inline T* score_gradient_of_row(const BackwardParams<T>& params, const RowTile<kRows>& tile,
                                int r) {
  return params.score_gradient_of_rows + tile.scalar(params.problem, r) * params.problem.keys;
}

/// S[key][kRows] and dP become P and dS. What they add to the gradient of a row's slope goes to
/// slope_gradient[row], unless it is nullptr, and dS, if that is asked for, to
/// score_gradient_of_rows.
template <int kRows, class T>
QKV_ONE_COPY void weigh_few_rows(const BackwardRows<T, 1>& work, int64_t first_key, int keys,
                                 TileState state, T* scores, T* grads, PairsInLanes<T>& in_lanes,
                                 T* slope_gradient) {
  using S = Simd<T>;
  const Problem<T>& p = work.p;
  const bool partial = state == TileState::kPartial;
  const ScoreRows<T, 1, S::kWidth> rows(p, work.mask, work.alibi, first_key, 0, 0, state);
  if (rows.changes() || p.dropout.threshold != 0) {
    in_lanes.clear();
    put_in_lanes<kRows>(keys, scores, in_lanes.scores);
    put_in_lanes<kRows>(keys, grads, in_lanes.grads);
    work.template softmax_backward<1>(first_key, 0, keys, 0, partial, in_lanes.scores,
                                      in_lanes.grads, in_lanes.caps);
    if (slope_gradient != nullptr) {
      work.add_slope_gradient(first_key, keys, in_lanes.grads, slope_gradient);
    }
    if (work.params.score_gradient_of_rows != nullptr) {
      for (int r = 0; r < work.tile.rows; ++r) {
        T* const row = score_gradient_of_row(work.params, work.tile, r) + first_key;
        for (int k = 0; k < keys; ++k) row[k] = in_lanes.grads[k * S::kWidth + r];
      }
    }
    if (rows.is_capped()) {
      work.template through_softcap<1>(0, keys, 0, partial, in_lanes.caps, in_lanes.grads);
    }
    take_from_lanes<kRows>(keys, work.tile.rows, in_lanes.scores, scores);
    take_from_lanes<kRows>(keys, work.tile.rows, in_lanes.grads, grads);
    return;
  }
  const auto in_all_lanes = [](typename S::Number of_rows) {
    return fold_lanes<T, kRows>(of_rows, [](T first, T) { return first; });
  };
  auto numbers = work.numbers_of(0);
  numbers = {in_all_lanes(numbers.lse), in_all_lanes(numbers.lse_rest),
             in_all_lanes(numbers.delta)};
  for (int x = keys * kRows; x % S::kWidth != 0; ++x) scores[x] = grads[x] = T(0);
  // Of a row that is not there S and dP are NaN where a key is infinite.
  alignas(64) uint8_t is_there[S::kWidth];
  for (int l = 0; l < S::kWidth; ++l) is_there[l] = l % kRows < work.tile.rows;
  const auto there = S::bit_of_bytes(is_there, 0);
  for (int x = 0; x < keys * kRows; x += S::kWidth) {
    const auto pair = work.template gradients_of</*kMasked=*/false, /*kDropout=*/false>(
        0, 0, numbers, S::load(scores + x) - numbers.lse, S::load(grads + x));
    S::store(scores + x, S::select(there, pair.weight, S::zero()));
    S::store(grads + x, S::select(there, pair.gradient, S::zero()));
  }
}

/// Of all rows of key/value head `head`, kRows of them or fewer.
template <class Products, class T, class Stored, int kRows>
class FewRowsBackward {
 public:
  FewRowsBackward(const BackwardParams<T>& params, int64_t head, void* scratch)
      : params_(params),
        p_(params.problem),
        key_row_(round_up_to_vector<T>(p_.head_dim)),
        value_row_(round_up_to_vector<T>(p_.value_dim)),
        memory_(p_, scratch),
        work_(params) {
    work_.tile = RowTile<kLanes>::of_head(p_, head, 0);
    work_.mask = {memory_.kept, memory_.bias};
    work_.stays = memory_.stays;
    keys_ = work_.tile.template stored_keys_of_head<Stored>(p_.key);
    values_ = work_.tile.template stored_keys_of_head<Stored>(p_.value);
  }

  /// Writes the gradients of some keys and their values.
  void run(KeyRange keys) {
    set_to_zero(memory_.grad_query, kRows * key_row_);
    if (params_.score_gradient_of_rows != nullptr) {  // 0 of keys that are not seen
      for (int r = 0; r < work_.tile.rows; ++r) {
        T* const row = score_gradient_of_row(params_, work_.tile, r) + keys.begin;
        __builtin_memset(row, 0, (keys.end - keys.begin) * sizeof(T));
      }
    }
    const KeyRange seen = work_.keys_of_rows().intersection(keys);
    if (seen.empty()) return write_zeros(keys);
    load_rows();
    const int64_t first = first_of_eight(seen.begin);
    write_zeros({keys.begin, first});
    for (int64_t n = first; n < seen.end; n += kFewRowsBlockKeys) {
      const KeyRange block = KeyRange{n, n + kFewRowsBlockKeys}.intersection({n, seen.end});
      const KeyRange next = KeyRange{block.end, block.end + kFewRowsBlockKeys};
      add_block(block, next.intersection({0, seen.end}));
    }
    write_zeros({seen.end, keys.end});
  }

  const RowTile<Simd<T>::kWidth>& tile() const { return work_.tile; }
  /// The sums over the keys of the last run: dQ / scale, in rows of whole vectors, and what each
  /// row adds to the gradient of its slope, if that is asked for.
  T* grad_query() const { return memory_.grad_query; }
  const T* slope_gradient() const { return slope_gradient_; }

 private:
  using S = Simd<T>;
  using Numbers = FewRowsOfNumbers<T, Stored>;
  static constexpr int kLanes = S::kWidth;

  void load_rows() {
    const auto query = work_.tile.template stored_rows_in<Stored>(p_.query),
               grad_out = work_.tile.template stored_rows_in<Stored>(params_.grad_out),
               out = work_.tile.template stored_rows_in<Stored>(params_.out),
               out_rest = work_.tile.template stored_rows_in<Stored>(params_.out_rest);
    const Stored *queries[kRows], *grads_out[kRows];
    for (int r = 0; r < kRows; ++r) {
      queries[r] = r < work_.tile.rows ? query[r] : nullptr;
      grads_out[r] = r < work_.tile.rows ? grad_out[r] : nullptr;
    }
    Products::template pack_query<kRows>(queries, p_.head_dim, p_.scale, memory_.query);
    Products::template pack_query<kRows>(grads_out, p_.value_dim, T(1), memory_.grad_out);
    Numbers::template pack_query<kRows>(queries, p_.head_dim, p_.scale, memory_.query_rows);
    Numbers::template pack_query<kRows>(grads_out, p_.value_dim, T(1), memory_.grad_out_rows);
    work_.load_numbers(
        [&](int r) { return dot_with_exact<T>(grad_out[r], out[r], out_rest[r], p_.value_dim); });
  }

  void add_block(KeyRange block, KeyRange next) {
    const int count = static_cast<int>(block.end - block.begin);
    const TileState state = work_.load_pairs(block.begin, count);
    if (state == TileState::kEmpty) return write_zeros(block);
    const Stored* const keys = keys_ + block.begin * p_.key.row_stride;
    const Stored* const values = values_ + block.begin * p_.value.row_stride;
    Products::template scores<kRows>(
        count, p_.head_dim, keys, p_.key.row_stride, memory_.query, p_.scale, memory_.scores,
        next_rows_of_few<kRows>(p_, work_.tile, p_.value, block, p_.value_dim));
    if (params_.grad_weights.data != nullptr) {
      load_grad_weights(block.begin, count);
    } else {
      Products::template scores<kRows>(
          count, p_.value_dim, values, p_.value.row_stride, memory_.grad_out, T(1), memory_.grads,
          next_rows_of_few<kRows>(p_, work_.tile, p_.key, next, p_.head_dim));
    }
    weigh_few_rows<kRows>(work_, block.begin, count, state, memory_.scores, memory_.grads,
                          memory_.in_lanes,
                          params_.slope_gradient_of_rows != nullptr ? slope_gradient_ : nullptr);

    const bool partial = state == TileState::kPartial;
    const bool skips =
        partial && !(all_finite<T>(memory_.query_rows, key_row_, kRows, key_row_) &&
                     all_finite<T>(memory_.grad_out_rows, value_row_, kRows, value_row_));
    if (params_.grad_value.data != nullptr) {
      write_gradient(params_.grad_value, block, p_.value_dim, memory_.scores, memory_.grad_out_rows,
                     skips);
    }
    if (params_.grad_key.data != nullptr) {
      write_gradient(params_.grad_key, block, p_.head_dim, memory_.grads, memory_.query_rows,
                     skips);
    }
    if (params_.grad_query.data == nullptr) return;
    if (partial && !all_finite<T>(keys, p_.key.row_stride, count, p_.head_dim)) {
      kept_values_of_few_rows<kRows>(count, p_.head_dim, keys, p_.key.row_stride, memory_.grads,
                                     memory_.kept, work_.tile.rows, memory_.grad_query, key_row_);
    } else {
      Products::template add_values<kRows>(count, p_.head_dim, keys, p_.key.row_stride,
                                           memory_.grads, memory_.grad_query, key_row_, NextRows{});
    }
  }

  /// In the place of dP, what came for the weights.
  QKV_ONE_COPY void load_grad_weights(int64_t first_key, int count) {
    if (work_.tile.rows < kRows) set_to_zero(memory_.grads, count * kRows);
    const auto rows = work_.tile.template stored_rows_in<Stored>(params_.grad_weights);
    for (int r = 0; r < work_.tile.rows; ++r) {
      const Stored* const from = rows[r] + first_key;
      for (int k = 0; k < count; ++k) memory_.grads[k * kRows + r] = static_cast<T>(from[k]);
    }
  }

  /// Of the keys of a block: the sum over rows of weights[k][r] · rows[r], if `skips` over those
  /// that keep a key.
  QKV_ONE_COPY void write_gradient(const Operand<T>& gradient, KeyRange block, int64_t width,
                                   const T* weights, const T* rows, bool skips) {
    const int count = static_cast<int>(block.end - block.begin);
    const int64_t row = round_up_to_vector<T>(width);
    Stored* const to = rows_of_gradient(gradient, block);
    if (!skips) {
      Numbers::template rows_of_keys<kRows>(count, width, weights, rows, to, gradient.row_stride);
      return;
    }
    kept_rows_of_keys(count, row, weights, rows);
    write_rows(memory_.lines, row, count, width, to, gradient);
  }

  void kept_rows_of_keys(int count, int64_t row, const T* weights, const T* rows) {
    set_to_zero(memory_.lines, count * row);
    for (int k = 0; k < count; ++k) {
      for (int r = 0; r < work_.tile.rows; ++r) {
        if ((memory_.kept[k / 8 * kLanes + r] >> (k % 8) & 1) == 0) continue;
        T* line = memory_.lines + k * row;
        for (int64_t d = 0; d < row; ++d) {
          line[d] = S::fma(weights[k * kRows + r], rows[r * row + d], line[d]);
        }
      }
    }
  }

  QKV_ONE_COPY void write_zeros(KeyRange keys) {
    if (keys.empty()) return;
    const auto write = [&](const Operand<T>& gradient, int64_t width) {
      if (gradient.data == nullptr) return;
      set_to_zero(memory_.lines, width);
      write_rows(memory_.lines, 0, keys.end - keys.begin, width, rows_of_gradient(gradient, keys),
                 gradient);
    };
    write(params_.grad_key, p_.head_dim);
    write(params_.grad_value, p_.value_dim);
  }

  Stored* rows_of_gradient(const Operand<T>& gradient, KeyRange keys) const {
    return work_.tile.template stored_keys_of_head<Stored>(gradient) +
           keys.begin * gradient.row_stride;
  }

  const BackwardParams<T>& params_;
  const Problem<T>& p_;
  int64_t key_row_, value_row_;  // of rows in whole vectors
  FewRowsMemory<Products, T, kRows> memory_;
  BackwardRows<T, 1> work_;  // of the rows, each in a lane
  typename Products::template Registers<kRows> registers_;
  const Stored *keys_, *values_;
  alignas(64) T slope_gradient_[Simd<T>::kWidth] = {};
};

/// f(the products of few rows that go with OfForward, those of a forward tile; a number as stored;
/// how many rows are multiplied as a Constant)
template <class OfForward, class T, class F>
inline void with_products_of_few_rows(const Problem<T>& p, F f) {
  OfForward::with_few_rows(p.key_value_storage, [&](auto stored, auto products) {
    with_row_count<decltype(products)>(rows_of_kv_head(p),
                                       [&](auto rows) { f(products, stored, rows); });
  });
}

template <class OfForward, class T>
inline int64_t few_rows_backward_scratch_bytes(const BackwardParams<T>& params) {
  int64_t bytes = 0;
  with_products_of_few_rows<OfForward>(params.problem, [&](auto products, auto, auto rows) {
    bytes = FewRowsMemory<decltype(products), T, rows()>(params.problem, nullptr).bytes;
  });
  return bytes;
}

template <class T>
inline int64_t few_rows_partial_grad_query_size(const BackwardParams<T>& params) {
  return params.splits * few_rows_grad_query_size(params.problem);
}

/// Scales dQ of a head and writes it where it belongs.
template <class T>
inline void write_grad_query_of_few_rows(const BackwardParams<T>& params, int64_t head,
                                         T* grad_query) {
  const Problem<T>& p = params.problem;
  const int64_t row = round_up_to_vector<T>(p.head_dim);
  const auto tile = RowTile<Simd<T>::kWidth>::of_head(p, head, 0);
  for (int64_t x = 0; x < few_rows_grad_query_size(p); ++x) grad_query[x] *= p.scale;
  with_stored<T>(p.key_value_storage, [&](auto stored) {
    const auto rows = tile.template stored_rows_in<decltype(stored)>(params.grad_query);
    for (int r = 0; r < tile.rows; ++r) {
      write_rows(grad_query + r * row, row, 1, p.head_dim, rows[r], params.grad_query);
    }
  });
}

/// One split of one key/value head, as attention_backward.
template <class OfForward, class T>
inline void few_rows_backward(const BackwardParams<T>& params, int64_t first_head, int64_t unit,
                              void* scratch) {
  const Problem<T>& p = params.problem;
  const int64_t head = first_head + unit / params.splits, split = unit % params.splits;
  with_products_of_few_rows<OfForward>(p, [&](auto products, auto stored, auto rows) {
    FewRowsBackward<decltype(products), T, decltype(stored), rows()> backward(params, head,
                                                                              scratch);
    backward.run(keys_of_split(params, split));
    if (params.slope_gradient_of_rows != nullptr) {
      T* of_rows = params.slope_gradient_of_rows + split * p.batch * p.query_heads * p.queries;
      for (int r = 0; r < backward.tile().rows; ++r) {
        of_rows[backward.tile().scalar(p, r)] = backward.slope_gradient()[r];
      }
    }
    if (params.grad_query.data == nullptr) return;
    if (params.splits == 1)
      return write_grad_query_of_few_rows(params, head, backward.grad_query());
    const int64_t size = few_rows_grad_query_size(p);
    T* part = params.partial_grad_query + unit * size;
    for (int64_t x = 0; x < size; ++x) part[x] = backward.grad_query()[x];
  });
}

/// A unit is a key/value head, counted from first_head.
template <class T>
inline void sum_grad_query_of_few_rows(const BackwardParams<T>& params, int64_t first_head,
                                       int64_t head, void*) {
  const auto has_part = [](int64_t) { return true; };
  T* sum = sum_of_units(params, head, /*tiles=*/1, /*t=*/0,
                        few_rows_grad_query_size(params.problem), has_part);
  write_grad_query_of_few_rows(params, first_head + head, sum);
}

template <class T>
inline int64_t one_unit(const Problem<T>&) {
  return 1;
}

template <class T>
inline int64_t no_scratch(const BackwardParams<T>&) {
  return 0;
}

/// The same unit of the mask's gradient as in mask_gradient, from dS of all rows.
template <class T>
inline void mask_gradient_of_few_rows(const BackwardParams<T>& params, int64_t unit, void*) {
  const Operand<T>& mask = params.grad_mask;
  const auto add = [&](auto* to, const T* from, KeyRange keys) {
    if (mask.column_stride == 1) {
      for (int64_t k = keys.begin; k < keys.end; ++k) to[k] += from[k];
    } else {
      for (int64_t k = keys.begin; k < keys.end; ++k) to[k * mask.column_stride] += from[k];
    }
  };
  for_each_tile_of_mask(params.problem, mask, unit, [&](const auto& tile, KeyRange keys) {
    for (int r = 0; r < tile.rows; ++r) {
      const T* const from = score_gradient_of_row(params, tile, r);
      if (is_line(mask)) {
        add(tile.template stored_row<double>(mask, r), from, keys);
      } else {
        add(tile.row(mask, r), from, keys);
      }
    }
  });
}

template <class OfForward, class T = typename OfForward::Real>
constexpr BackwardKernels<T> make_few_rows_backward_kernels() {
  return {one_unit<T>,
          long_splits<T>,
          units_of_one_split<T>,
          few_rows_backward_scratch_bytes<OfForward, T>,
          few_rows_partial_grad_query_size<T>,
          few_rows_backward<OfForward, T>,
          sum_grad_query_of_few_rows<T>,
          /*score_gradients_size=*/nullptr,
          /*score_gradients=*/nullptr,
          no_scratch<T>,
          mask_gradient_of_few_rows<T>};
}

}  // namespace qkv::kernels::QKV_ISA
