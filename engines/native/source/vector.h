/* Arithmetic on vectors of 16 floats that more than one operator needs. */
#ifndef TAPEOUT_VECTOR_H
#define TAPEOUT_VECTOR_H

#include <immintrin.h>

/* A `for` that is written out: its arrays are registers. */
#define EACH _Pragma("clang loop unroll(full)") for

/* e^x to 1e-7 of its value, where x lies between -87.3 and 88.3, and of the nearer of these elsewhere: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2], whose
   coefficients are those of the Taylor series; ln 2 is taken away in two parts, so that nothing is lost of x. */
static inline __m512 exponential(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(88.3f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), x);
  __m512 y = _mm512_set1_ps(1.0f / 5040);
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.0f / 720));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.0f / 120));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.0f / 24));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.0f / 6));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(0.5f));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.0f));
  y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, n);
}

/* x * sigmoid(x) */
static inline __m512 silu(__m512 x) {
  __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

#endif
