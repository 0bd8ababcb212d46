#pragma once

#include "kernels/cpu/attention_backward.inc.h"
#include "kernels/cpu/block_rows.inc.h"
#include "kernels/cpu/non_finite.inc.h"
#include "kernels/cpu/row_tile.inc.h"
#include "kernels/cpu/seen_keys.inc.h"
#include "kernels/cpu/tile_product.inc.h"

// The matrices of a tangent tile, and products of them. X is one that keys have, Y one that rows
// have, the others are tiles and sums of the kernels:
//
//     keys [ rows -> ] (+)= X Yᵀ      width of X [ rows -> ] += Xᵀ · keys [ rows -> ]
//                                     keys [ width of Y -> ] += keys [ rows -> ] · Y

namespace qkv::kernels::QKV_ISA {

enum OfKeys { kKey, kKeyT, kValue, kValueT, kOfKeys };
enum OfRows { kQuery, kQueryT, kGradOut, kOfRows };

/// Where Products that round tiles take them in pairs of keys: R ∘ P ∘ S', or any, and R ∘ P.
enum TileInPairs { kMoved, kStill };

/// A matrix that is not there has no data; nor has one without columns.
template <class T>
struct TangentMatrices {
  const Problem<T>& p;
  bool of_backward;  // those of a jvp have no grad_out
  Operand<const T> keys[kOfKeys];
  Operand<const T> rows[kOfRows];

  /// Numbers are stored as those of the problem are.
  TangentMatrices(const Problem<T>& problem, const Directions<T>& along,
                  const Operand<const T>* grad_out)
      : p(problem),
        of_backward(grad_out != nullptr),
        keys{problem.key, along.key, problem.value, along.value},
        rows{problem.query, along.query, of_backward ? *grad_out : Operand<const T>{}} {}

  bool has(OfKeys x) const { return keys[x].data != nullptr; }
  bool has(OfRows y) const { return rows[y].data != nullptr; }
  int64_t width(OfKeys x) const { return x == kKey || x == kKeyT ? p.head_dim : p.value_dim; }
  int64_t width(OfRows y) const { return y == kGradOut ? p.value_dim : p.head_dim; }
};

/// What products of a tangent tile are about.
struct TangentBlock {
  int64_t first_key;
  int keys;
  TileState state;
  const uint8_t* bits;  // of the pairs that are kept, if only some are
};

/// Products by vectors. Scores says how X Yᵀ is multiplied (score_products.inc.h).
template <class Scores>
class VectorProducts {
 public:
  using T = typename Scores::Number;
  using Number = T;
  using S = Simd<T>;
  static constexpr int kVectors = kBackwardVectors;
  static constexpr int kRows = kVectors * S::kWidth;
  static constexpr bool kScalesScores = Scores::kScales;
  static constexpr bool kRoundsTiles = false;
  static constexpr bool kOwnsMaskGradient = true;

  /// Where blocks begin, of which the first has key `begin`.
  static int64_t first_key(int64_t begin) { return first_of_eight(begin); }

  /// Rows of sums of this width that are transposed.
  static int64_t sum_rows(int64_t width) { return width; }

  /// What is made of the keys of one head for all its tiles of rows, by prepare: copies of those
  /// matrices that each would convert or spread.
  static int64_t prepared_bytes(const TangentMatrices<T>& matrices) {
    int64_t numbers = 0;
    for_each_copy(matrices, [&](OfKeys, int64_t size) { numbers += size; });
    return bytes_of_copies(matrices.p, numbers * static_cast<int64_t>(sizeof(T)));
  }
  static void prepare(const TangentMatrices<T>& matrices, const RowTile<kRows>& tile,
                      void* prepared) {
    if (prepared == nullptr) return;
    const Problem<T>& p = matrices.p;
    const KeyRange keys = keys_to_copy(p);
    if (keys.empty()) return;
    T* copy = static_cast<T*>(prepared);
    for_each_copy(matrices, [&](OfKeys x, int64_t size) {
      const int64_t width = matrices.width(x);
      copies_of_rows(tile, matrices.keys[x], p.key_value_storage, keys.begin, keys.end - keys.begin,
                     width, copy + keys.begin * spread_row<T>(width));
      copy += size;
    });
  }

  static int64_t scratch_numbers(const TangentMatrices<T>& matrices) {
    return VectorProducts(matrices, nullptr, nullptr).numbers_;
  }

  VectorProducts(const TangentMatrices<T>& matrices, void* prepared, T* scratch) : m_(matrices) {
    static_assert(sizeof(Factor) == sizeof(T));
    if (prepared != nullptr) {
      T* copy = static_cast<T*>(prepared);
      for_each_copy(m_, [&](OfKeys x, int64_t size) {
        copies_[x] = {copy, spread_row<T>(m_.width(x))};
        copy += size;
      });
    }
    const auto take = [&]<class Number>(Number*& part, int64_t numbers) {
      part = scratch == nullptr ? nullptr : reinterpret_cast<Number*>(scratch + numbers_);
      numbers_ += numbers;
    };
    for (int x = 0; x < kOfKeys; ++x) {
      if (!m_.has(OfKeys(x))) continue;
      const int64_t width = spread_row<T>(m_.width(OfKeys(x)));
      take(block_rows_[x], kBackwardBlockKeys * width);
      if (!Scores::kInNumbers) take(block_lines_[x], kBackwardBlockKeys * width);
    }
    for (int y = 0; y < kOfRows; ++y) {
      if (!m_.has(OfRows(y))) continue;
      const int64_t width = m_.width(OfRows(y));
      take(columns_[y], Scores::column_factors(width, kRows));
      if (m_.of_backward) take(packed_[y], spread_row<T>(width) * kRows);
    }
  }

  void load_rows(const RowTile<kRows>& tile) {
    tile_ = &tile;
    for (auto& has : has_rows_) has = false;
    for (int y = 0; y < kOfRows; ++y) {
      if (!m_.has(OfRows(y))) continue;
      const T factor = y == kGradOut ? T(1) : m_.p.scale;
      Scores::pack_columns(tile, m_.rows[y], m_.width(OfRows(y)), factor, storage(), columns_[y]);
    }
  }

  void begin_block(const TangentBlock& block) {
    block_ = block;
    if (block.state == TileState::kPartial) {
      seen_.see_by_band(m_.p, *tile_, block.first_key, block.keys);
    } else {
      seen_.see_all(*tile_, block.keys);
    }
    for (auto& rows : keys_) rows.first = nullptr;
    for (auto& lines : lines_) lines.first = nullptr;
  }

  /// c[keys][rows] (+)= X Yᵀ, times the scale if Y is of the query
  QKV_ONE_COPY void multiply(OfKeys x, OfRows y, T* c, bool add) {
    const Rows<Factor> lines = lines_of_keys(x);
    seen_.for_each_piece(block_.keys, [&](int v, auto vectors, KeyRange keys) {
      multiply_lines<vectors(), /*kScaled=*/false>(
          keys.end - keys.begin, Scores::depth(m_.width(x)), lines.from(keys.begin),
          columns_[y] + v * S::kWidth, kRows, add, T(1), c + keys.begin * kRows + v * S::kWidth,
          [] {});
    });
  }

  /// c[width][rows] += Xᵀ b for b[keys][rows]
  QKV_ONE_COPY void add_to_rows(OfKeys x, const T* b, T* c) {
    const int64_t width = m_.width(x);
    const Rows<T> rows = spread_rows<T>(rows_of_keys(x), block_.keys, width, block_rows_[x]);
    if (block_.state == TileState::kPartial &&
        !all_finite<T>(rows.first, rows.stride, block_.keys, width)) {
      multiply_add_kept_keys<T, kVectors>(block_.keys, width, rows.first, rows.stride, b,
                                          block_.bits, c);
      return;
    }
    seen_.for_each_part([&](int v, auto vectors, KeyRange keys) {
      const int r = v * S::kWidth;
      multiply_add<T, vectors()>(width, keys.end - keys.begin,
                                 rows.first + keys.begin * rows.stride, UnitStride{}, rows.stride,
                                 b + keys.begin * kRows + r, kRows, Sums<T>{c + r, kRows});
    });
  }

  /// c[keys][width] += a Y for a[keys][rows]; rows of c are whole vectors
  QKV_ONE_COPY void add_to_keys(OfRows y, const T* a, T* c) {
    const int64_t width = round_up_to_vector<T>(m_.width(y));
    Rows<T>& rows = rows_[y];
    if (!has_rows_[y]) {
      rows = rows_of_tile(*tile_, m_.rows[y], storage(), m_.width(y), packed_[y]);
      has_rows_[y] = true;
      rows_finite_[y] = all_finite<T>(rows.first, rows.stride, tile_->rows, m_.width(y));
    }
    if (block_.state == TileState::kPartial && !rows_finite_[y]) {
      multiply_add_kept_rows<T, kRows>(block_.keys, tile_->rows, a, rows.first, rows.stride,
                                       block_.bits, width, Sums<T>{c, width});
    } else {
      seen_.for_each_strip(block_.keys, [&](KeyRange keys, int r, int count) {
        multiply_add_rows<T, kRows>(keys.end - keys.begin, count, a + keys.begin * kRows + r,
                                    rows.from(r).first, rows.stride, width,
                                    Sums<T>{c + keys.begin * width, width});
      });
    }
  }

 protected:
  using Factor = typename Scores::Factor;

  /// Those of a head, or 0: none are made if all heads' took too many.
  static int64_t bytes_of_copies(const Problem<T>& p, int64_t bytes_of_head) {
    constexpr int64_t kMost = int64_t{1} << 26;
    return p.batch * p.kv_heads * bytes_of_head <= kMost ? bytes_of_head : 0;
  }

  TangentMatrices<T> m_;
  const RowTile<kRows>* tile_ = nullptr;
  TangentBlock block_{};
  SeenKeys<T, kVectors> seen_;  // of the block; pairs that no product writes are not kept
  T* packed_[kOfRows]{};        // room for [rows][width]
  bool has_rows_[kOfRows]{};    // they were asked for
  bool rows_finite_[kOfRows]{};

 private:
  Storage storage() const { return m_.p.key_value_storage; }

  /// f(x, numbers of its copy). Products in pairs read what they multiply as it is stored.
  template <class F>
  static void for_each_copy(const TangentMatrices<T>& m, F f) {
    if (!Scores::kInNumbers || rows_of_kv_head(m.p) <= kRows) return;
    for (int i = 0; i < kOfKeys; ++i) {
      const auto x = OfKeys(i);
      if (m.has(x) && wants_copies<T>(m.keys[x], m.p.key_value_storage)) {
        f(x, m.p.keys * spread_row<T>(m.width(x)));
      }
    }
  }

  /// The rows of the block.
  const Rows<T>& rows_of_keys(OfKeys x) {
    if (keys_[x].first == nullptr) {
      keys_[x] = copies_[x].first != nullptr
                     ? copies_[x].from(block_.first_key)
                     : rows_of_block(*tile_, m_.keys[x], storage(), block_.first_key, block_.keys,
                                     m_.width(x), block_rows_[x]);
    }
    return keys_[x];
  }

  /// The same as the factors of a product X Yᵀ.
  Rows<Factor> lines_of_keys(OfKeys x) {
    if constexpr (Scores::kInNumbers) {
      return rows_of_keys(x);
    } else {
      if (lines_[x].first == nullptr) {
        lines_[x] = Scores::lines(*tile_, m_.keys[x], storage(), block_.first_key, block_.keys,
                                  m_.width(x), block_lines_[x]);
      }
      return lines_[x];
    }
  }

  int64_t numbers_ = 0;        // of scratch
  Rows<T> copies_[kOfKeys]{};  // of all keys, of those matrices that are copied
  Rows<T> keys_[kOfKeys]{};    // of the block, when they are asked for
  Rows<Factor> lines_[kOfKeys]{};
  Rows<T> rows_[kOfRows]{};         // of the tile, when they are asked for
  T* block_rows_[kOfKeys]{};        // [keys][width], converted or spread
  Factor* block_lines_[kOfKeys]{};  // copied, unless factors are numbers
  Factor* columns_[kOfRows]{};      // [width][rows], of the query scaled if Scores does
};

}  // namespace qkv::kernels::QKV_ISA
