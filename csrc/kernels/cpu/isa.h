#pragma once

#include "kernels/params.h"

// Every kernel is compiled once per instruction set, in a namespace of its name; the table is all
// that is seen of it from outside. Which one runs is decided once, at the first call.

namespace qkv::kernels {

template <class T>
struct BackwardKernels;

/// A forward whose values have no columns and whose `out`, (B, Hq, M, N), takes the weights.
template <class T>
struct WeightsParams {
  ForwardParams<T> forward;
  // Or, of each row, <grad, weights> goes to dots, (B, Hq, M), dense: where grad.data != nullptr,
  // stored as the operands. There is no lse then.
  Operand<const T> grad;
  T* dots;
};

/// Kernels work on numbered units, any of which may run on any thread, each with its own scratch.
template <class T>
struct ForwardKernels {
  int64_t (*forward_tiles_in_turn)(const ForwardParams<T>&, int64_t threads);
  int64_t (*forward_units)(const ForwardParams<T>&, int64_t in_turn);
  int64_t (*forward_scratch_bytes)(const ForwardParams<T>&, int64_t in_turn);
  int64_t (*forward_partial_size)(const ForwardParams<T>&);
  int64_t (*forward_prepared_bytes)(const ForwardParams<T>&, int64_t in_turn);
  void (*prepare_forward)(const ForwardParams<T>&, int64_t head);
  void (*forward)(const ForwardParams<T>&, int64_t in_turn, int64_t unit, void* scratch);
  void (*merge_forward)(const ForwardParams<T>&, int64_t head);

  // After prepare_forward with one tile in turn.
  int64_t (*weights_units)(const Problem<T>&);
  int64_t (*weights_scratch_bytes)(const Problem<T>&);
  void (*weights)(const WeightsParams<T>&, int64_t unit, void* scratch);

  /// Whether lse comes from the scores that derivatives with the same products compute, to the bit.
  bool (*has_scores_of_derivatives)(const Problem<T>&);
  /// Where it does not: the backward that computes the forward's scores, to the bit.
  const BackwardKernels<T>* few_rows_backward;
};

template <class T>
struct BackwardKernels {
  int64_t (*backward_row_tiles)(const Problem<T>&);
  int64_t (*splits)(const Problem<T>&);              // of a head
  int64_t (*least_units)(const BackwardParams<T>&);  // of a head that are worth it
  int64_t (*backward_scratch_bytes)(const BackwardParams<T>&);
  int64_t (*partial_grad_query_size)(const BackwardParams<T>&);
  void (*backward)(const BackwardParams<T>&, int64_t first_head, int64_t unit, void* scratch);
  void (*sum_grad_query)(const BackwardParams<T>&, int64_t first_head, int64_t unit, void* scratch);

  // Of a backward of weights: minus_dots and dS before `backward`, which else makes them itself. So
  // many numbers for each key/value head; units are the tiles of rows of all heads. If there are
  // none, or nullptr, it makes dS alone, and minus_dots come from ForwardKernels::weights.
  int64_t (*score_gradients_size)(const Problem<T>&);
  void (*score_gradients)(const BackwardParams<T>&, int64_t unit, void* scratch);

  // The mask's gradient in a pass of its own, to which `backward` may add instead, or, of few rows,
  // from what it left.
  int64_t (*mask_gradient_scratch_bytes)(const BackwardParams<T>&);
  void (*mask_gradient)(const BackwardParams<T>&, int64_t unit, void* scratch);
};

/// The double backward and, on the way, the derivative of the forward along the same directions:
/// out_t and lse_t of `jvp` are written, and read as those of `second`.
template <class T>
struct SecondOrderParams {
  BackwardBackwardParams<T> second;
  JvpParams<T> jvp;
  // The rows of a head are cut into `splits` parts that are worked on independently. Each leaves
  // its share of the gradients of keys and values, summed afterwards in order: in
  // partial[head in this wave][split], nullptr when splits == 1.
  int64_t splits;
  T* partial;
  void* prepared;  // of all heads
};

/// Derivatives along directions: of the forward and of the backward.
template <class T>
struct TangentKernels {
  int64_t (*jvp_units)(const JvpParams<T>&);
  int64_t (*jvp_prepared_bytes)(const JvpParams<T>&);  // of one key/value head
  void (*prepare_jvp)(const JvpParams<T>&, int64_t head, void* prepared);
  int64_t (*jvp_scratch_bytes)(const JvpParams<T>&);
  void (*jvp)(const JvpParams<T>&, void* prepared, int64_t unit, void* scratch);

  int64_t (*second_order_prepared_bytes)(const SecondOrderParams<T>&);  // as for a jvp
  void (*prepare_second_order)(const SecondOrderParams<T>&, int64_t head, void* prepared);
  int64_t (*second_order_scratch_bytes)(const SecondOrderParams<T>&);
  int64_t (*second_order_partial_size)(const SecondOrderParams<T>&);  // of one key/value head
  void (*second_order)(const SecondOrderParams<T>&, int64_t first_head, int64_t unit,
                       void* scratch);
  int64_t (*sum_keys_units)(const SecondOrderParams<T>&);  // of one key/value head
  void (*sum_keys)(const SecondOrderParams<T>&, int64_t first_head, int64_t unit, void* scratch);

  // As those of BackwardKernels; or nullptr, if that is left to the kernels of float32.
  int64_t (*mask_gradient_t_scratch_bytes)(const BackwardBackwardParams<T>&);
  void (*mask_gradient_t)(const BackwardBackwardParams<T>&, int64_t unit, void* scratch);
};

/// to[row · to_row + column] = from[column · from_column + row], numbers of T or of 16 bits.
struct Transposition {
  const void* from;
  int64_t from_column;
  void* to;
  int64_t to_row;
  int64_t rows;
  int64_t columns;
  Storage storage;
};

template <class T>
struct CpuKernels : ForwardKernels<T>, BackwardKernels<T>, TangentKernels<T> {
  void (*transpose)(const Transposition&);
  int64_t (*mask_gradient_units)(const Problem<T>&, const Operand<T>& grad_mask);
  void (*head_gradient)(const HeadGradientParams<T>&, int64_t unit);
  void (*sink_gradient_t)(const BackwardBackwardParams<T>&, double* grad_sinks, int64_t unit);
};

/// Those that multiply in bfloat16 or float16.
template <class Kernels>
struct HalfKernels : Kernels {
  /// Whether they are there for a problem of these sizes.
  bool (*takes)(const Problem<float>&);
};

using HalfForwardKernels = HalfKernels<ForwardKernels<float>>;
using HalfBackwardKernels = HalfKernels<BackwardKernels<float>>;
using HalfTangentKernels = HalfKernels<TangentKernels<float>>;

struct CpuKernelTable {
  const char* isa;
  const CpuKernels<float>& float32;
  const CpuKernels<double>& float64;
  // Or nullptr where bfloat16 has no instructions of its own.
  const HalfForwardKernels* bfloat16_forward;
  const HalfBackwardKernels* bfloat16_backward;
  const HalfTangentKernels* bfloat16_tangents;
  const HalfForwardKernels* float16_forward = nullptr;  // the same of float16
};

namespace generic {
extern const CpuKernelTable table;
}
namespace avx2 {
extern const CpuKernelTable table;
}
namespace avx512 {
extern const CpuKernelTable table;
}
namespace avx512_amx {
extern const CpuKernelTable table;
}
namespace avx512_amx_fp16 {
extern const CpuKernelTable table;
}
namespace avx512_bf16 {
extern const CpuKernelTable table;
}
namespace neon {
extern const CpuKernelTable table;
}

enum class IsaChoice { kFound, kUnknownName, kNotOnThisCpu };

struct ChosenKernels {
  IsaChoice choice;
  const CpuKernelTable* table;  // nullptr unless found
  /// Those of vectors half as long, for what leaves_half_a_vector. nullptr where two of these take
  /// longer than one of `table`'s, or where that was asked for by name.
  const CpuKernelTable* of_half_vectors = nullptr;
};

/// The best instruction set of this processor, or the one called `name` if it is not nullptr.
ChosenKernels choose_cpu_kernels(const char* name);

/// Whether the rows of a key/value head leave half of a vector of 16 lanes empty, and there are few
/// others. It depends on nothing but sizes, as all bits of a result do.
bool leaves_half_a_vector(const Problem<float>& problem);

/// The sets compiled into this library, best first, separated by ", ".
const char* cpu_isa_names();

}  // namespace qkv::kernels
