#pragma once

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "cpu/rows.h"
#include "cpu/units.h"
#include "cpu/waves.h"
#include "operands.h"
#include "problem.h"

// What the backward and its own derivative do alike: loops over splits of heads, sums over the
// batch.

namespace qkv::cpu {

/// Where kernels write what put() takes to `results`: rows of query, key and value.
inline Gradients rows_of(Gradients results) {
  for (size_t i = 0; i < 3; ++i) results[i] = rows_for(results[i]);
  return results;
}

inline void put(const Gradients& written, const Gradients& results) {
  for (size_t i = 0; i < written.size(); ++i) put(written[i], results[i]);
}

/// Where a mask's gradient is summed: `result`, or what that is rounded from. To each element of
/// one without rows or without columns so many pairs add that kernels sum it in double
/// (kernels/cpu/mask_sums.inc.h).
inline Tensor sums_of_mask(const Tensor& result, at::ScalarType real) {
  const bool has_rows = result.dim() >= 2 && result.size(-2) > 1,
             has_columns = result.dim() >= 1 && result.size(-1) > 1;
  return writable(result, has_rows && has_columns ? real : at::kDouble).zero_();
}

/// What a head is cut into.
enum class Split { kKeys, kRows };

inline bool sees_all(const kernels::Band& band) { return band.left < 0 && band.right < 0; }

/// How many pieces of `of_piece` or, the last one, less.
inline int64_t pieces(int64_t count, int64_t of_piece) { return (count + of_piece - 1) / of_piece; }

/// How many units of work the splits of a head make, at least `least`: the fewer the better, if
/// threads are done as early. Units of different lengths even out only if each thread takes
/// several. Results have the same bits whatever this is.
inline int64_t best_units_of_head(int64_t least, int64_t splits, int64_t heads, bool equally_long) {
  const int64_t threads = at::get_num_threads();
  const auto rounds = [&](int64_t units) { return pieces(heads * units, threads); };
  for (int64_t units = least; units < splits; units *= 2) {
    const bool even = equally_long || units == 1 || heads * units >= 8 * threads;
    if (even && rounds(units) * splits <= rounds(splits) * units) return units;
  }
  return splits;
}

/// A pass over all splits of all heads, and one that sums what they left in buffers.
template <class T, class Params>
struct SplitPass {
  Split what;
  int64_t units;  // of one key/value head
  int64_t scratch_bytes;
  void (*run)(const Params&, int64_t first_head, int64_t unit, void* scratch);
  bool needed;       // by more than the mask's gradient
  bool add_to_mask;  // whether run adds to grad_mask

  bool sums;                // whether there are buffers
  T*& (*partial)(Params&);  // where they are
  int64_t partial_size;     // of one key/value head
  int64_t sum_units;        // of one key/value head
  void (*sum)(const Params&, int64_t first_head, int64_t unit, void* scratch);
};

/// A pass of its own for the mask's gradient.
template <class T>
struct MaskPass {
  int64_t (*units)(const kernels::Problem<T>&, const kernels::Operand<T>& grad_mask);
  int64_t scratch_bytes;
  std::function<void(int64_t unit, void* scratch)> run;
};

/// Key/value heads first .. first + count, counted from 0, those together that share grad_mask.
template <class T>
std::vector<std::vector<int64_t>> heads_by_mask(const kernels::BackwardParams<T>& backward,
                                                int64_t first, int64_t count) {
  const kernels::Problem<T>& p = backward.problem;
  const kernels::Operand<T>& mask = backward.grad_mask;
  std::map<int64_t, std::vector<int64_t>> by_offset;
  for (int64_t h = 0; h < count; ++h) {
    const int64_t head = (first + h) % p.kv_heads * (p.query_heads / p.kv_heads);
    int64_t offset = head * mask.head_stride;
    int64_t batch = (first + h) / p.kv_heads;
    for (int d = p.batch_rank; d-- > 0; batch /= p.batch_size[d]) {
      offset += batch % p.batch_size[d] * mask.batch_stride[d];
    }
    by_offset[offset].push_back(h);
  }
  std::vector<std::vector<int64_t>> groups;
  for (auto& group : by_offset) groups.push_back(std::move(group.second));
  return groups;
}

/// Whether splits may add to grad_mask, one after the other where heads share it. They must have
/// elements of their own, and enough threads work to do. Elements take their sums in the same order
/// as in a pass of its own: so this may depend on the number of threads.
template <class T>
bool splits_may_add_to_mask(const kernels::BackwardParams<T>& backward, Split what,
                            int64_t splits) {
  const kernels::Problem<T>& p = backward.problem;
  const kernels::Operand<T>& mask = backward.grad_mask;
  if (mask.data == nullptr) return false;
  if ((what == Split::kKeys ? mask.column_stride : mask.row_stride) == 0) return false;
  // Tiles mix the heads of a group, and those of one query may be in tiles of two parts of the
  // rows.
  if (p.query_heads != p.kv_heads) {
    if (mask.row_stride == 0 || mask.column_stride == 0) return false;
    if (what == Split::kRows && splits > 1 && mask.head_stride == 0) return false;
  }
  int64_t apart = splits * (mask.head_stride != 0 ? p.kv_heads : 1);
  for (int d = 0; d < p.batch_rank; ++d) apart *= mask.batch_stride[d] != 0 ? p.batch_size[d] : 1;
  const int64_t threads = at::get_num_threads();
  const bool equally_long = what == Split::kRows || sees_all(p.band);
  return threads == 1 || apart >= (equally_long ? 1 : 2) * threads;
}

/// `backward` is a part of `params`, or these.
template <class T, class Params>
void run_splits(const kernels::BackwardParams<T>& backward, const Params& params,
                const SplitPass<T, Params>& pass, Workspace& workspace) {
  const int64_t heads = backward.problem.batch * backward.problem.kv_heads;
  // Buffers are kept for a few heads at a time, enough to occupy all threads.
  const int64_t units = 2 * static_cast<int64_t>(at::get_num_threads());
  const int64_t heads_of_wave = pass.sums ? std::min(heads, pieces(units, pass.units)) : heads;
  Params of_wave[2] = {params, params};  // with even and odd number
  if (pass.sums) {
    const int64_t size = heads_of_wave * pass.partial_size;
    auto* partial = static_cast<T*>(workspace.buffers(2 * size * int64_t{sizeof(T)}));
    pass.partial(of_wave[0]) = partial;
    pass.partial(of_wave[1]) = partial + size;
  }

  struct Wave {
    int64_t first_head;
    int64_t heads;
    std::vector<std::vector<int64_t>> groups;  // of its heads, if these share a mask's gradient
  };
  std::vector<Wave> waves;
  Waves queue(/*in_order=*/backward.grad_mask.data != nullptr);
  for (int64_t head = 0; head < heads; head += heads_of_wave) {
    const int64_t count = std::min(heads_of_wave, heads - head);
    Wave wave{head, count, {}};
    int64_t together = count;
    if (backward.grad_mask.data != nullptr) {
      wave.groups = heads_by_mask(backward, head, count);
      together = static_cast<int64_t>(wave.groups.size());
    }
    waves.push_back(std::move(wave));
    queue.add(together * pass.units, pass.sums ? count * pass.sum_units : 0);
  }
  const auto fill = [&](int64_t w, int64_t unit, void* scratch) {
    const auto run = [&](int64_t unit_of_heads) {
      pass.run(of_wave[w % 2], waves[w].first_head, unit_of_heads, scratch);
    };
    if (waves[w].groups.empty()) {
      // Units of several heads that are equally long go side by side, the longest first, as those
      // are under a causal mask: so threads are done at the same time.
      const int64_t side_by_side = pass.sums ? waves[w].heads : 1;
      return run(unit % side_by_side * pass.units + unit / side_by_side);
    }
    for (const int64_t h : waves[w].groups[unit / pass.units]) {
      run(h * pass.units + unit % pass.units);
    }
  };
  const auto sum = [&](int64_t w, int64_t unit, void* scratch) {
    pass.sum(of_wave[w % 2], waves[w].first_head, unit, scratch);
  };
  queue.run(pass.scratch_bytes, workspace, fill, sum);
}

/// All gradients of tensors; those of numbers of heads are left.
template <class T, class Params>
void run_gradients(kernels::BackwardParams<T>& backward, const Params& params,
                   const SplitPass<T, Params>& of_splits, const MaskPass<T>& of_mask,
                   Workspace& workspace) {
  const kernels::Operand<T> grad_mask = backward.grad_mask;
  const bool mask_in_splits = of_splits.needed && of_splits.add_to_mask &&
                              splits_may_add_to_mask(backward, of_splits.what, of_splits.units);
  if (!mask_in_splits) backward.grad_mask.data = nullptr;
  if (of_splits.needed) run_splits(backward, params, of_splits, workspace);
  if (mask_in_splits || grad_mask.data == nullptr) return;
  backward.grad_mask = grad_mask;
  for_each_unit(of_mask.units(backward.problem, grad_mask), of_mask.scratch_bytes, workspace,
                of_mask.run);
}

/// grad = the numbers of all (batch.., Hq), summed in order over the dimensions in which it is
/// broadcast (sums of ATen depend on the number of threads).
inline void sum_over_batch(const std::vector<double>& of_heads, const Operands& x,
                           const Tensor& grad) {
  auto sizes = x.query.sizes().vec();
  sizes.resize(sizes.size() - 2);
  const Tensor total = at::zeros(grad.sizes(), grad.options().dtype(at::kDouble));
  const Tensor total_of_head = total.expand(sizes);
  const auto strides = total_of_head.strides();
  for (size_t unit = 0; unit < of_heads.size(); ++unit) {
    auto left = static_cast<int64_t>(unit);
    int64_t offset = 0;
    for (size_t d = sizes.size(); d-- > 0; left /= sizes[d]) offset += left % sizes[d] * strides[d];
    total.mutable_data_ptr<double>()[offset] += of_heads[unit];
  }
  grad.copy_(total);
}

}  // namespace qkv::cpu
