#pragma once

#include "kernels/cpu/attention_jvp.inc.h"
#include "kernels/cpu/backward_tangent_tile.inc.h"
#include "kernels/cpu/head_gradient.inc.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/mask_gradient.inc.h"

// The double backward. It is the derivative of the backward along the cotangents (x, y, z, ..) of
// its results taken as directions (Q', K', V', ..), by the symmetry of second derivatives
// (docs/derivations.md); its own results for dO and dLSE are O' and lse', those of the jvp. A prime
// is a derivative along the directions (P', dU and dU': backward_tangent_tile.inc.h):
//
//     dV' = (R ∘ P')ᵀ dO    dK' = scale (dU'ᵀ Q + dUᵀ Q')    dQ' = scale (dU' K + dU K')
//
//     R ∘ P'    keys [ rows -> ]   x   dO          rows [ Dv -> ]  =   dV'  keys [ Dv -> ]
//     dU', dU   keys [ rows -> ]   x   Q, Q'       rows [ D -> ]   =   dK'  keys [ D -> ]
//     Kᵀ, K'ᵀ     D  [ keys -> ]   x   dU', dU     keys [ rows -> ] =  dQ'ᵀ   D [ rows -> ]
//
// A tile of rows goes over its keys twice: for O' and lse', and, as dU' depends on these, for the
// rest. P and S' of all its keys are kept in between, linear in N. With all cotangents these are 12
// products, where the backward has 5.
//
// One unit of work is every so many tiles of rows of one key/value head. With several splits each
// leaves its part of dK' and dV' in a buffer of its own; sum_keys adds them in order.

namespace qkv::kernels::QKV_ISA {

/// Numbers of dQ'ᵀ of one tile of rows.
template <class Products, class T>
inline int64_t grad_query_t_size(const Problem<T>& p) {
  return Products::sum_rows(p.head_dim) * Products::kRows;
}

/// dK' and dV' of the keys of one key/value head, which lie in whole blocks; without the scale.
template <class T>
struct KeyGradients {
  int64_t key_width, value_width;
  T* grad_key;    // [keys][D]
  T* grad_value;  // [keys][Dv]

  KeyGradients(const Problem<T>& p, T* numbers)
      : key_width(round_up_to_vector<T>(p.head_dim)),
        value_width(round_up_to_vector<T>(p.value_dim)),
        grad_key(numbers),
        grad_value(numbers + backward_blocks(p) * kBackwardBlockKeys * key_width) {}

  static int64_t size(const Problem<T>& p) {
    const int64_t widths = round_up_to_vector<T>(p.head_dim) + round_up_to_vector<T>(p.value_dim);
    return backward_blocks(p) * kBackwardBlockKeys * widths;
  }

  /// To the gradients of a key/value head.
  void write(const BackwardParams<T>& backward, int64_t head, KeyRange range) const {
    using S = Simd<T>;
    const Problem<T>& p = backward.problem;
    const auto write_to = [&](const T* from, int64_t width, int64_t columns, const Operand<T>& to) {
      if (to.data == nullptr) return;
      write_rows_of_keys(p, head, range, columns, from + range.begin * width, width, to);
    };
    const auto scale = S::set(p.scale);
    for (int64_t x = range.begin * key_width; x < range.end * key_width; x += S::kWidth) {
      S::store(grad_key + x, S::load(grad_key + x) * scale);
    }
    write_to(grad_key, key_width, p.head_dim, backward.grad_key);
    write_to(grad_value, value_width, p.value_dim, backward.grad_value);
  }
};

template <class Products, class T>
inline int64_t second_order_prepared_bytes(const SecondOrderParams<T>& params) {
  return Products::prepared_bytes(matrices_of(params.second));
}

template <class Products, class T>
inline void prepare_second_order(const SecondOrderParams<T>& params, int64_t head, void* prepared) {
  prepare_head<Products>(matrices_of(params.second), head, prepared);
}

template <class T>
inline int64_t second_order_partial_size(const SecondOrderParams<T>& params) {
  return params.splits * KeyGradients<T>::size(params.jvp.problem);
}

/// Some of the tiles of rows of one key/value head.
template <class Products>
class SecondOrderUnit {
 public:
  using T = typename Products::Number;

  static int64_t scratch_numbers(const SecondOrderParams<T>& params) {
    const Problem<T>& p = params.jvp.problem;
    return Work::scratch_numbers(params.second) + OutputTangent<Products>::scratch_numbers(p) +
           grad_query_t_size<Products>(p) + kept_blocks(p) * Work::block_numbers(p) +
           (params.splits == 1 ? KeyGradients<T>::size(p) : 0);
  }

  SecondOrderUnit(const SecondOrderParams<T>& params, int64_t first_head, int64_t unit, T* scratch)
      : params_(params),
        backward_(params.second.backward),
        p_(backward_.problem),
        head_(first_head + unit / params.splits),
        split_(unit % params.splits),
        work_(params.second,
              of_head(params.prepared, head_, Products::prepared_bytes(matrices_of(params.second))),
              scratch),
        output_(work_, params.jvp, work_.end_of_scratch),
        grad_query_(work_.end_of_scratch + output_.scratch_numbers(p_)),
        kept_(grad_query_ + grad_query_t_size<Products>(p_)),
        of_keys_(p_, kept_ + kept_blocks(p_) * Work::block_numbers(p_)) {
    of_keys_needed_ = backward_.grad_key.data != nullptr || backward_.grad_value.data != nullptr;
    if (of_keys_needed_ && params.splits > 1) {
      of_keys_ = {p_, params.partial + unit * KeyGradients<T>::size(p_)};
    }
    needs_query_ = backward_.grad_query.data != nullptr;
    needs_key_ = backward_.grad_key.data != nullptr;
    needs_value_ = backward_.grad_value.data != nullptr && work_.weights_move();
    needs_gradients_ = needs_query_ || needs_key_ || needs_value_ ||
                       backward_.grad_mask.data != nullptr ||
                       backward_.slope_gradient_of_rows != nullptr;
    keeps_ = (needs_gradients_ || output_.takes_means) && kept_blocks(p_) > 0;
  }

  /// Under a causal mask every so many tiles see as many keys as others do.
  void run() {
    if (of_keys_needed_) set_to_zero(of_keys_.grad_key, KeyGradients<T>::size(p_));
    for (int64_t t = split_; t < RowTile<kRows>::count_of_head(p_); t += params_.splits) {
      work_.tile = RowTile<kRows>::of_head(p_, head_, t);
      keys_ = work_.keys_of_rows();
      first_key_ = keys_.empty() ? 0 : Products::first_key(keys_.begin);
      if (!keys_.empty()) work_.load_operands();
      move_outputs();
      if (needs_gradients_) move_gradients();
    }
    if (of_keys_needed_ && params_.splits == 1) of_keys_.write(backward_, head_, {0, p_.keys});
  }

 private:
  using Work = BackwardTangentTile<Products>;
  static constexpr int kRows = Work::kRows;

  SeenBlocks<Work> seen_blocks() { return {work_, keys_, first_key_, keeps_ ? kept_ : nullptr}; }

  /// O' and lse'.
  void move_outputs() {
    output_.start();
    T* still = p_.dropout.threshold != 0 ? work_.ds_t_tile : nullptr;
    const auto blocks = seen_blocks();
    if (output_.takes_means) {
      blocks.for_each([&](int64_t n, int keys) {
        if (work_.load_scores(n, keys) != TileState::kEmpty) output_.add_to_means(keys);
      });
      output_.end_means();
    }
    const bool again = output_.takes_means && keeps_;
    blocks.for_each([&](int64_t n, int keys) {
      const TileState state = again ? work_.reload_scores(n, keys) : work_.load_scores(n, keys);
      if (state == TileState::kEmpty) return;
      if (keeps_) {
        output_.template add_block<true>(keys, again, work_.ds_tile,
                                         still != nullptr ? still : work_.p_tile);
      } else {
        output_.template add_block<false>(keys, false, work_.scores_t, work_.p_tile);
      }
    });
    output_.write(params_.jvp);
  }

  /// dQ' of the tile, and what it adds to the gradients of keys and values.
  void move_gradients() {
    const auto& tile = work_.tile;
    if (needs_query_) set_to_zero(grad_query_, grad_query_t_size<Products>(p_));
    set_to_zero(slope_gradient_, kRows);
    work_.load_numbers();
    seen_blocks().for_each([&](int64_t n, int keys) {
      const TileState state = keeps_ ? work_.reload_block(n, keys) : work_.load_block(n, keys);
      if (state != TileState::kEmpty) add_block(n, keys);
    });
    if (backward_.slope_gradient_of_rows != nullptr) {
      for (int r = 0; r < tile.rows; ++r) {
        backward_.slope_gradient_of_rows[tile.scalar(p_, r)] = slope_gradient_[r];
      }
    }
    if (!needs_query_) return;
    alignas(64) T scale_of_row[kRows];
    for (auto& scale : scale_of_row) scale = p_.scale;
    tile.unpack_transposed(grad_query_, p_.head_dim, scale_of_row, backward_.grad_query,
                           p_.key_value_storage);
  }

  void add_block(int64_t first_key, int keys) {
    Products& products = work_.products;
    const Directions<T>& along = params_.second.directions;
    if (backward_.grad_mask.data != nullptr) {
      add_to_mask<kRows>(work_.ds_t_tile, work_.tile, backward_.grad_mask, first_key, keys);
    }
    if (backward_.slope_gradient_of_rows != nullptr) {
      work_.add_slope_gradient(first_key, keys, slope_gradient_);
    }
    if (p_.softcap != T(0)) work_.through_softcap(keys);

    T* grad_key = of_keys_.grad_key + first_key * of_keys_.key_width;
    T* grad_value = of_keys_.grad_value + first_key * of_keys_.value_width;
    if (needs_value_) products.add_to_keys(kGradOut, work_.p_tile, grad_value);
    if (needs_key_) {
      products.add_to_keys(kQuery, work_.ds_t_tile, grad_key);
      if (along.query.data != nullptr) products.add_to_keys(kQueryT, work_.ds_tile, grad_key);
    }
    if (needs_query_) {
      products.add_to_rows(kKey, work_.ds_t_tile, grad_query_);
      if (along.key.data != nullptr) products.add_to_rows(kKeyT, work_.ds_tile, grad_query_);
    }
  }

  const SecondOrderParams<T>& params_;
  const BackwardParams<T>& backward_;
  const Problem<T>& p_;
  int64_t head_, split_;
  Work work_;
  OutputTangent<Products> output_;
  T* grad_query_;  // [D][rows] of the tile
  T* kept_;        // what work knows of the blocks that rows of the tile see
  KeyGradients<T> of_keys_;
  bool of_keys_needed_;
  bool needs_query_, needs_key_, needs_value_, needs_gradients_, keeps_;
  KeyRange keys_;  // that rows of the tile see
  int64_t first_key_;
  alignas(64) T slope_gradient_[kRows];
};

template <class Products, class T>
inline int64_t second_order_scratch_bytes(const SecondOrderParams<T>& params) {
  return SecondOrderUnit<Products>::scratch_numbers(params) * static_cast<int64_t>(sizeof(T));
}

/// Units count the splits of first_head, then of the next head; params.partial begins with
/// first_head.
template <class Products, class T>
inline void second_order(const SecondOrderParams<T>& params, int64_t first_head, int64_t unit,
                         void* scratch) {
  SecondOrderUnit<Products>(params, first_head, unit, static_cast<T*>(scratch)).run();
}

template <class T>
inline int64_t sum_keys_units(const SecondOrderParams<T>& params) {
  return backward_blocks(params.jvp.problem);
}

/// dK' and dV' of a block of keys: the parts of all splits, added in order to the first. Units
/// count the blocks of first_head, then of the next head.
template <class T>
inline void sum_keys(const SecondOrderParams<T>& params, int64_t first_head, int64_t unit,
                     void* /*scratch*/) {
  using S = Simd<T>;
  const Problem<T>& p = params.jvp.problem;
  const int64_t head = unit / backward_blocks(p), block = unit % backward_blocks(p);
  const int64_t first = block * kBackwardBlockKeys, left = p.keys - first;
  const KeyRange keys{first, left < kBackwardBlockKeys ? p.keys : first + kBackwardBlockKeys};
  const auto part = [&](int64_t split) {
    const int64_t at = (head * params.splits + split) * KeyGradients<T>::size(p);
    return KeyGradients<T>(p, params.partial + at);
  };
  const auto add = [&](const T* from, T* to, int64_t width) {
    for (int64_t x = keys.begin * width; x < keys.end * width; x += S::kWidth) {
      S::store(to + x, S::load(to + x) + S::load(from + x));
    }
  };
  const KeyGradients<T> sum = part(0);
  for (int64_t split = 1; split < params.splits; ++split) {
    add(part(split).grad_key, sum.grad_key, sum.key_width);
    add(part(split).grad_value, sum.grad_value, sum.value_width);
  }
  sum.write(params.second.backward, first_head + head, keys);
}

template <class Products, class T>
inline int64_t mask_gradient_t_scratch_bytes(const BackwardBackwardParams<T>& params) {
  using Work = BackwardTangentTile<Products>;
  return Work::scratch_numbers(params) * static_cast<int64_t>(sizeof(T));
}

/// dmask' = dS', summed as dmask is.
template <class Products, class T>
inline void mask_gradient_t(const BackwardBackwardParams<T>& params, int64_t unit, void* scratch) {
  BackwardTangentTile<Products> work(params, /*prepared=*/nullptr, static_cast<T*>(scratch));
  sum_over_mask(work.p, params.backward.grad_mask, unit, work, work.ds_t_tile);
}

/// dsink' = - sum over i of W ∘ ((sink' - lse') ∘ delta + delta'), of one head as in head_gradient.
template <class T>
inline void sink_gradient_t(const BackwardBackwardParams<T>& params, double* grad_sinks,
                            int64_t unit) {
  const BackwardParams<T>& backward = params.backward;
  const Problem<T>& p = backward.problem;
  const HeadRows<T> rows(p, unit);
  const T sink = rows.number(p.sinks);
  const T sink_t =
      params.directions.sinks.data == nullptr ? T(0) : rows.number(params.directions.sinks);
  double sum = 0.0;
  for (int64_t i = 0; i < p.queries; ++i) {
    const int64_t scalar = unit * p.queries + i;
    const T lse = backward.lse[scalar], rest = backward.lse_rest[scalar];
    // A row without keys has lse' = sink', and NaN may come for it.
    if (lse == -static_cast<T>(__builtin_inff()) || has_no_keys(rest)) continue;
    const T weight = sink_weight(sink, lse, rest);
    T delta{}, delta_t{};
    with_stored<T>(p.key_value_storage, [&](auto stored) {
      const auto* grad = rows.template row<decltype(stored)>(backward.grad_out, i);
      delta = dot<T>(grad, rows.row(backward.out, i), rows.width);
      delta_t = dot<T>(grad, rows.row(params.out_t, i), rows.width);
    });
    if (backward.grad_lse != nullptr) delta -= backward.grad_lse[scalar];
    const T moved = (sink_t - params.lse_t[scalar]) * delta + delta_t;
    sum -= static_cast<double>(weight) * static_cast<double>(moved);
  }
  grad_sinks[unit] = sum;
}

template <class Products, class T = typename Products::Number>
constexpr TangentKernels<T> make_tangent_kernels() {
  return {jvp_units<Products, T>,
          jvp_prepared_bytes<Products, T>,
          prepare_jvp<Products, T>,
          jvp_scratch_bytes<Products, T>,
          attention_jvp<Products, T>,
          second_order_prepared_bytes<Products, T>,
          prepare_second_order<Products, T>,
          second_order_scratch_bytes<Products, T>,
          second_order_partial_size<T>,
          second_order<Products, T>,
          sum_keys_units<T>,
          sum_keys<T>,
          Products::kOwnsMaskGradient ? mask_gradient_t_scratch_bytes<Products, T> : nullptr,
          Products::kOwnsMaskGradient ? mask_gradient_t<Products, T> : nullptr};
}

}  // namespace qkv::kernels::QKV_ISA
