#pragma once

#include "kernels/cpu/amx_squares.inc.h"
#include "kernels/cpu/attention_backward.inc.h"

namespace qkv::kernels::QKV_ISA {

constexpr int kAmxBackwardVectors = 6;

/// Where an AmxBackward has what: or only how much it is, if memory is nullptr.
struct AmxBackwardMemory {
  using Rows = BackwardRows<float, kAmxBackwardVectors>;
  static constexpr int kRows = Rows::kRows;
  static constexpr int kSquares = kRows / kSquare;
  static constexpr int kBlockSquares = kBackwardBlockKeys / kSquare;

  // Of the keys of the split, in tiles:
  BFloat16* key_lines;    // A [keys / 16][depths of D]
  BFloat16* value_lines;  // A [keys / 16][depths of Dv]
  BFloat16* key_columns;  // A [keys / 32][columns of D]
  float* grad_key;        // C [keys / 16][columns of D]
  float* grad_value;      // C [keys / 16][columns of Dv]
  uint8_t* poisoned;      // [keys / 32]: something in K is not finite
  // Of a tile of rows:
  BFloat16* query_columns;     // B [rows / 16][depths of D]
  BFloat16* grad_out_columns;  // B [rows / 16][depths of Dv]
  BFloat16* query_rows;        // B [rows / 32][columns of D]
  BFloat16* grad_out_rows;     // B [rows / 32][columns of Dv]
  float* grad_query_t;         // [columns of D · 16][rows]
  // Of 32 keys:
  float* scores;       // [32][rows], S, P
  float* grads;        // [32][rows], dP, dS
  float* caps;         // [32][rows], the derivative of the softcap
  BFloat16* p_lines;   // A [rows / 32][2 parts][2 of keys]
  BFloat16* ds_lines;  // as p_lines
  // Of a block of keys:
  BFloat16* ds_pairs;  // B [keys / 32][rows / 32][2 parts][2 of rows]
  float* bias;
  uint8_t* bits;
  uint8_t* stays;

  int64_t bytes;

  AmxBackwardMemory(const BackwardParams<float>& params, void* memory) {
    Pieces pieces(memory);
    const Problem<float>& p = params.problem;
    const int64_t blocks = (backward_blocks(p) + params.splits - 1) / params.splits;
    const int64_t keys = blocks * kBlockSquares;  // in squares
    const int64_t depths = amx_depths(p.head_dim), value_depths = amx_depths(p.value_dim);
    const int64_t columns = amx_columns(p.head_dim), value_columns = amx_columns(p.value_dim);
    pieces.take(key_lines, 2 * keys * depths);
    pieces.take(value_lines, 2 * keys * value_depths);
    pieces.take(key_columns, keys * columns);
    pieces.take(grad_key, 2 * keys * columns);
    pieces.take(grad_value, 2 * keys * value_columns);
    pieces.take(query_columns, 2 * kSquares * depths);
    pieces.take(grad_out_columns, 2 * kSquares * value_depths);
    pieces.take(query_rows, kSquares * columns);
    pieces.take(grad_out_rows, kSquares * value_columns);
    pieces.take(grad_query_t, 2 * kSquares * columns);
    constexpr int64_t kOfSquares = kSquare * kRows * int64_t{sizeof(float)} / kTileBytes;
    pieces.take(scores, kOfSquares);
    pieces.take(grads, kOfSquares);
    pieces.take(caps, p.softcap != 0.0f ? kOfSquares : 0);
    pieces.take(p_lines, 4 * kSquares);
    pieces.take(ds_lines, 4 * kSquares);
    pieces.take(ds_pairs, 4 * kSquares * kBlockSquares);
    pieces.take(bias, MaskTile<float, kRows>::has_bias(p) ? kOfSquares * kBlockSquares : 0);
    constexpr int64_t kBits = (kBackwardBlockKeys / 8 * kRows + kTileBytes - 1) / kTileBytes;
    pieces.take(bits, kBits);
    pieces.take(stays, kBits);
    pieces.take(poisoned, (keys + kTileBytes - 1) / kTileBytes);
    bytes = pieces.bytes();
  }
};

}  // namespace qkv::kernels::QKV_ISA
