/* Weights as tensor cores read them: codes of a tile of 16 outputs and a chunk of 64 channels, in registers.

   Lane 4 g + t holds rows g and g + 8 of the tile. Step s of four (an mma each) has channels c to c + 3 of the chunk,
   c = 32 (s / 2) + 8 t + 4 (s % 2): so two steps' activations are one load of 16 bytes. Which channels an mma sums is
   free, as long as both its operands agree.

   Codes lie in planes of bits, each with one load a lane: the lowest four bits of a step's eight codes are a word, code
   h of pair p at bit 4 p + 16 h, where pair p is channels c + 2 (p / 2) + h of row g + 8 (p % 2): operand register p. Bits
   4 and 5 of two steps are a word (bit 8 (s % 2) + 2 p + 16 h); bit 4 of four steps is one (4 s + p + 16 h); the high half
   of 8 bits is laid out as the low one. */
#ifndef TAPEOUT_WEIGHTS_CUH
#define TAPEOUT_WEIGHTS_CUH

#include "portable.h"
#include "parameters.h"

enum { TILE = 16, CHUNK = 64, STEPS = 4, SPAN = 32 }; /* SPAN: channels that are summed before they are scaled */

/* Bits of `word` from `from` on, at `to`, in both halves, with `others`: one shift and one logical operation. */
template <int from, int to, uint32_t mask>
__device__ __forceinline__ uint32_t field(uint32_t word, uint32_t others) {
  return and_or(from > to ? word >> (from - to) : word << (to - from), mask << to, others);
}

/* How codes are read: from memory, which nobody reads again, or from shared memory. */
struct ReadOnce {
  template <class Word>
  __device__ __forceinline__ Word operator()(const Word* from) const {
    return load_once(from);
  }
};
struct Read {
  template <class Word>
  __device__ __forceinline__ Word operator()(const Word* from) const {
    return *from;
  }
};

template <int BITS>
struct Codes;

template <>
struct Codes<4> {
  uint4 low;
  template <class Reader>
  __device__ __forceinline__ void load(const uint8_t* chunk, int lane, const Reader& read) {
    low = read(reinterpret_cast<const uint4*>(chunk) + lane);
  }
  template <int step>
  __device__ __forceinline__ uint32_t low_word() const {
    return step == 0 ? low.x : step == 1 ? low.y : step == 2 ? low.z : low.w;
  }
  /* Register `pair` of a step: both codes, from bit `to` on, with other bits. */
  template <int step, int pair, int to>
  __device__ __forceinline__ uint32_t at(uint32_t others = 0) const {
    return field<4 * pair, to, 0x000f000f>(low_word<step>(), others);
  }
};

template <>
struct Codes<5> : Codes<4> {
  uint32_t high;
  template <class Reader>
  __device__ __forceinline__ void load(const uint8_t* chunk, int lane, const Reader& read) {
    Codes<4>::load(chunk, lane, read);
    high = read(reinterpret_cast<const uint32_t*>(chunk + 64 * 8) + lane);
  }
  template <int step, int pair, int to>
  __device__ __forceinline__ uint32_t at(uint32_t others = 0) const {
    return field<4 * step + pair, to + 4, 0x00010001>(high, Codes<4>::at<step, pair, to>(others));
  }
};

template <>
struct Codes<6> : Codes<4> {
  uint2 high;
  template <class Reader>
  __device__ __forceinline__ void load(const uint8_t* chunk, int lane, const Reader& read) {
    Codes<4>::load(chunk, lane, read);
    high = read(reinterpret_cast<const uint2*>(chunk + 64 * 8) + lane);
  }
  template <int step, int pair, int to>
  __device__ __forceinline__ uint32_t at(uint32_t others = 0) const {
    return field<8 * (step % 2) + 2 * pair, to + 4, 0x00030003>(step < 2 ? high.x : high.y,
                                                                Codes<4>::at<step, pair, to>(others));
  }
};

template <>
struct Codes<8> : Codes<4> {
  uint4 high;
  template <class Reader>
  __device__ __forceinline__ void load(const uint8_t* chunk, int lane, const Reader& read) {
    Codes<4>::load(chunk, lane, read);
    high = read(reinterpret_cast<const uint4*>(chunk + 64 * 8) + lane);
  }
  template <int step>
  __device__ __forceinline__ uint32_t high_word() const {
    return step == 0 ? high.x : step == 1 ? high.y : step == 2 ? high.z : high.w;
  }
  template <int step, int pair, int to>
  __device__ __forceinline__ uint32_t high_at(uint32_t others) const {
    return field<4 * pair, to, 0x000f000f>(high_word<step>(), others);
  }
  template <int step, int pair, int to>
  __device__ __forceinline__ uint32_t at(uint32_t others = 0) const {
    return high_at<step, pair, to + 4>(Codes<4>::at<step, pair, to>(others));
  }
};

/* Weights in half, as they are: the four operand registers of a step lie together, step after step. */
template <>
struct Codes<16> {
  uint4 steps[STEPS];
  template <class Reader>
  __device__ __forceinline__ void load(const uint8_t* chunk, int lane, const Reader& read) {
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      steps[step] = read(reinterpret_cast<const uint4*>(chunk + step * 64 * 8) + lane);
  }
  template <int step, int pair>
  __device__ __forceinline__ uint32_t halves() const {
    const uint4& x = steps[step];
    return pair == 0 ? x.x : pair == 1 ? x.y : pair == 2 ? x.z : x.w;
  }
};

/* Codes less their zero point in half, exactly. A code or'ed into the fraction of a power of two is that power
   plus the code; what is added takes both the power and the zero point away again. `offset` is of a row. */
/* 1,024 + code. Rows 8 to 15 of fewer than 8 bits need no shift in a word's low byte: 1,024 + 16 code. */
template <int BITS>
struct Decoder {
  static __device__ __forceinline__ uint32_t offset(float zero_point, int second) {
    const float power = second && BITS < 8 ? 64 : 1024;
    return f16x2_of(-power - zero_point, -power - zero_point);
  }
  template <int step, int pair>
  static __device__ __forceinline__ uint32_t decode(const Codes<BITS>& codes, uint32_t offset) {
    if (pair % 2 && BITS < 8)
      return fma_f16x2(codes.template at<step, pair, 4>(0x64006400), 0x2c002c00, offset); /* · 1 / 16 */
    return add_f16x2(codes.template at<step, pair, 0>(0x64006400), offset);
  }
};

template <>
struct Decoder<16> {
  static __device__ __forceinline__ uint32_t offset(float, int) { return 0; }
  template <int step, int pair>
  static __device__ __forceinline__ uint32_t decode(const Codes<16>& codes, uint32_t) {
    return codes.halves<step, pair>();
  }
};

/* The mma operand of a step: 16 rows, 16 channels. offsets: of rows g and g + 8. */
template <int BITS, int step>
__device__ __forceinline__ uint4 decode(const Codes<BITS>& codes, const uint2& offsets) {
  using D = Decoder<BITS>;
  return make_uint4(D::template decode<step, 0>(codes, offsets.x), D::template decode<step, 1>(codes, offsets.y),
                    D::template decode<step, 2>(codes, offsets.x), D::template decode<step, 3>(codes, offsets.y));
}

/* Scales and zero points of rows g and g + 8 of a tile, for one group. */
struct RowPair {
  float2 scales;
  uint32_t zero_points; /* two bytes */
};

__device__ __forceinline__ int groups_of(const Weight& w) {
  return ((w.K - 1) >> w.group_shift) + 1;
}

__device__ __forceinline__ float2 halves_of(uint32_t both) {
  return make_float2(f16_to_float((uint16_t)both), f16_to_float((uint16_t)(both >> 16)));
}
__device__ __forceinline__ float2 scales_at(const Weight& w, int at) {
  return w.half_scales ? halves_of(static_cast<const uint32_t*>(w.scales)[at])
                       : static_cast<const float2*>(w.scales)[at];
}

/* Where scales and zero points of a channel lie. */
__device__ __forceinline__ int rows_at(const Weight& w, int tile, int channel, int g) {
  return (tile * groups_of(w) + (smaller(channel, w.K - 1) >> w.group_shift)) * (TILE / 2) + g;
}
template <int BITS>
__device__ __forceinline__ uint32_t middle_of() {
  return 0x0101 << (BITS - 1);
}
template <int BITS>
__device__ __forceinline__ RowPair load_rows(const Weight& w, int tile, int channel, int g) {
  const int at = rows_at(w, tile, channel, g);
  return {scales_at(w, at), w.zero_points ? reinterpret_cast<const uint16_t*>(w.zero_points)[at] : middle_of<BITS>()};
}

/* Weights in half have neither. */
template <>
__device__ __forceinline__ RowPair load_rows<16>(const Weight&, int, int, int) {
  RowPair rows;
  rows.scales = make_float2(1, 1), rows.zero_points = 0;
  return rows;
}

#endif
