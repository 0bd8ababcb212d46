#pragma once

#include "kernels/cpu/amx_backward_memory.inc.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/mask_gradient.inc.h"

// The backward of bfloat16 by AMX: the splits, tiles and steps of attention_backward.inc.h, on
// operands in 16 bits.
//
//     S  keys [ rows -> ] = K  x Qᵀ           dP  keys [ rows -> ] = V  x dOᵀ
//     dV keys [ Dv -> ]  += P  x dO           dK  keys [ D -> ]   += dS x Q
//     dQᵀ   D [ rows -> ] += Kᵀ x dS
//
// Q, K, V and dO are multiplied as they are. P and dS would err by 2^-9 each if they were rounded,
// as much as the rounded result: they are cut into two bfloat16 numbers each, and multiplied twice.
//
// Keys and rows are cut into squares (amx_squares.inc.h). Squares of which no pair is kept are left
// out of all products.
//
// 0 · NaN is NaN, so what is not finite is left out of K, Q and dO where they meet pairs that are
// not kept, and added afterwards for those that are.

namespace qkv::kernels::QKV_ISA {

/// 16 numbers as bfloat16, or `count` of them.
QKV_INLINE void store_rounded(BFloat16* to, int64_t count, __m512 x) {
  const auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
  _mm256_mask_storeu_epi16(to, first_lanes(count), rounded);
}

/// scale · dQᵀ of a tile to where dQ is.
template <int kRows>
inline void write_grad_query(const BackwardParams<float>& params, const RowTile<kRows>& tile,
                             const float* grad_query_t) {
  const int64_t width = params.problem.head_dim;
  const auto scale = _mm512_set1_ps(params.problem.scale);
  for (int r = 0; r < tile.rows; r += kTileRows) {
    for (int64_t d = 0; d < width; d += kTileRows) {
      __m512 lines[kTileRows];
#pragma GCC unroll 16
      for (int c = 0; c < kTileRows; ++c) {
        lines[c] = _mm512_loadu_ps(grad_query_t + (d + c) * kRows + r) * scale;
      }
      transpose<float>(lines);
      for (int l = 0; l < kTileRows && r + l < tile.rows; ++l) {
        BFloat16* to = tile.template stored_row<BFloat16>(params.grad_query, r + l);
        store_rounded(to + d, width - d, lines[l]);
      }
    }
  }
}

/// One split of a key/value head.
class AmxBackward : BackwardRows<float, kAmxBackwardVectors> {
 public:
  using Memory = AmxBackwardMemory;
  static constexpr int kSquares = Memory::kSquares;
  static constexpr int64_t kTile = kTileRows * kTileDepth;  // numbers in bfloat16
  static constexpr int64_t kSums = kTileRows * kTileRows;   // numbers in float32

  AmxBackward(const BackwardParams<float>& params, int64_t head, int64_t split, void* scratch)
      : BackwardRows(params),
        m_(params, scratch),
        head_(head),
        split_(split),
        keys_(keys_of_split(params, split)),
        depths_(amx_depths(p.head_dim)),
        value_depths_(amx_depths(p.value_dim)),
        columns_(amx_columns(p.head_dim)),
        value_columns_(amx_columns(p.value_dim)) {
    mask.bits = m_.bits;
    mask.bias = m_.bias;
    stays = m_.stays;
  }

  /// partial: where dQᵀ of each tile is left, or nullptr if this is the only split.
  void run(int64_t tiles, float* partial) {
    const bool need_query = params.grad_query.data != nullptr;
    for (int64_t t = 0; t < tiles; ++t) {
      tile = RowTile<kRows>::of_head(p, head_, t);
      if (t == 0) pack_keys();
      if (partial != nullptr) m_.grad_query_t = partial + t * columns_ * kTileRows * kRows;
      if (need_query) set_to_zero(m_.grad_query_t, columns_ * kTileRows * kRows);
      set_to_zero(slope_gradient_, kRows);
      const KeyRange range = keys_of_rows().intersection(keys_);
      if (!range.empty()) {
        load_rows();
        add_keys(range);
      }
      if (params.slope_gradient_of_rows != nullptr) {
        float* of_rows =
            params.slope_gradient_of_rows + split_ * p.batch * p.query_heads * p.queries;
        for (int r = 0; r < tile.rows; ++r) of_rows[tile.scalar(p, r)] = slope_gradient_[r];
      }
      if (need_query && partial == nullptr) write_grad_query(params, tile, m_.grad_query_t);
    }
    if (params.grad_key.data != nullptr) {
      write(m_.grad_key, p.scale, p.head_dim, columns_, params.grad_key);
    }
    if (params.grad_value.data != nullptr) {
      write(m_.grad_value, 1.0f, p.value_dim, value_columns_, params.grad_value);
    }
  }

  /// The mask's gradient alone, of these rows and of those `keys` that the split has.
  void add_rows_to_mask(const RowTile<kRows>& rows, KeyRange keys) {
    tile = rows;
    pack_keys();
    load_rows();
    add_keys(keys.intersection(keys_));
  }

 private:
  void add_keys(KeyRange range) {
    const int64_t first = keys_.begin + (range.begin - keys_.begin) / kSquare * kSquare;
    for (int64_t n = first; n < range.end; n += kBackwardBlockKeys) {
      const int64_t left = range.end - n;
      add_block(n, left < kBackwardBlockKeys ? static_cast<int>(left) : kBackwardBlockKeys);
    }
  }

  void pack_keys() {
    const int64_t count = keys_.end - keys_.begin;
    const BFloat16* key =
        tile.stored_keys_of_head<BFloat16>(p.key) + keys_.begin * p.key.row_stride;
    const BFloat16* value =
        tile.stored_keys_of_head<BFloat16>(p.value) + keys_.begin * p.value.row_stride;
    pack_key_lines(key, p.key.row_stride, count, p.head_dim, m_.key_lines);
    pack_key_lines(value, p.value.row_stride, count, p.value_dim, m_.value_lines);
    if (!multiplies_) return;
    pack_key_columns(key, p.key.row_stride, count, p.head_dim, m_.key_columns, m_.poisoned);
    const int64_t halves = 2 * ((count + kSquare - 1) / kSquare);
    set_to_zero(m_.grad_key, halves * columns_ * kSums);
    set_to_zero(m_.grad_value, halves * value_columns_ * kSums);
  }

  void load_rows() {
    rows_finite_ = pack_rows(tile, p.query, p.head_dim, m_.query_columns, m_.query_rows);
    rows_finite_ &=
        pack_rows(tile, params.grad_out, p.value_dim, m_.grad_out_columns, m_.grad_out_rows);
    const auto grad_out = tile.stored_rows_in<BFloat16>(params.grad_out),
               out = tile.stored_rows_in<BFloat16>(params.out),
               out_rest = tile.stored_rows_in<BFloat16>(params.out_rest);
    load_numbers([&](int r) {
      return dot_with_exact<float>(grad_out[r], out[r], out_rest[r], p.value_dim);
    });
  }

  void add_block(int64_t first_key, int count) {
    const TileState state = load_pairs(first_key, count);
    if (state == TileState::kEmpty) return;
    partial_ = state == TileState::kPartial;
    if (!partial_ && tile.rows % kSquare != 0) {  // lanes without a row are not kept
      for (int g = 0; g < (count + 7) / 8; ++g) {
        __builtin_memset(m_.bits + g * kRows, 0xff, static_cast<unsigned>(tile.rows));
        __builtin_memset(m_.bits + g * kRows + tile.rows, 0,
                         static_cast<unsigned>(kRows - tile.rows));
      }
      partial_ = true;
    }
    Steps key_steps[kSquares];
    for (int first = 0; first < count; first += kSquare) {
      add_square_row(first_key, first, count - first < kSquare ? count - first : kSquare,
                     key_steps);
    }
    if (params.grad_query.data == nullptr) return;
    const int64_t square = (first_key - keys_.begin) / kSquare;
    for (int g = 0; g < kSquares; ++g) {
      if (key_steps[g].count() == 0) continue;
      multiply_high(columns_, key_steps[g],
                    {m_.key_columns + square * columns_ * kTile, 1, 0, columns_},
                    {m_.ds_pairs + 4 * g * kTile, 1, 2, 4 * kSquares},
                    {m_.grad_query_t + g * kSquare, kRows, kTileRows * kRows, kTileRows});
    }
  }

  /// `count` keys from `offset` on in a block, with all rows.
  void add_square_row(int64_t first_key, int offset, int count, Steps* key_steps) {
    const int64_t square = (first_key + offset - keys_.begin) / kSquare;
    const bool poisoned = multiplies_ && m_.poisoned[square] != 0;
    keeps_ = poisoned || (multiplies_ && !rows_finite_);
    Steps rows;
    for (int g = 0; g * kSquare < tile.rows; ++g) {
      const TileState state =
          partial_ ? state_of_square(m_.bits + offset / 8 * kRows + g * kSquare, kRows, count)
                   : TileState::kFull;
      if (state == TileState::kEmpty) continue;
      rows.add(g);
      key_steps[g].add(offset / kSquare);
      // All in one place, which stays in a first-level cache, unless they are needed again.
      const int place = keeps_ ? g * kSquare : 0;
      multiply_square(square, first_key + offset, count, g, place);
      split_square(first_key, offset, count, g, place, state == TileState::kPartial);
    }
    if (rows.count() == 0) return;
    if (params.grad_value.data != nullptr) {
      multiply_wide(value_columns_, rows, {m_.p_lines, 1, 2, 4},
                    {m_.grad_out_rows, 1, 0, value_columns_},
                    {m_.grad_value + 2 * square * value_columns_ * kSums, kTileRows,
                     value_columns_ * kSums, kSums});
    }
    if (params.grad_key.data != nullptr) {
      multiply_wide(
          columns_, rows, {m_.ds_lines, 1, 2, 4}, {m_.query_rows, 1, 0, columns_},
          {m_.grad_key + 2 * square * columns_ * kSums, kTileRows, columns_ * kSums, kSums});
    }
    if (keeps_) add_non_finite(first_key + offset, offset, count, poisoned);
  }

  /// S and dP of `count` keys from first_key on, which are in `square`, go to columns of m_.scores
  /// and m_.grads from `place` on.
  void multiply_square(int64_t square, int64_t first_key, int count, int g, int place) const {
    const auto multiply = [&](const BFloat16* keys, const BFloat16* rows, int64_t depths, float* to)
        __attribute__((always_inline)) {
      multiply_tiles<2, 2, false, InParts::kNone>(
          Steps(depths), {keys + 2 * square * depths * kTile, depths, 0, 1},
          {rows + 2 * g * depths * kTile, depths, 0, 1},
          {to + place, kRows, kTileRows * kRows, kTileRows});
    };
    multiply(m_.key_lines, m_.query_columns, depths_, m_.scores);
    if (params.grad_weights.data != nullptr) {
      load_grad_weights<2>(first_key, count, 2 * g, m_.grads + place);
    } else {
      multiply(m_.value_lines, m_.grad_out_columns, value_depths_, m_.grads);
    }
  }

  /// These become P and dS, in parts.
  void split_square(int64_t first_key, int offset, int count, int g, int place, bool partial) {
    constexpr int kCount = 2;
    const int vector = kCount * g;
    float* scores = m_.scores + place;
    float* grads = m_.grads + place;
    const bool of_slopes = params.slope_gradient_of_rows != nullptr;
    const bool of_mask = params.grad_mask.data != nullptr;
    auto scale = S::set(p.scale);
    if (p.softcap != 0.0f || mask.has_bias(p) || p.alibi_slopes.data != nullptr) {
      for (int k = 0; k < count; ++k) {
        for (int v = 0; v < kCount; ++v) {
          float* s = scores + k * kRows + v * S::kWidth;
          S::store(s, S::load(s) * scale);
        }
      }
      scale = S::set(1.0f);
      const ScoreRows<float, kCount, kRows> rows(p, mask, alibi, first_key + offset, offset, vector,
                                                 TileState::kFull);
      rows.cap(count, scores, m_.caps + place);
      rows.bias(count, scores);
    }
    const RowNumbers numbers[kCount] = {numbers_of(vector), numbers_of(vector + 1)};
    const auto with = [&](auto masked, auto drops) {
      const auto pairs_of = [&](int k, int v) __attribute__((always_inline)) {
        const int64_t x = k * kRows + v * S::kWidth;
        return gradients_of<masked() != 0, drops() != 0>(
            offset + k, vector + v, numbers[v],
            rounded_product(S::load(scores + x), scale) - numbers[v].lse, S::load(grads + x));
      };
      const auto keep = [&](int k, int v, const Pairs& pairs) __attribute__((always_inline)) {
        S::store(scores + k * kRows + v * S::kWidth, pairs.weight);
        S::store(grads + k * kRows + v * S::kWidth, pairs.gradient);
      };
      if (!of_slopes && !of_mask && p.softcap == 0.0f) {
        split_pairs(
            offset, count, g, [&](int k, int v) __attribute__((always_inline)) {
              const Pairs pairs = pairs_of(k, v);
              if (keeps_) keep(k, v, pairs);
              return pairs;
            });
        return;
      }
      for (int k = 0; k < count; ++k) {
        for (int v = 0; v < kCount; ++v) keep(k, v, pairs_of(k, v));
      }
      if (of_slopes) {
        add_slope_gradient<kCount>(first_key + offset, count, grads, slope_gradient_, vector);
      }
      if (of_mask) {
        add_to_mask<kRows>(grads, tile.template part<kSquare>(g * kSquare), params.grad_mask,
                           first_key + offset, count);
      }
      if (!multiplies_) return;
      if (p.softcap != 0.0f) {
        through_softcap<kCount>(offset, count, vector, partial, m_.caps + place, grads);
      }
      split_pairs(
          offset, count, g, [&](int k, int v) __attribute__((always_inline)) {
            const int64_t x = k * kRows + v * S::kWidth;
            return Pairs{S::load(scores + x), S::load(grads + x)};
          });
    };
    with_constant(partial, [&](auto masked) {
      with_constant(p.dropout.threshold != 0, [&](auto drops) { with(masked, drops); });
    });
  }

  /// pairs_of(k, v) gives them by key and vector. Those after the last key are zeros.
  template <class PairsOf>
  QKV_INLINE void split_pairs(int offset, int count, int g, PairsOf pairs_of) {
    BFloat16* p_lines = m_.p_lines + 4 * g * kTile;
    BFloat16* ds_lines = m_.ds_lines + 4 * g * kTile;
    BFloat16* ds_pairs = m_.ds_pairs + 4 * (offset / kSquare * kSquares + g) * kTile;
    const auto store = [](BFloat16 * to, int line, __m512i x) __attribute__((always_inline)) {
      _mm512_storeu_si512(to + line * kTileDepth, x);
    };
    const auto split_two_keys = [&](int k, Pairs a0, Pairs a1, Pairs b0, Pairs b1)
        __attribute__((always_inline)) {
      const auto to_lines = [&](BFloat16 * lines, int line, const Halves& x, const Halves& y)
          __attribute__((always_inline)) {
        BFloat16* of_keys = lines + line / kTileRows * kTile;
        store(of_keys, line % kTileRows, pairs_of_upper(x.high, y.high));
        store(of_keys + 2 * kTile, line % kTileRows, pairs_of_upper(x.low, y.low));
      };
      to_lines(p_lines, k, Halves(a0.weight), Halves(a1.weight));
      to_lines(p_lines, k + 1, Halves(b0.weight), Halves(b1.weight));
      const Halves x0(a0.gradient), x1(a1.gradient), y0(b0.gradient), y1(b1.gradient);
      to_lines(ds_lines, k, x0, x1);
      to_lines(ds_lines, k + 1, y0, y1);
      store(ds_pairs, k / 2, pairs_of_upper(x0.high, y0.high));
      store(ds_pairs + kTile, k / 2, pairs_of_upper(x1.high, y1.high));
      store(ds_pairs + 2 * kTile, k / 2, pairs_of_upper(x0.low, y0.low));
      store(ds_pairs + 3 * kTile, k / 2, pairs_of_upper(x1.low, y1.low));
    };
    const Pairs none{S::zero(), S::zero()};
    int k = 0;
    for (; k + 1 < count; k += 2) {
      split_two_keys(k, pairs_of(k, 0), pairs_of(k, 1), pairs_of(k + 1, 0), pairs_of(k + 1, 1));
    }
    for (; k < kSquare; k += 2) {
      if (k < count) {
        split_two_keys(k, pairs_of(k, 0), pairs_of(k, 1), none, none);
      } else {
        split_two_keys(k, none, none, none, none);
      }
    }
  }

  /// What the products of `count` keys left out, for the pairs that are kept.
  void add_non_finite(int64_t first_key, int offset, int count, bool poisoned) {
    const int64_t first = first_key - keys_.begin;
    const BFloat16* keys = tile.stored_keys_of_head<BFloat16>(p.key);
    const auto element = [](float* sums, int64_t columns, int64_t k, int64_t d) -> float& {
      const int64_t tile_of_sums = k / kTileRows * columns + d / kTileRows;
      return sums[tile_of_sums * kSums + k % kTileRows * kTileRows + d % kTileRows];
    };
    for (int r = 0; r < tile.rows; ++r) {
      const BFloat16* query = tile.stored_row<BFloat16>(p.query, r);
      const BFloat16* grad_out = tile.stored_row<BFloat16>(params.grad_out, r);
      for (int k = 0; k < count; ++k) {
        const int bit = offset + k;
        if (partial_ && (m_.bits[bit / 8 * kRows + r] >> (bit % 8) & 1) == 0) continue;
        const float weight = m_.scores[k * kRows + r], gradient = m_.grads[k * kRows + r];
        for (int64_t d = 0; d < p.value_dim && !rows_finite_; ++d) {
          if (is_finite(grad_out[d])) continue;
          element(m_.grad_value, value_columns_, first + k, d) += weight * grad_out[d];
        }
        for (int64_t d = 0; d < p.head_dim && !rows_finite_; ++d) {
          if (is_finite(query[d])) continue;
          element(m_.grad_key, columns_, first + k, d) += gradient * query[d];
        }
        const BFloat16* key = keys + (first_key + k) * p.key.row_stride;
        for (int64_t d = 0; d < p.head_dim && poisoned; ++d) {
          if (is_finite(key[d])) continue;
          m_.grad_query_t[d * kRows + r] += gradient * key[d];
        }
      }
    }
  }

  void write(const float* sums, float scale, int64_t width, int64_t columns,
             const Operand<float>& to) const {
    BFloat16* rows = tile.stored_keys_of_head<BFloat16>(to) + keys_.begin * to.row_stride;
    for (int64_t k = 0; k < keys_.end - keys_.begin; ++k) {
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t tile_of_sums = k / kTileRows * columns + c;
        const auto x = S::load(sums + tile_of_sums * kSums + k % kTileRows * kTileRows);
        store_rounded(rows + k * to.row_stride + c * kTileRows, width - c * kTileRows,
                      x * S::set(scale));
      }
    }
  }

  Memory m_;
  TileRegisters registers_;
  int64_t head_;
  int64_t split_;
  KeyRange keys_;
  int64_t depths_, value_depths_;
  int64_t columns_, value_columns_;
  const bool multiplies_ = params.grad_query.data != nullptr || params.grad_key.data != nullptr ||
                           params.grad_value.data != nullptr;  // P and dS
  bool rows_finite_ = true;                                    // of Q and dO
  bool partial_ = false;  // not all pairs of the block are kept
  bool keeps_ = false;    // P and dS are needed after they were split
  alignas(64) float slope_gradient_[kRows];
};

/// Of fewer rows most lanes of a tile would be empty.
inline bool amx_backward_takes(const Problem<float>& p) {
  return p.keys >= kSquare && rows_of_kv_head(p) > kTileRows / 2;
}

inline int64_t amx_backward_row_tiles(const Problem<float>& p) {
  return RowTile<AmxBackwardMemory::kRows>::count_of_head(p);
}

inline int64_t amx_backward_scratch_bytes(const BackwardParams<float>& params) {
  return AmxBackwardMemory(params, nullptr).bytes;
}

/// Numbers of dQᵀ of a tile of rows.
inline int64_t amx_grad_query_size(const Problem<float>& p) {
  return amx_columns(p.head_dim) * kTileRows * AmxBackwardMemory::kRows;
}

inline int64_t amx_partial_grad_query_size(const BackwardParams<float>& params) {
  return params.splits * amx_backward_row_tiles(params.problem) *
         amx_grad_query_size(params.problem);
}

inline void amx_backward(const BackwardParams<float>& params, int64_t first_head, int64_t unit,
                         void* scratch) {
  const int64_t tiles = amx_backward_row_tiles(params.problem);
  float* partial =
      params.splits == 1 || params.grad_query.data == nullptr
          ? nullptr
          : params.partial_grad_query + unit * tiles * amx_grad_query_size(params.problem);
  AmxBackward work(params, first_head + unit / params.splits, unit % params.splits, scratch);
  work.run(tiles, partial);
}

/// dQ of one tile of rows, from the parts of all splits.
inline void amx_sum_grad_query(const BackwardParams<float>& params, int64_t first_head,
                               int64_t unit, void*) {
  const Problem<float>& p = params.problem;
  const int64_t tiles = amx_backward_row_tiles(p), size = amx_grad_query_size(p);
  const int64_t head = unit / tiles, t = unit % tiles;
  const auto has_part = [](int64_t) { return true; };
  const float* sum = sum_of_units(params, head, tiles, t, size, has_part);
  write_grad_query(params, RowTile<AmxBackwardMemory::kRows>::of_head(p, first_head + head, t),
                   sum);
}

/// As mask_gradient, with the scores of amx_backward.
inline void amx_mask_gradient(const BackwardParams<float>& params, int64_t unit, void* scratch) {
  BackwardParams<float> of_mask = params;
  of_mask.grad_query.data = of_mask.grad_key.data = of_mask.grad_value.data = nullptr;
  of_mask.slope_gradient_of_rows = nullptr;
  const Problem<float>& p = params.problem;
  for_each_tile_of_mask(p, params.grad_mask, unit, [&](const auto& tile, KeyRange keys) {
    const int64_t head = tile.batch_number * p.kv_heads + tile.kv_head;
    for (int64_t split = 0; split < params.splits; ++split) {
      if (keys.intersection(keys_of_split(params, split)).empty()) continue;
      AmxBackward(of_mask, head, split, scratch).add_rows_to_mask(tile, keys);
    }
  });
}

constexpr HalfBackwardKernels make_amx_backward_kernels() {
  return {{amx_backward_row_tiles, long_splits<float>, units_of_one_split<float>,
           amx_backward_scratch_bytes, amx_partial_grad_query_size, amx_backward,
           amx_sum_grad_query, /*score_gradients_size=*/nullptr, /*score_gradients=*/nullptr,
           amx_backward_scratch_bytes, amx_mask_gradient},
          amx_backward_takes};
}

}  // namespace qkv::kernels::QKV_ISA
