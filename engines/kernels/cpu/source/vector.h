/* Vectors of 16 floats or 32-bit integers, or of 64 bytes, and the operations that the kernels use.

   With AVX-512 a vector is one of 32 registers, with AVX2 it is two of 16, on ARM four of 32. Arithmetic is written with
   operators, which the compiler splits where it must; an operation with an instruction of its own has a function for each
   instruction set, those of ARM in vector_neon.h. `vmax`, `vround` and the like are the vector forms of the C library's
   functions. A multiply and an add that round once are a `vfma`. */
#ifndef TAPEOUT_VECTOR_H
#define TAPEOUT_VECTOR_H

#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* All functions that take vectors are inlined: the calling convention of vectors does not matter. */
#pragma clang diagnostic ignored "-Wpsabi"

/* A `for` that is fully unrolled: its arrays are registers. */
#define EACH _Pragma("clang loop unroll(full)") for
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef int8_t I8x64 __attribute__((vector_size(64)));
typedef int8_t I8x16 __attribute__((vector_size(LANES)));
typedef uint8_t U8x16 __attribute__((vector_size(LANES)));
typedef uint8_t U8x8 __attribute__((vector_size(LANES / 2)));

INLINE F32x16 load(const void* from) {
  F32x16 x;
  memcpy(&x, from, sizeof x);
  return x;
}
INLINE I32x16 load_int(const void* from) {
  I32x16 x;
  memcpy(&x, from, sizeof x);
  return x;
}
INLINE I8x16 load_int8(const void* from) {
  I8x16 x;
  memcpy(&x, from, sizeof x);
  return x;
}
INLINE void store(void* to, F32x16 x) {
  memcpy(to, &x, sizeof x);
}
INLINE void store_int(void* to, I32x16 x) {
  memcpy(to, &x, sizeof x);
}
INLINE void store_int8(void* to, I8x16 x) {
  memcpy(to, &x, sizeof x);
}

INLINE F32x16 splat(float x) {
  return (F32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
INLINE I32x16 splat_int(int32_t x) {
  return (I32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
/* Four bytes, the same in all lanes. */
INLINE I32x16 splat_int8x4(const void* bytes) {
  int32_t four;
  memcpy(&four, bytes, 4);
  return splat_int(four);
}
/* A float at any address, whatever the type of what is stored there. */
INLINE F32x16 splat_from(const void* from) {
  float x;
  memcpy(&x, from, sizeof x);
  return splat(x);
}

/* Shifts and sums of integers that may wrap around: signed ones would be undefined. */
INLINE I32x16 shift_left(I32x16 x, const int count) {
  return (I32x16)((U32x16)x << count);
}
INLINE I32x16 wrapping_add(I32x16 a, I32x16 b) {
  return (I32x16)((U32x16)a + (U32x16)b);
}

INLINE F32x16 vfma(F32x16 a, F32x16 b, F32x16 c) {
  return __builtin_elementwise_fma(a, b, c);
}
INLINE F32x16 vabs(F32x16 x) {
  return __builtin_elementwise_abs(x);
}
INLINE F32x16 to_float(I32x16 x) {
  return __builtin_convertvector(x, F32x16);
}
INLINE I32x16 widen(I8x16 x) {
  return __builtin_convertvector(x, I32x16);
}
INLINE I32x16 widen_bytes(const void* from) {
  U8x16 x;
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, I32x16);
}
INLINE I8x16 truncate_int8(I32x16 x) {
  return __builtin_convertvector(x, I8x16);
}
/* 1 where an integer has no code of `bits` bits, and is clipped; else 0. */
INLINE I32x16 beyond(I32x16 x, const int bits) {
  const int largest = (1 << (bits - 1)) - 1;
  return -((x > largest) | (x < -largest - 1)); /* true is -1 */
}
/* Codes of 4 bits, two to a byte: number 2i in the low half of byte i, 2i + 1 in the high half, each plus 8. Integers
   that have no code are clipped. */
INLINE I8x16 load_int4(const void* from) {
  U8x8 x;
  memcpy(&x, from, sizeof x);
  return (I8x16)__builtin_shufflevector(x & 15, x >> 4, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15) - 8;
}
INLINE void store_int4(void* to, I32x16 x) {
  x = __builtin_elementwise_max(__builtin_elementwise_min(x, splat_int(7)), splat_int(-8)) + 8;
  const U8x16 codes = __builtin_convertvector(x, U8x16);
  const U8x8 even = __builtin_shufflevector(codes, codes, 0, 2, 4, 6, 8, 10, 12, 14);
  const U8x8 packed = even | __builtin_shufflevector(codes, codes, 1, 3, 5, 7, 9, 11, 13, 15) << 4;
  memcpy(to, &packed, sizeof packed);
}
INLINE int32_t reduce_add_int(I32x16 x) {
  return __builtin_reduce_add(x);
}
INLINE int32_t reduce_min_int(I32x16 x) {
  return __builtin_reduce_min(x);
}

#ifdef __AVX512VNNI__

#define AVX512 1

/* A lane each: selected or not. */
typedef __mmask16 Mask;

INLINE Mask mask_of(uint64_t bits) {
  return (__mmask16)bits;
}
INLINE Mask greater(F32x16 a, F32x16 b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}
INLINE Mask visnan(F32x16 x) {
  return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
}
INLINE F32x16 blend(Mask mask, F32x16 a, F32x16 b) {
  return _mm512_mask_mov_ps(b, mask, a);
}
/* Of lanes of all bits or none, as comparisons with operators give. */
INLINE int any_of(I32x16 lanes) {
  return _mm512_movepi32_mask((__m512i)lanes) != 0;
}
INLINE I32x16 blend_int(Mask mask, I32x16 a, I32x16 b) {
  return (I32x16)_mm512_mask_mov_epi32((__m512i)b, mask, (__m512i)a);
}
/* The first `count` of 16 lanes, 0 to 16. The memory of the others is neither read nor written; they are loaded as zeros. */
INLINE Mask first_lanes(int64_t count) {
  return (__mmask16)((1u << count) - 1);
}
INLINE F32x16 load_first(const float* from, int64_t count) {
  return _mm512_maskz_loadu_ps(first_lanes(count), from);
}
INLINE void store_first(float* to, F32x16 x, int64_t count) {
  _mm512_mask_storeu_ps(to, first_lanes(count), x);
}

/* `b` where one of the two is NaN. */
INLINE F32x16 vmax(F32x16 a, F32x16 b) {
  return _mm512_max_ps(a, b);
}
INLINE F32x16 vmin(F32x16 a, F32x16 b) {
  return _mm512_min_ps(a, b);
}
INLINE float reduce_add(F32x16 x) {
  return _mm512_reduce_add_ps(x);
}
INLINE float reduce_max(F32x16 x) {
  return _mm512_reduce_max_ps(x);
}
/* To the nearest integer, ties to even. */
INLINE I32x16 round_to_int(F32x16 x) {
  return (I32x16)_mm512_cvtps_epi32(x);
}
INLINE F32x16 vround(F32x16 x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT);
}
INLINE I8x16 saturate_int8(I32x16 x) {
  return (I8x16)_mm512_cvtsepi32_epi8((__m512i)x);
}
INLINE F32x16 load_half(const void* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(from));
}
/* x - floor(x) */
INLINE F32x16 fraction(F32x16 x) {
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
/* y * 2^floor(x) */
INLINE F32x16 vscalef(F32x16 y, F32x16 x) {
  return _mm512_scalef_ps(y, x);
}

/* The low four bits of bytes become the bytes of a table. */
INLINE I32x16 look_up(U8x16 table, I32x16 bytes) {
  const __m512i four_times = _mm512_broadcast_i32x4((__m128i)table);
#ifdef __AVX512VBMI__ /* looks up six bits in all 64 bytes; a shuffle gives 0 where the eighth is set */
  return (I32x16)_mm512_permutexvar_epi8((__m512i)bytes, four_times);
#else
  return (I32x16)_mm512_shuffle_epi8(four_times, (__m512i)(bytes & splat_int(0x0f0f0f0f)));
#endif
}

/* sum + the dot product of four unsigned and four signed bytes, in each lane. */
INLINE I32x16 dot_int8x4(I32x16 sum, I32x16 u8, I32x16 i8) {
  return (I32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u8, (__m512i)i8);
}

/* Lane i: the i-th bytes of all four. */
INLINE I32x16 interleave_int8x4(I8x16 a, I8x16 b, I8x16 c, I8x16 d) {
  __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i within = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __asm__("" : "+v"(across), "+v"(within)); /* without this the compiler makes ten instructions of the two */
  __m512i x = _mm512_zextsi128_si512((__m128i)a);
  x = _mm512_mask_broadcast_i32x4(x, 0x00f0, (__m128i)b);
  x = _mm512_mask_broadcast_i32x4(x, 0x0f00, (__m128i)c);
  x = _mm512_mask_broadcast_i32x4(x, 0xf000, (__m128i)d);
  return (I32x16)_mm512_shuffle_epi8(_mm512_permutexvar_epi32(across, x), within);
}

/* The side of a square of 32-bit words that is transposed in registers, and a row of it. */
enum { SQUARE = 16 };
typedef I32x16 SquareRow;

INLINE SquareRow load_square_row(const void* from, int64_t count) {
  return (SquareRow)_mm512_maskz_loadu_epi32(first_lanes(count), from);
}
INLINE void transpose(SquareRow x[SQUARE]) {
  __m512i y[SQUARE];
  EACH (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32((__m512i)x[i], (__m512i)x[i + 1]);
  }
  EACH (int i = 0; i < 16; i += 4)
    EACH (int j = 0; j < 2; j++) {
      x[i + 2 * j] = (SquareRow)_mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
      x[i + 2 * j + 1] = (SquareRow)_mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
    }
  /* x[4i + j] lane l: words 4l + j of rows 4i .. 4i + 3 */
  EACH (int j = 0; j < 4; j++) {
    __m512i low = _mm512_shuffle_i32x4((__m512i)x[j], (__m512i)x[4 + j], 0x88);
    __m512i odd = _mm512_shuffle_i32x4((__m512i)x[j], (__m512i)x[4 + j], 0xdd);
    __m512i next = _mm512_shuffle_i32x4((__m512i)x[8 + j], (__m512i)x[12 + j], 0x88);
    __m512i other = _mm512_shuffle_i32x4((__m512i)x[8 + j], (__m512i)x[12 + j], 0xdd);
    y[j] = _mm512_shuffle_i32x4(low, next, 0x88);
    y[8 + j] = _mm512_shuffle_i32x4(low, next, 0xdd);
    y[4 + j] = _mm512_shuffle_i32x4(odd, other, 0x88);
    y[12 + j] = _mm512_shuffle_i32x4(odd, other, 0xdd);
  }
  EACH (int i = 0; i < 16; i++) x[i] = (SquareRow)y[i];
}

#else

#define AVX512 0

/* A lane each: all bits, or none. */
typedef I32x16 Mask;

INLINE Mask mask_of(uint64_t bits) {
  const I32x16 each = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  return (splat_int((int32_t)bits) & each) != 0;
}
INLINE Mask greater(F32x16 a, F32x16 b) {
  return a > b;
}
INLINE Mask visnan(F32x16 x) {
  return x != x;
}
/* The first `count` of 16 lanes, 0 to 16. The memory of the others is neither read nor written; they are loaded as zeros. */
INLINE Mask first_lanes(int64_t count) {
  const I32x16 each = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return each < splat_int((int32_t)count);
}

#ifdef __aarch64__
#include "vector_neon.h"
#else

typedef int32_t I32x8 __attribute__((vector_size(32)));
typedef I32x8 SquareRow;
typedef int16_t I16x32 __attribute__((vector_size(64)));

/* The two registers of a vector, of floats or of integers. */
#define LOW(x)          __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)
#define HIGH(x)         __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)
#define BOTH(low, high) __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)

/* Of lanes of all bits or none, as comparisons with operators give. */
INLINE int any_of(I32x16 lanes) {
  return _mm256_movemask_ps((__m256)(LOW(lanes) | HIGH(lanes))) != 0;
}
INLINE F32x16 blend(Mask mask, F32x16 a, F32x16 b) {
  F32x16 bits = (F32x16)mask;
  return BOTH(_mm256_blendv_ps(LOW(b), LOW(a), LOW(bits)), _mm256_blendv_ps(HIGH(b), HIGH(a), HIGH(bits)));
}
INLINE F32x16 load_first(const float* from, int64_t count) {
  Mask mask = first_lanes(count);
  const float* next = count > 8 ? from + 8 : from;
  return BOTH(_mm256_maskload_ps(from, (__m256i)LOW(mask)), _mm256_maskload_ps(next, (__m256i)HIGH(mask)));
}
INLINE void store_first(float* to, F32x16 x, int64_t count) {
  Mask mask = first_lanes(count);
  _mm256_maskstore_ps(to, (__m256i)LOW(mask), LOW(x));
  _mm256_maskstore_ps(count > 8 ? to + 8 : to, (__m256i)HIGH(mask), HIGH(x));
}

/* `b` where one of the two is NaN. */
INLINE F32x16 vmax(F32x16 a, F32x16 b) {
  return BOTH(_mm256_max_ps(LOW(a), LOW(b)), _mm256_max_ps(HIGH(a), HIGH(b)));
}
INLINE F32x16 vmin(F32x16 a, F32x16 b) {
  return BOTH(_mm256_min_ps(LOW(a), LOW(b)), _mm256_min_ps(HIGH(a), HIGH(b)));
}
INLINE float reduce_add(F32x16 x) {
  __m256 eight = LOW(x) + HIGH(x);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return four[0] + four[1];
}
INLINE float reduce_max(F32x16 x) {
  __m256 eight = _mm256_max_ps(LOW(x), HIGH(x));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return four[0] > four[1] ? four[0] : four[1];
}
/* To the nearest integer, ties to even. */
INLINE I32x16 round_to_int(F32x16 x) {
  return (I32x16)BOTH((SquareRow)_mm256_cvtps_epi32(LOW(x)), (SquareRow)_mm256_cvtps_epi32(HIGH(x)));
}
INLINE I8x16 saturate_int8(I32x16 x) {
  __m256i low = (__m256i)LOW(x), high = (__m256i)HIGH(x);
  __m128i first = _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  __m128i second = _mm_packs_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  return (I8x16)_mm_packs_epi16(first, second);
}
INLINE F32x16 load_half(const void* from) {
  __m128i low, high;
  memcpy(&low, from, sizeof low);
  memcpy(&high, (const char*)from + sizeof low, sizeof high);
  return BOTH(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high));
}
INLINE I32x16 look_up(U8x16 table, I32x16 bytes) {
  const __m256i both = _mm256_broadcastsi128_si256((__m128i)table);
  bytes &= splat_int(0x0f0f0f0f);
  return BOTH((SquareRow)_mm256_shuffle_epi8(both, (__m256i)LOW(bytes)),
              (SquareRow)_mm256_shuffle_epi8(both, (__m256i)HIGH(bytes)));
}
#ifdef __AVXVNNI__
INLINE I32x16 dot_int8x4(I32x16 sum, I32x16 u8, I32x16 i8) {
  return BOTH((SquareRow)_mm256_dpbusd_avx_epi32((__m256i)LOW(sum), (__m256i)LOW(u8), (__m256i)LOW(i8)),
              (SquareRow)_mm256_dpbusd_avx_epi32((__m256i)HIGH(sum), (__m256i)HIGH(u8), (__m256i)HIGH(i8)));
}
#else
/* Sums of adjacent 16-bit integers. */
INLINE I32x16 add_int16_pairs(I32x16 int16) {
  const __m256i ones = _mm256_set1_epi16(1);
  return BOTH((SquareRow)_mm256_madd_epi16((__m256i)LOW(int16), ones),
              (SquareRow)_mm256_madd_epi16((__m256i)HIGH(int16), ones));
}
/* Unsigned bytes times signed bytes; adjacent ones are added in 16 bits, which saturates where both need all 8 bits. */
INLINE I32x16 multiply_add_int8_pairs(I32x16 u8, I32x16 i8) {
  return BOTH((SquareRow)_mm256_maddubs_epi16((__m256i)LOW(u8), (__m256i)LOW(i8)),
              (SquareRow)_mm256_maddubs_epi16((__m256i)HIGH(u8), (__m256i)HIGH(i8)));
}
#endif

/* The side of a square of 32-bit words that is transposed in registers. */
enum { SQUARE = 8 };

INLINE SquareRow load_square_row(const void* from, int64_t count) {
  const SquareRow each = {0, 1, 2, 3, 4, 5, 6, 7};
  return (SquareRow)_mm256_maskload_epi32(from, (__m256i)(each < (int32_t)count));
}
INLINE void transpose(SquareRow x[SQUARE]) {
  SquareRow y[SQUARE];
  EACH (int i = 0; i < 8; i += 2) {
    y[i] = (SquareRow)_mm256_unpacklo_epi32((__m256i)x[i], (__m256i)x[i + 1]);
    y[i + 1] = (SquareRow)_mm256_unpackhi_epi32((__m256i)x[i], (__m256i)x[i + 1]);
  }
  EACH (int i = 0; i < 8; i += 4)
    EACH (int j = 0; j < 2; j++) {
      x[i + 2 * j] = (SquareRow)_mm256_unpacklo_epi64((__m256i)y[i + j], (__m256i)y[i + 2 + j]);
      x[i + 2 * j + 1] = (SquareRow)_mm256_unpackhi_epi64((__m256i)y[i + j], (__m256i)y[i + 2 + j]);
    }
  /* x[4i + j] half l: words 4l + j of rows 4i .. 4i + 3 */
  EACH (int j = 0; j < 4; j++) {
    y[j] = (SquareRow)_mm256_permute2x128_si256((__m256i)x[j], (__m256i)x[4 + j], 0x20);
    y[4 + j] = (SquareRow)_mm256_permute2x128_si256((__m256i)x[j], (__m256i)x[4 + j], 0x31);
  }
  EACH (int i = 0; i < 8; i++) x[i] = y[i];
}
#endif

INLINE I32x16 blend_int(Mask mask, I32x16 a, I32x16 b) {
  return (I32x16)blend(mask, (F32x16)a, (F32x16)b);
}
INLINE F32x16 vround(F32x16 x) {
  return __builtin_elementwise_roundeven(x);
}
/* x - floor(x) */
INLINE F32x16 fraction(F32x16 x) {
  x = vmax(splat(-127), x);
  return x - __builtin_elementwise_floor(x);
}
/* y * 2^floor(x) for y around 1 and x below 128; 0 where 2^floor(x) is not a normal float. */
INLINE F32x16 vscalef(F32x16 y, F32x16 x) {
  I32x16 exponent = round_to_int(__builtin_elementwise_floor(vmax(splat(-127), x)));
  return y * (F32x16)shift_left(wrapping_add(exponent, splat_int(127)), 23);
}
#endif

/* Dot products of weights of `bits` bits and activations from -127 to 127, four adjacent channels to a lane:
   `begin_dots`, then `add_dot` up to DEPTH times, then `end_dots`. The weights that are summed are codes less
   `code_offset`.

   Without an instruction that sums in 32 bits, products are summed in 16: those hold two of up to 128 * 127, four of
   63 * 127 or eight of 31 * 127. Codes of 8 bits less 128 become a magnitude and a sign; where the instruction multiplies
   signed bytes only, they become signed bytes. */
#ifndef SIGNED_CODES
#define SIGNED_CODES 0
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__aarch64__)
INLINE int code_offset(const int bits) {
  return SIGNED_CODES && bits == 8 ? 128 : 0;
}
INLINE int depth_of(const int bits) {
  return (void)bits, 1;
}
INLINE I32x16 begin_dots(I32x16 sum, const int bits) {
  return (void)bits, sum;
}
INLINE I32x16 add_dot(I32x16 partial, I32x16 codes, I32x16 activations, const int bits) {
  if (code_offset(bits)) codes ^= splat_int((int32_t)0x80808080);
  return dot_int8x4(partial, codes, activations);
}
INLINE I32x16 end_dots(I32x16 sum, I32x16 partial, const int bits) {
  return (void)sum, (void)bits, partial;
}
#else
INLINE int code_offset(const int bits) {
  return bits == 8 ? 128 : 0;
}
INLINE int depth_of(const int bits) {
  return bits == 8 ? 1 : bits == 6 ? 2 : 4;
}
INLINE I32x16 begin_dots(I32x16 sum, const int bits) {
  return bits == 8 ? sum : (I32x16){0};
}
INLINE I32x16 add_dot(I32x16 partial, I32x16 codes, I32x16 activations, const int bits) {
  if (bits < 8) return (I32x16)((I16x32)partial + (I16x32)multiply_add_int8_pairs(codes, activations));
  I32x16 centred = codes ^ splat_int((int32_t)0x80808080);
  __m256i low = (__m256i)LOW(centred), high = (__m256i)HIGH(centred);
  I32x16 magnitudes = BOTH((SquareRow)_mm256_abs_epi8(low), (SquareRow)_mm256_abs_epi8(high));
  I32x16 signed_activations = BOTH((SquareRow)_mm256_sign_epi8((__m256i)LOW(activations), low),
                                   (SquareRow)_mm256_sign_epi8((__m256i)HIGH(activations), high));
  return partial + add_int16_pairs(multiply_add_int8_pairs(magnitudes, signed_activations));
}
INLINE I32x16 end_dots(I32x16 sum, I32x16 partial, const int bits) {
  return bits == 8 ? partial : sum + add_int16_pairs(partial);
}

/* A vector is two of 16 registers, and a dot product takes several instructions. So sums of many rows are computed for the
   lanes of one register at a time (block_product.c). */
#define HALVES 1
/* 32 bytes in both halves. What is computed from them is equal, so the compiler computes it once. */
INLINE I32x16 load_twice(const void* from) {
  I32x8 half;
  memcpy(&half, from, sizeof half);
  return BOTH(half, half);
}
/* The sum, in a register. Without this the compiler begins the dot products of many rows at once, and spills the sums. */
INLINE I32x8 in_register(I32x8 sum) {
  __asm__ volatile("" : "+x"(sum));
  return sum;
}
#endif

/* e^x with a relative error of 1e-7; x is clamped to [-87.3, 88.3]. It is 2^n times the Taylor polynomial on
   [-ln 2 / 2, ln 2 / 2]; n * ln 2 is subtracted in two parts, so that x loses no bits. */
INLINE F32x16 vexp(F32x16 x) {
  x = vmin(vmax(x, splat(-87.3f)), splat(88.3f));
  F32x16 n = vround(x * splat(1.44269504f));
  x = vfma(n, splat(-0.693359375f), x);
  x = vfma(n, splat(2.12194440e-4f), x);
  F32x16 y = splat(1.0f / 5040);
  y = vfma(y, x, splat(1.0f / 720));
  y = vfma(y, x, splat(1.0f / 120));
  y = vfma(y, x, splat(1.0f / 24));
  y = vfma(y, x, splat(1.0f / 6));
  y = vfma(y, x, splat(0.5f));
  y = vfma(y, x, splat(1.0f));
  y = vfma(y, x, splat(1.0f));
  return vscalef(y, n);
}

INLINE F32x16 sigmoid(F32x16 x) {
  return splat(1.0f) / (splat(1.0f) + vexp(splat(0.0f) - x));
}

/* log(1 + e^x) with a relative error of 3e-7, without the C library, whose last digits depend on the machine. With u =
   e^-|x| it is max(x, 0) + 2 atanh(u / (2 + u)), whose series needs nine terms up to 1/3. */
INLINE F32x16 softplus(F32x16 x) {
  const F32x16 positive = vmax(x, splat(0.0f)), u = vexp(x - positive - positive);
  const F32x16 s = u / (splat(2.0f) + u), square = s * s;
  F32x16 y = splat(1.0f / 17);
  y = vfma(y, square, splat(1.0f / 15));
  y = vfma(y, square, splat(1.0f / 13));
  y = vfma(y, square, splat(1.0f / 11));
  y = vfma(y, square, splat(1.0f / 9));
  y = vfma(y, square, splat(1.0f / 7));
  y = vfma(y, square, splat(1.0f / 5));
  y = vfma(y, square, splat(1.0f / 3));
  y = vfma(y, square, splat(1.0f));
  return vfma(s + s, y, positive);
}

/* x * sigmoid(x) */
INLINE F32x16 silu(F32x16 x) {
  F32x16 denominator = splat(1.0f) + vexp(splat(0.0f) - x);
  return x / denominator;
}

#endif
