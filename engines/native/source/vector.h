/* Vectors of 16 floats or integers, or of 64 codes, and what the kernels do with them.

   With AVX-512 a vector is one register of 32, with AVX2 it is two of 16. Arithmetic is written with operators, which the
   compiler takes apart where it must; what has an instruction of its own has a function here, once for either. Where a
   product and a sum shall be rounded once, it says `multiply_add`. */
#ifndef TAPEOUT_VECTOR_H
#define TAPEOUT_VECTOR_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* Vectors are handed to functions that are inlined: how others would be called does not matter. */
#pragma clang diagnostic ignored "-Wpsabi"

/* A `for` that is written out: its arrays are registers. */
#define EACH _Pragma("clang loop unroll(full)") for
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Words __attribute__((vector_size(64)));
typedef int8_t Codes __attribute__((vector_size(64)));
typedef int8_t FewCodes __attribute__((vector_size(LANES)));
typedef uint8_t FewBytes __attribute__((vector_size(LANES)));

INLINE Floats load(const void* from) {
  Floats x;
  memcpy(&x, from, sizeof x);
  return x;
}
INLINE Words load_words(const void* from) {
  Words x;
  memcpy(&x, from, sizeof x);
  return x;
}
INLINE FewCodes load_codes(const void* from) {
  FewCodes x;
  memcpy(&x, from, sizeof x);
  return x;
}
INLINE void store(void* to, Floats x) {
  memcpy(to, &x, sizeof x);
}
INLINE void store_words(void* to, Words x) {
  memcpy(to, &x, sizeof x);
}
INLINE void store_codes(void* to, FewCodes x) {
  memcpy(to, &x, sizeof x);
}

INLINE Floats same(float x) {
  return (Floats){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
INLINE Words same_word(int32_t x) {
  return (Words){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
INLINE Words same_four(const void* codes) {
  int32_t four;
  memcpy(&four, codes, 4);
  return same_word(four);
}

INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return __builtin_elementwise_fma(a, b, c);
}
INLINE Floats magnitude(Floats x) {
  return __builtin_elementwise_abs(x);
}
INLINE Floats to_floats(Words x) {
  return __builtin_convertvector(x, Floats);
}
INLINE Words widened(FewCodes x) {
  return __builtin_convertvector(x, Words);
}
INLINE Words widened_bytes(const void* from) {
  FewBytes x;
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, Words);
}
INLINE FewCodes low_bytes(Words x) {
  return __builtin_convertvector(x, FewCodes);
}
INLINE int32_t sum_of_words(Words x) {
  return __builtin_reduce_add(x);
}

#ifdef __AVX512VNNI__

#define AVX512 1

/* Which lanes. */
typedef __mmask16 Lanes;

INLINE Lanes lanes_of(uint64_t bits) {
  return (__mmask16)bits;
}
INLINE Lanes above(Floats a, Floats b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}
INLINE Lanes no_numbers(Floats x) {
  return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
}
INLINE Floats choose(Lanes lanes, Floats a, Floats b) {
  return _mm512_mask_mov_ps(b, lanes, a);
}
INLINE Words choose_words(Lanes lanes, Words a, Words b) {
  return (Words)_mm512_mask_mov_epi32((__m512i)b, lanes, (__m512i)a);
}
/* The first `count` of 16, which may be none; zeros elsewhere. Others are neither read nor written. */
INLINE Lanes first_lanes(int64_t count) {
  return (__mmask16)((1u << count) - 1);
}
INLINE Floats load_first(const float* from, int64_t count) {
  return _mm512_maskz_loadu_ps(first_lanes(count), from);
}
INLINE void store_first(float* to, Floats x, int64_t count) {
  _mm512_mask_storeu_ps(to, first_lanes(count), x);
}

/* `b` where one of the two is no number. */
INLINE Floats larger(Floats a, Floats b) {
  return _mm512_max_ps(a, b);
}
INLINE Floats smaller(Floats a, Floats b) {
  return _mm512_min_ps(a, b);
}
INLINE float sum_of(Floats x) {
  return _mm512_reduce_add_ps(x);
}
INLINE float largest_of(Floats x) {
  return _mm512_reduce_max_ps(x);
}
/* To the nearest, ties to even. */
INLINE Words rounded(Floats x) {
  return (Words)_mm512_cvtps_epi32(x);
}
INLINE Floats whole(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT);
}
INLINE FewCodes saturated(Words x) {
  return (FewCodes)_mm512_cvtsepi32_epi8((__m512i)x);
}
INLINE Floats load_halves(const void* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(from));
}
/* What x is above the whole number below it. */
INLINE Floats fraction(Floats x) {
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
/* y times two to the whole number below x. */
INLINE Floats scaled(Floats y, Floats x) {
  return _mm512_scalef_ps(y, x);
}

/* Bytes without a sign times such with one, four neighbours to a lane. */
INLINE Words dot(Words sum, Words bytes, Words codes) {
  return (Words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, (__m512i)codes);
}

/* Lane i: the i-th codes of all four. */
INLINE Words interleaved(FewCodes a, FewCodes b, FewCodes c, FewCodes d) {
  __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i within = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __asm__("" : "+v"(across), "+v"(within)); /* or else the compiler makes ten instructions of the two */
  __m512i x = _mm512_zextsi128_si512((__m128i)a);
  x = _mm512_mask_broadcast_i32x4(x, 0x00f0, (__m128i)b);
  x = _mm512_mask_broadcast_i32x4(x, 0x0f00, (__m128i)c);
  x = _mm512_mask_broadcast_i32x4(x, 0xf000, (__m128i)d);
  return (Words)_mm512_shuffle_epi8(_mm512_permutexvar_epi32(across, x), within);
}

/* The side of a square of words that is turned in registers, and a row of it. */
enum { SQUARE = 16 };
typedef Words Line;

INLINE Line load_line(const void* from, int64_t count) {
  return (Line)_mm512_maskz_loadu_epi32(first_lanes(count), from);
}
INLINE void turn(Line x[SQUARE]) {
  __m512i y[SQUARE];
  EACH (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32((__m512i)x[i], (__m512i)x[i + 1]);
  }
  EACH (int i = 0; i < 16; i += 4)
    EACH (int j = 0; j < 2; j++) {
      x[i + 2 * j] = (Line)_mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
      x[i + 2 * j + 1] = (Line)_mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
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
  EACH (int i = 0; i < 16; i++) x[i] = (Line)y[i];
}

#else

#define AVX512          0

typedef int32_t Line __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(64)));

/* Of a vector's two registers, of floats and of words. */
#define LOW(x)          __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)
#define HIGH(x)         __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)
#define BOTH(low, high) __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)

/* Which lanes: all bits of a lane, or none. */
typedef Words Lanes;

INLINE Lanes lanes_of(uint64_t bits) {
  const Words each = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  return (same_word((int32_t)bits) & each) != 0;
}
INLINE Lanes above(Floats a, Floats b) {
  return a > b;
}
INLINE Lanes no_numbers(Floats x) {
  return x != x;
}
INLINE Floats choose(Lanes lanes, Floats a, Floats b) {
  Floats mask = (Floats)lanes;
  return BOTH(_mm256_blendv_ps(LOW(b), LOW(a), LOW(mask)), _mm256_blendv_ps(HIGH(b), HIGH(a), HIGH(mask)));
}
INLINE Words choose_words(Lanes lanes, Words a, Words b) {
  return (Words)choose(lanes, (Floats)a, (Floats)b);
}
/* The first `count` of 16, which may be none; zeros elsewhere. Others are neither read nor written. */
INLINE Lanes first_lanes(int64_t count) {
  const Words each = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return each < same_word((int32_t)count);
}
INLINE Floats load_first(const float* from, int64_t count) {
  Lanes lanes = first_lanes(count);
  return BOTH(_mm256_maskload_ps(from, (__m256i)LOW(lanes)), _mm256_maskload_ps(from + 8, (__m256i)HIGH(lanes)));
}
INLINE void store_first(float* to, Floats x, int64_t count) {
  Lanes lanes = first_lanes(count);
  _mm256_maskstore_ps(to, (__m256i)LOW(lanes), LOW(x));
  _mm256_maskstore_ps(to + 8, (__m256i)HIGH(lanes), HIGH(x));
}

/* `b` where one of the two is no number. */
INLINE Floats larger(Floats a, Floats b) {
  return BOTH(_mm256_max_ps(LOW(a), LOW(b)), _mm256_max_ps(HIGH(a), HIGH(b)));
}
INLINE Floats smaller(Floats a, Floats b) {
  return BOTH(_mm256_min_ps(LOW(a), LOW(b)), _mm256_min_ps(HIGH(a), HIGH(b)));
}
INLINE float sum_of(Floats x) {
  __m256 eight = LOW(x) + HIGH(x);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return four[0] + four[1];
}
INLINE float largest_of(Floats x) {
  __m256 eight = _mm256_max_ps(LOW(x), HIGH(x));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return four[0] > four[1] ? four[0] : four[1];
}
/* To the nearest, ties to even. */
INLINE Words rounded(Floats x) {
  return (Words)BOTH((Line)_mm256_cvtps_epi32(LOW(x)), (Line)_mm256_cvtps_epi32(HIGH(x)));
}
INLINE Floats whole(Floats x) {
  return __builtin_elementwise_roundeven(x);
}
INLINE FewCodes saturated(Words x) {
  __m256i low = (__m256i)LOW(x), high = (__m256i)HIGH(x);
  __m128i first = _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  __m128i second = _mm_packs_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  return (FewCodes)_mm_packs_epi16(first, second);
}
INLINE Floats load_halves(const void* from) {
  const __m128i* halves = from;
  return BOTH(_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
}
/* What x is above the whole number below it. */
INLINE Floats fraction(Floats x) {
  x = larger(same(-127), x);
  return x - __builtin_elementwise_floor(x);
}
/* y, which is about one, times two to the whole number below x, which is below 128; zero where that is no normal float. */
INLINE Floats scaled(Floats y, Floats x) {
  Words power = rounded(__builtin_elementwise_floor(larger(same(-127), x)));
  return y * (Floats)((power + 127) << 23);
}

#ifdef __AVXVNNI__
INLINE Words dot(Words sum, Words bytes, Words codes) {
  return BOTH((Line)_mm256_dpbusd_avx_epi32((__m256i)LOW(sum), (__m256i)LOW(bytes), (__m256i)LOW(codes)),
              (Line)_mm256_dpbusd_avx_epi32((__m256i)HIGH(sum), (__m256i)HIGH(bytes), (__m256i)HIGH(codes)));
}
#else
/* Sums of neighbouring 16-bit numbers. */
INLINE Words sums_of_pairs(Words shorts) {
  const __m256i ones = _mm256_set1_epi16(1);
  return BOTH((Line)_mm256_madd_epi16((__m256i)LOW(shorts), ones),
              (Line)_mm256_madd_epi16((__m256i)HIGH(shorts), ones));
}
/* Bytes without a sign times such with one, neighbours added up in 16 bits: too few for bytes of 8 bits. */
INLINE Words pairs(Words bytes, Words codes) {
  return BOTH((Line)_mm256_maddubs_epi16((__m256i)LOW(bytes), (__m256i)LOW(codes)),
              (Line)_mm256_maddubs_epi16((__m256i)HIGH(bytes), (__m256i)HIGH(codes)));
}
#endif

/* The side of a square of words that is turned in registers. */
enum { SQUARE = 8 };

INLINE Line load_line(const void* from, int64_t count) {
  const Line each = {0, 1, 2, 3, 4, 5, 6, 7};
  return (Line)_mm256_maskload_epi32(from, (__m256i)(each < (int32_t)count));
}
INLINE void turn(Line x[SQUARE]) {
  Line y[SQUARE];
  EACH (int i = 0; i < 8; i += 2) {
    y[i] = (Line)_mm256_unpacklo_epi32((__m256i)x[i], (__m256i)x[i + 1]);
    y[i + 1] = (Line)_mm256_unpackhi_epi32((__m256i)x[i], (__m256i)x[i + 1]);
  }
  EACH (int i = 0; i < 8; i += 4)
    EACH (int j = 0; j < 2; j++) {
      x[i + 2 * j] = (Line)_mm256_unpacklo_epi64((__m256i)y[i + j], (__m256i)y[i + 2 + j]);
      x[i + 2 * j + 1] = (Line)_mm256_unpackhi_epi64((__m256i)y[i + j], (__m256i)y[i + 2 + j]);
    }
  /* x[4i + j] half l: words 4l + j of rows 4i .. 4i + 3 */
  EACH (int j = 0; j < 4; j++) {
    y[j] = (Line)_mm256_permute2x128_si256((__m256i)x[j], (__m256i)x[4 + j], 0x20);
    y[4 + j] = (Line)_mm256_permute2x128_si256((__m256i)x[j], (__m256i)x[4 + j], 0x31);
  }
  EACH (int i = 0; i < 8; i++) x[i] = y[i];
}
#endif

/* Products of codes of so many bits and inputs from -127 to 127, four neighbours to a lane: `begin_sum`, `add_product`
   up to `depth` times, `end_sum`. What is added up is the code less `centre`.

   Without an instruction for it, products are added up in 16 bits, which two of up to 128 · 127 fit, as do four of
   63 · 127 and eight of 15 · 127; 8 bits less their centre become a size and a sign. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
INLINE int centre(const int bits) {
  return (void)bits, 0;
}
INLINE int depth(const int bits) {
  return (void)bits, 1;
}
INLINE Words begin_sum(Words sum, const int bits) {
  return (void)bits, sum;
}
INLINE Words add_product(Words part, Words codes, Words inputs, const int bits) {
  return (void)bits, dot(part, codes, inputs);
}
INLINE Words end_sum(Words sum, Words part, const int bits) {
  return (void)sum, (void)bits, part;
}
#else
INLINE int centre(const int bits) {
  return bits == 8 ? 128 : 0;
}
INLINE int depth(const int bits) {
  return bits == 4 ? 4 : bits == 6 ? 2 : 1;
}
INLINE Words begin_sum(Words sum, const int bits) {
  return bits == 8 ? sum : (Words){0};
}
INLINE Words add_product(Words part, Words codes, Words inputs, const int bits) {
  if (bits < 8) return (Words)((Shorts)part + (Shorts)pairs(codes, inputs));
  Words centred = codes ^ same_word((int32_t)0x80808080);
  __m256i low = (__m256i)LOW(centred), high = (__m256i)HIGH(centred);
  Words sizes = BOTH((Line)_mm256_abs_epi8(low), (Line)_mm256_abs_epi8(high));
  Words turned =
      BOTH((Line)_mm256_sign_epi8((__m256i)LOW(inputs), low), (Line)_mm256_sign_epi8((__m256i)HIGH(inputs), high));
  return part + sums_of_pairs(pairs(sizes, turned));
}
INLINE Words end_sum(Words sum, Words part, const int bits) {
  return bits == 8 ? part : sum + sums_of_pairs(part);
}
#endif

/* e^x to 1e-7 of its value, where x lies between -87.3 and 88.3, and of the nearer of these elsewhere: 2^n times a
   polynomial on [-ln 2 / 2, ln 2 / 2], whose coefficients are those of the Taylor series; ln 2 is taken away in two
   parts, so that nothing is lost of x. */
INLINE Floats exponential(Floats x) {
  x = smaller(larger(x, same(-87.3f)), same(88.3f));
  Floats n = whole(x * same(1.44269504f));
  x = multiply_add(n, same(-0.693359375f), x);
  x = multiply_add(n, same(2.12194440e-4f), x);
  Floats y = same(1.0f / 5040);
  y = multiply_add(y, x, same(1.0f / 720));
  y = multiply_add(y, x, same(1.0f / 120));
  y = multiply_add(y, x, same(1.0f / 24));
  y = multiply_add(y, x, same(1.0f / 6));
  y = multiply_add(y, x, same(0.5f));
  y = multiply_add(y, x, same(1.0f));
  y = multiply_add(y, x, same(1.0f));
  return scaled(y, n);
}

/* x * sigmoid(x) */
INLINE Floats silu(Floats x) {
  Floats above_one = same(1.0f) + exponential(same(0.0f) - x);
  return x / above_one;
}

#endif
