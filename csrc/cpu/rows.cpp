#include "cpu/rows.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu/kernels.h"
#include "layout.h"
#include "problem.h"

namespace qkv::cpu {

namespace {

bool has_rows(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) <= 1; }

/// Dense, and with dimensions in the order that those of x have, but for the last, which is
/// innermost: so batch dimensions merge as before.
Tensor empty_rows(const Tensor& x, at::ScalarType type) {
  const auto sizes = x.sym_sizes();
  const size_t last = sizes.size() - 1;
  auto strides = dense_strides(x.sym_strides().slice(0, last), sizes.slice(0, last));
  for (c10::SymInt& stride : strides) stride = stride * sizes[last];
  strides.emplace_back(1);
  return at::empty_strided_symint(sizes, strides, x.options().dtype(type));
}

/// The dimension whose elements lie next to each other, or -1.
int64_t innermost(const Tensor& x) {
  for (int64_t d = x.dim(); d-- > 0;) {
    if (x.stride(d) == 1 && x.size(d) > 1) return d;
  }
  return -1;
}

/// Copies matrices of the dimensions `rows`, innermost in `from`, and `columns`, in `to`.
class Matrices {
 public:
  Matrices(const Tensor& from, const Tensor& to, int64_t rows, int64_t columns)
      : from_(from), to_(to), rows_(rows), columns_(columns), bytes_(from.element_size()) {
    matrix_.from_column = from.stride(columns);
    matrix_.to_row = to.stride(rows);
    matrix_.columns = from.size(columns);
    matrix_.storage = storage_of(from);
  }

  void copy(void (*transpose)(const kernels::Transposition&)) const {
    constexpr int64_t kRows = 512;        // at once: threads share matrices too
    constexpr int64_t kFewest = 1 << 15;  // numbers that are worth a thread
    const int64_t rows = from_.size(rows_), parts = (rows + kRows - 1) / kRows;
    const int64_t numbers = std::min(rows, kRows) * matrix_.columns;
    const int64_t units = from_.numel() / (rows * matrix_.columns) * parts;
    const int64_t grain = std::max<int64_t>(kFewest / numbers, 1);
    at::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t row = unit % parts * kRows;
        kernels::Transposition part = matrix_;
        part.rows = std::min(kRows, rows - row);
        part.from = static_cast<const char*>(from_.const_data_ptr()) +
                    (offset(from_, unit / parts) + row) * bytes_;
        part.to = static_cast<char*>(to_.data_ptr()) +
                  (offset(to_, unit / parts) + row * matrix_.to_row) * bytes_;
        transpose(part);
      }
    });
  }

 private:
  /// Where a matrix lies, counted over all other dimensions.
  int64_t offset(const Tensor& x, int64_t matrix) const {
    int64_t offset = 0;
    for (int64_t d = x.dim(); d-- > 0;) {
      if (d == rows_ || d == columns_) continue;
      offset += matrix % x.size(d) * x.stride(d);
      matrix /= x.size(d);
    }
    return offset;
  }

  const Tensor& from_;
  const Tensor& to_;
  int64_t rows_, columns_, bytes_;
  kernels::Transposition matrix_{};
};

}  // namespace

void copy(const Tensor& from, const Tensor& to) {
  if (from.scalar_type() != to.scalar_type()) return copy(from.to(to.scalar_type()), to);
  const int64_t rows = innermost(from), columns = innermost(to);
  if (from.numel() == 0 || rows < 0 || columns < 0 || rows == columns || from.element_size() == 1) {
    to.copy_(from);
    return;
  }
  // ATen goes number by number here.
  const Matrices matrices(from, to, rows, columns);
  matrices.copy(from.scalar_type() == at::kDouble ? kernel_table().float64.transpose
                                                  : kernel_table().float32.transpose);
}

Tensor in_rows(const Tensor& x) {
  if (has_rows(x)) return x;
  const Tensor stored = without_repetitions(x, x.dim() - 1);
  const Tensor rows = empty_rows(stored, x.scalar_type());
  copy(stored, rows);
  return rows.expand(x.sizes());
}

Tensor rows_for(const Tensor& result, at::ScalarType real) {
  return has_rows(result) && result.scalar_type() == real ? result : empty_rows(result, real);
}

}  // namespace qkv::cpu
