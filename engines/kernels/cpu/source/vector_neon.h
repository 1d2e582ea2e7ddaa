/* What vector.h needs of 64-bit ARM. A vector is four of 32 registers.

   Results are those of AVX2 to the bit: lanes are added in the same order, a maximum treats NaN and zeros alike, and an
   integer that is out of range is the same one. */
#ifndef TAPEOUT_VECTOR_NEON_H
#define TAPEOUT_VECTOR_NEON_H

#include <arm_neon.h>

/* The registers of a vector, of floats or of integers. */
#define QUARTER(x, i)      __builtin_shufflevector(x, x, 4 * (i), 4 * (i) + 1, 4 * (i) + 2, 4 * (i) + 3)
#define PAIR(low, high)    __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7)
#define BOTH(low, high)    __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define EACH_QUARTER(call) BOTH(PAIR(call(0), call(1)), PAIR(call(2), call(3)))

/* Of lanes of all bits or none, as comparisons with operators give. */
INLINE int any_of(I32x16 lanes) {
  return __builtin_reduce_or(lanes) != 0;
}
INLINE F32x16 blend(Mask mask, F32x16 a, F32x16 b) {
  return (F32x16)(((I32x16)a & mask) | ((I32x16)b & ~mask));
}
/* There are no masked loads. Only the last lanes of a row take the way through memory. */
INLINE F32x16 load_first(const float* from, int64_t count) {
  if (count == LANES) return load(from);
  float lanes[LANES] = {0};
  memcpy(lanes, from, count * sizeof *lanes);
  return load(lanes);
}
INLINE void store_first(float* to, F32x16 x, int64_t count) {
  if (count == LANES)
    store(to, x);
  else
    memcpy(to, &x, count * sizeof *to);
}

/* `b` where one of the two is NaN, which the instructions for it do not give. */
INLINE F32x16 vmax(F32x16 a, F32x16 b) {
  return blend(a > b, a, b);
}
INLINE F32x16 vmin(F32x16 a, F32x16 b) {
  return blend(a < b, a, b);
}
INLINE float reduce_add(F32x16 x) {
  float32x4_t four = (QUARTER(x, 0) + QUARTER(x, 2)) + (QUARTER(x, 1) + QUARTER(x, 3));
  return (four[0] + four[2]) + (four[1] + four[3]);
}
INLINE float reduce_max(F32x16 x) {
  x = vmax(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1));
  x = vmax(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const float even = x[0] > x[2] ? x[0] : x[2], odd = x[1] > x[3] ? x[1] : x[3];
  return even > odd ? even : odd;
}
/* To the nearest integer, ties to even; INT32_MIN where there is none. The instruction gives others for large floats and
   NaN. */
INLINE I32x16 round_to_int(F32x16 x) {
#define ROUND(i) vcvtnq_s32_f32(QUARTER(x, i))
  const Mask inside = vabs(x) < splat(0x1p31f);
  return ((I32x16)EACH_QUARTER(ROUND) & inside) | (splat_int(INT32_MIN) & ~inside);
}
INLINE I8x16 saturate_int8(I32x16 x) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(QUARTER(x, 0)), vqmovn_s32(QUARTER(x, 1)));
  const int16x8_t high = vcombine_s16(vqmovn_s32(QUARTER(x, 2)), vqmovn_s32(QUARTER(x, 3)));
  return (I8x16)vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
}
INLINE F32x16 load_half(const void* from) {
  _Float16 x __attribute__((vector_size(32)));
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, F32x16);
}

INLINE I32x16 look_up(U8x16 table, I32x16 bytes) {
  bytes &= splat_int(0x0f0f0f0f);
#define LOOK_UP(i) (int32x4_t) vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)QUARTER(bytes, i))
  return (I32x16)EACH_QUARTER(LOOK_UP);
}

/* sum + the dot product of four codes and four signed bytes, in each lane. Codes are unsigned, or SIGNED_CODES. */
INLINE I32x16 dot_int8x4(I32x16 sum, I32x16 codes, I32x16 i8) {
#ifdef __ARM_FEATURE_MATMUL_INT8
#define DOT(i) vusdotq_s32(QUARTER(sum, i), (uint8x16_t)QUARTER(codes, i), (int8x16_t)QUARTER(i8, i))
#else
#define DOT(i)       vdotq_s32(QUARTER(sum, i), (int8x16_t)QUARTER(codes, i), (int8x16_t)QUARTER(i8, i))
#define SIGNED_CODES 1
#endif
  return (I32x16)EACH_QUARTER(DOT);
}

/* The side of a square of 32-bit words that is transposed in registers, and a row of it. */
enum { SQUARE = 4 };
typedef int32_t SquareRow __attribute__((vector_size(16)));

INLINE SquareRow load_square_row(const void* from, int64_t count) {
  SquareRow x = {0};
  if (count == SQUARE)
    memcpy(&x, from, sizeof x);
  else if (count) /* 2: rows have an even number of words */
    memcpy(&x, from, sizeof x / 2);
  return x;
}
INLINE void transpose(SquareRow x[SQUARE]) {
  SquareRow a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
  SquareRow c = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  x[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5), x[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  x[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5), x[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}

#endif
