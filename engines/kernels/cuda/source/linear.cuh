/* y = x · Wᵀ + bias for a weight in groups of 4-, 5-, 6- or 8-bit codes, or in half, and activations in half; and for
   weights and activations in E4M3. What the kernels for few tokens and for many have in common.

   Weights are the 16-row operand of mma, tokens its 8 columns, so one token costs what eight do and every weight is
   decoded once for all tokens of a block.

   A result has one order, so a token has the same bits alone and in any batch, whichever kernel computes it. Codes less zero
   points are exact in half. Channels of a chunk that share a scale are summed in float by mma; their sum is multiplied
   by the scale and added to that of a slice, chunk after chunk. The slices of all channels are added in order, from 0 on, then
   the bias. Of E4M3 an mma sums 32 channels, and the scales of rows and tokens are multiplied at the end. */
#ifndef TAPEOUT_LINEAR_CUH
#define TAPEOUT_LINEAR_CUH

#include "weights.cuh"

enum { TOKENS = 8 }; /* columns of an mma */

/* The first chunk of a slice. */
__device__ __forceinline__ int slice_begin(int chunks, int slice) {
  return chunks * slice / LINEAR_SLICES;
}

/* Kinds of weights. Of plain ones all channels of a chunk share a scale in half and the middle zero point. */
constexpr bool IS_plain = true, IS_any = false;

/* Codes that have scales in every chunk. */
template <class T, int BITS>
constexpr bool CODES = BITS != 16 && !SAME<T, E4M3>;

/* Scales and zero points of rows g and g + 8 of a chunk, as they are stored until they are used. Scales in float are read
   then. */
template <class T, int BITS, bool PLAIN>
struct ChunkRows {
  uint32_t scales[2], zero_points[2]; /* of its spans */
  __device__ __forceinline__ void load(const Weight& w, int tile, int chunk, int g) {
#pragma unroll
    for (int span = 0; span < 2; span++) {
      const int at = rows_at(w, tile, chunk * CHUNK + span * SPAN, g);
      if (w.half_scales) scales[span] = static_cast<const uint32_t*>(w.scales)[at];
      if (w.zero_points) zero_points[span] = reinterpret_cast<const uint16_t*>(w.zero_points)[at];
    }
  }
  __device__ __forceinline__ RowPair of(int span, const Weight& w, int tile, int chunk, int g) const {
    const int at = w.half_scales ? 0 : rows_at(w, tile, chunk * CHUNK + span * SPAN, g);
    return {w.half_scales ? halves_of(scales[span]) : static_cast<const float2*>(w.scales)[at],
            w.zero_points ? zero_points[span] : middle_of<BITS>()};
  }
};
template <class T, int BITS>
struct ChunkRows<T, BITS, true> {
  uint32_t scales;
};
/* Weights in half have neither; scales of E4M3 are multiplied at the end. */
struct NoRows {
  __device__ __forceinline__ void load(const Weight&, int, int, int) {}
  __device__ __forceinline__ RowPair of(int, const Weight&, int, int, int) const { return {make_float2(1, 1), 0}; }
};
template <class T>
struct ChunkRows<T, 16, false> : NoRows {};
template <>
struct ChunkRows<E4M3, 8, false> : NoRows {};

/* E4M3: both steps of a span are one mma. A word of low halves and one of high halves have the codes of a step in
   row g at every other place, and between them those of row g + 8: channels 0, 2, 1, 3. */
template <int step>
__device__ __forceinline__ uint2 bytes_of(const Codes<8>& codes) {
  const uint32_t low = codes.low_word<step>(), high = codes.high_word<step>();
  return make_uint2((low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4, (low >> 4 & 0x0f0f0f0f) | (high & 0xf0f0f0f0));
}
template <int span>
__device__ __forceinline__ uint4 operand_of(const Codes<8>& codes) {
  const uint2 first = bytes_of<2 * span>(codes), second = bytes_of<2 * span + 1>(codes);
  return make_uint4(first.x, first.y, second.x, second.y);
}

__device__ __forceinline__ void add_scaled(float4& sum, const float4& dot, const float2& scales) {
  sum.x = fmaf(dot.x, scales.x, sum.x), sum.y = fmaf(dot.y, scales.x, sum.y);
  sum.z = fmaf(dot.z, scales.y, sum.z), sum.w = fmaf(dot.w, scales.y, sum.w);
}
__device__ __forceinline__ void add(float4& sum, const float4& more) {
  sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

/* Adds a span's part of the results. `x_at(group, span)` gives this lane's activations: 16 bytes of half, 8 of E4M3;
   `rows_of(tile, span)` scales and zero points. */
template <class T, int BITS, int span, int TILES, int GROUPS, class Rows, class Activations>
__device__ __forceinline__ void add_span(const Codes<BITS> (&codes)[TILES], const Rows& rows_of,
                                         const Activations& x_at, float4 (&sums)[TILES][GROUPS]) {
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    if constexpr (SAME<T, E4M3>) {
      const uint4 operand = operand_of<span>(codes[tile]);
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        float4 dot = make_float4(0, 0, 0, 0);
        E4M3::mma(dot, operand, x_at(group, span));
        add(sums[tile][group], dot);
      }
    } else {
      using D = Decoder<BITS>;
      const RowPair rows = rows_of(tile, span);
      const uint2 offsets =
          make_uint2(D::offset((float)(rows.zero_points & 255), 0), D::offset((float)(rows.zero_points >> 8), 1));
      const uint4 first = decode<BITS, 2 * span>(codes[tile], offsets),
                  second = decode<BITS, 2 * span + 1>(codes[tile], offsets);
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        const uint4 here = x_at(group, span);
        float4 dot = make_float4(0, 0, 0, 0);
        T::mma(dot, first, make_uint2(here.x, here.y));
        T::mma(dot, second, make_uint2(here.z, here.w));
        add_scaled(sums[tile][group], dot, rows.scales);
      }
    }
  }
}

/* Adds those of a chunk of tiles from `first_tile` on. */
template <class T, int BITS, bool PLAIN, int TILES, int GROUPS, class Activations>
__device__ __forceinline__ void add_chunk(const Weight& w, int first_tile, int chunk, const Codes<BITS> (&codes)[TILES],
                                          const ChunkRows<T, BITS, PLAIN> (&rows)[TILES], const Activations& x_at,
                                          float4 (&sums)[TILES][GROUPS]) {
  if constexpr (PLAIN) {
    using D = Decoder<BITS>;
    const float middle = 1 << (BITS - 1);
    const uint2 offsets = make_uint2(D::offset(middle, 0), D::offset(middle, 1));
    uint4 operands[TILES][STEPS];
    float2 scales[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      operands[tile][0] = decode<BITS, 0>(codes[tile], offsets);
      operands[tile][1] = decode<BITS, 1>(codes[tile], offsets);
      operands[tile][2] = decode<BITS, 2>(codes[tile], offsets);
      operands[tile][3] = decode<BITS, 3>(codes[tile], offsets);
      scales[tile] = halves_of(rows[tile].scales);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const uint4 first = x_at(group, 0), second = x_at(group, 1);
      float4 dots[TILES];
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) dots[tile] = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) T::mma(dots[tile], operands[tile][0], make_uint2(first.x, first.y));
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) T::mma(dots[tile], operands[tile][1], make_uint2(first.z, first.w));
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) T::mma(dots[tile], operands[tile][2], make_uint2(second.x, second.y));
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) T::mma(dots[tile], operands[tile][3], make_uint2(second.z, second.w));
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) add_scaled(sums[tile][group], dots[tile], scales[tile]);
    }
  } else {
    const auto rows_of = [&](int tile, int span) {
      return rows[tile].of(span, w, first_tile + tile, chunk, threadIdx.x % WARP / 4);
    };
    add_span<T, BITS, 0>(codes, rows_of, x_at, sums);
    if (chunk * CHUNK + SPAN < w.K) add_span<T, BITS, 1>(codes, rows_of, x_at, sums);
  }
}

/* Writes a tile's results of eight tokens: a lane has two tokens of rows g and g + 8. */
template <class T>
__device__ __forceinline__ void store_results(const BlockLinear& p, int tile, int first_token, float4 sum) {
  const int lane = threadIdx.x % WARP, row = tile * TILE + lane / 4, token = first_token + lane % 4 * 2;
  const int64_t N = p.weight.N;
  if constexpr (SAME<T, E4M3>) {
    const float2 scales = row < N ? scales_at(p.weight, tile * (TILE / 2) + lane / 4) : make_float2(1, 1);
    const float first = token < p.M ? p.x_scales[token] : 1, second = token + 1 < p.M ? p.x_scales[token + 1] : 1;
    sum = make_float4(sum.x * scales.x * first, sum.y * scales.x * second, sum.z * scales.y * first,
                      sum.w * scales.y * second);
  }
  if (row < p.weight.N) {
    const float bias = p.bias ? p.bias[row] : 0;
    if (token < p.M) p.y[token * N + row] = sum.x + bias;
    if (token + 1 < p.M) p.y[(token + 1) * N + row] = sum.y + bias;
  }
  if (row + 8 < p.weight.N) {
    const float bias = p.bias ? p.bias[row + 8] : 0;
    if (token < p.M) p.y[token * N + row + 8] = sum.z + bias;
    if (token + 1 < p.M) p.y[(token + 1) * N + row + 8] = sum.w + bias;
  }
}

#endif
