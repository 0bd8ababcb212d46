#pragma once

#include <stdint.h>

// What a kernel is told: plain data, no torch. The host fills these in (csrc/problem.cpp), the
// kernels only read them. All strides are in elements.
//
// Letters: B batch, Hq query heads, Hkv key/value heads, M queries, N keys, D head dim of query and
// key, Dv head dim of value.

namespace qkv::kernels {

/// Batch dimensions left after neighbours that step alike in every tensor have been merged.
constexpr int kMaxBatchRank = 8;

/// A tensor (batch.., head, row, column). Inputs have column_stride 1, on a CPU outputs too; on a
/// GPU these may have any.
template <class T>
struct Operand {
  T* data;
  int64_t batch_stride[kMaxBatchRank];
  int64_t head_stride;
  int64_t row_stride;
  int64_t column_stride;
};

enum class MaskType : int32_t { kNone, kBool, kFloat32, kFloat64, kBFloat16, kFloat16 };

/// attn_mask (batch.., Hq, M, N): stride 0 wherever it is broadcast.
struct Mask {
  const void* data;
  MaskType type;
  int64_t batch_stride[kMaxBatchRank];
  int64_t head_stride;
  int64_t row_stride;
  int64_t column_stride;
};

/// key_mask (batch.., N): 1 = may be attended to. data is nullptr when it is not given.
struct KeyMask {
  const uint8_t* data;
  int64_t batch_stride[kMaxBatchRank];
  int64_t column_stride;
};

/// One number for each (batch.., head). data is nullptr when it is not given.
template <class T>
struct HeadNumbers {
  const T* data;
  int64_t batch_stride[kMaxBatchRank];
  int64_t head_stride;
};

/// A weight is dropped if its 16 random bits, as a number, are below threshold (philox.h).
struct Dropout {
  uint32_t threshold;   // probability · 2^16; 0: nothing is dropped
  const int64_t* seed;  // (batch..)
  int64_t batch_stride[kMaxBatchRank];
  int64_t first_head;  // what the query's first head is numbered with
};

/// Query i stands at p = i + offset and may see the keys p - left <= j <= p + right.
struct Band {
  int64_t left;   // -1: unbounded
  int64_t right;  // -1: unbounded
  int64_t offset;
};

/// How numbers lie in memory: as they are computed with, or in 16 bits.
enum class Storage : int32_t { kSame, kBFloat16, kFloat16 };

/// What forward and backward have in common.
template <class T>
struct Problem {
  int32_t batch_rank;
  int64_t batch_size[kMaxBatchRank];
  int64_t batch;  // product of batch_size
  int64_t query_heads;
  int64_t kv_heads;
  int64_t queries;
  int64_t keys;
  int64_t head_dim;
  int64_t value_dim;
  Storage key_value_storage;  // and of the query: if 16 bits, all three point to such numbers
  T scale;
  T softcap;  // 0: none
  Band band;
  Operand<const T> query;
  Operand<const T> key;
  Operand<const T> value;
  Mask attn_mask;
  KeyMask key_mask;
  HeadNumbers<T> alibi_slopes;
  HeadNumbers<T> sinks;
  Dropout dropout;
};

template <class T>
struct ForwardParams {
  Problem<T> problem;
  Storage out_storage;  // if 16 bits, out and out_rest point to such numbers
  Operand<T> out;       // data == nullptr: lse alone, from the scores that derivatives compute
  Operand<T> out_rest;  // then: what rounding took from out; data == nullptr: not needed
  T* lse;               // (B, Hq, M), dense
  T* lse_rest;          // what rounding took from lse, laid out as it; -0 of a row without keys
  // With few rows the keys are cut into ranges: [B][Hkv][split][rows of a head][Dv + 2], or
  // nullptr.
  T* partial;
  void* prepared;             // what prepare_forward leaves for the tiles, or nullptr
  int64_t units_to_next = 1;  // a thread most likely goes on to the unit so many after one
};

/// Gradients that nobody asked for have data == nullptr. If key and value are stored in 16 bits, so
/// are all operands and gradients that are rows of a head.
template <class T>
struct BackwardParams {
  Problem<T> problem;
  Operand<const T> grad_out;
  const T* grad_lse;  // (B, Hq, M), dense, or nullptr
  Operand<const T> out;
  Operand<const T> out_rest;  // if stored in 16 bits: what rounding took from out
  const T* lse;               // (B, Hq, M), dense
  const T* lse_rest;          // as lse
  Operand<T> grad_query;
  Operand<T> grad_key;
  Operand<T> grad_value;
  // The keys are cut into `splits` ranges, which are shared out to `units` units of work: 1, 2, 4
  // or one for each. If a head has several units, each leaves its share of grad_query in
  // partial_grad_query, [head in this wave][unit][row tile][D][row] or, on a CPU, in some cases
  // [row][D]. Shares are summed two and two, in the same order for any number of units.
  int64_t splits;
  int64_t units;
  T* partial_grad_query;  // nullptr when a head is one unit
  // Each row's share of the gradient of its head's slope, [split][B][Hq][M], or nullptr.
  T* slope_gradient_of_rows;
  // On a CPU: where a backward of few rows leaves dS, from which grad_mask is summed, (B, Hq, M,
  // N), dense, or nullptr.
  T* score_gradient_of_rows;
  // Of a float attn_mask, summed over the dimensions in which the mask is broadcast: those have
  // stride 0 here. Numbers of T whatever the storage; on a CPU of double if it has no rows or no
  // columns. Splits add to it; or it is left to a kernel of its own.
  Operand<T> grad_mask;
  // On a CPU: gradients of the weights themselves, (B, Hq, M, N), where values have no columns, or
  // data == nullptr. Stored as the operands.
  Operand<const T> grad_weights;
  // With those: -<grad_weights, weights> of each row, (B, Hq, M), dense, which is grad_lse; and dS
  // of all tiles of rows, [B][Hkv][row tile][key][row], or nullptr if units make it for one tile
  // after the other.
  T* minus_dots;
  T* score_gradients_of_tiles;
};

/// The gradients of alibi_slopes and sinks before they are summed over the batch, (B, Hq) each.
template <class T>
struct HeadGradientParams {
  BackwardParams<T> backward;
  double* grad_slopes;  // or nullptr
  double* grad_sinks;   // or nullptr
};

/// Directions in which the operands move: tangents, or cotangents of their gradients. One that
/// stays has data == nullptr.
template <class T>
struct Directions {
  Operand<const T> query;
  Operand<const T> key;
  Operand<const T> value;
  Operand<const T> attn_mask;  // stride 0 wherever it is broadcast, in columns too
  HeadNumbers<T> alibi_slopes;
  HeadNumbers<T> sinks;
};

/// The derivative of the forward along the directions.
template <class T>
struct JvpParams {
  Problem<T> problem;
  Directions<T> directions;
  Operand<const T> out;
  const T* lse;       // (B, Hq, M), dense
  const T* lse_rest;  // as lse
  Operand<T> out_t;
  T* lse_t;  // as lse
  // On a CPU: whether the mean of a row's score tangents is found first and taken from these.
  bool takes_means = false;
  // On a CPU: if 16 bits, out, out_rest (what rounding took from out) and out_t point to such
  // numbers.
  Storage out_storage = Storage::kSame;
  Operand<const T> out_rest;
};

/// The derivative of the backward along the directions, which is also the double backward: it goes
/// where the backward's own results would.
template <class T>
struct BackwardBackwardParams {
  BackwardParams<T> backward;
  Directions<T> directions;
  Operand<const T> out_t;  // from JvpParams, with the same directions
  const T* lse_t;
};

}  // namespace qkv::kernels
