/* Products with float weights in tiles of 16 outputs, [K, 16]. A sum begins at the bias and takes channels in their order,
   whatever other rows there are: a row's bits depend on nothing else. */
#ifndef TAPEOUT_FLOAT_TILES_H
#define TAPEOUT_FLOAT_TILES_H

#include "vector.h"

enum { ROWS = 4 /* of a group that reads a tile together */ };

/* Dot products of up to ROWS rows with one tile of weights [K, 16]. */
INLINE void multiply_some(const float* tile, const float* const* rows, int64_t K, F32x16 bias, F32x16* sums,
                          const int count) {
  F32x16 sum[ROWS];
  EACH (int t = 0; t < count; t++) sum[t] = bias;
  for (int64_t k = 0; k < K; k++) {
    const F32x16 weights = load(tile + k * LANES);
    EACH (int t = 0; t < count; t++) sum[t] = vfma(splat(rows[t][k]), weights, sum[t]);
  }
  EACH (int t = 0; t < count; t++) sums[t] = sum[t];
}

static inline void multiply(const float* tile, const float* const* rows, int64_t K, F32x16 bias, F32x16* sums,
                            int64_t count) {
  switch (count) {
    case 1: multiply_some(tile, rows, K, bias, sums, 1); break;
    case 2: multiply_some(tile, rows, K, bias, sums, 2); break;
    case 3: multiply_some(tile, rows, K, bias, sums, 3); break;
    default: multiply_some(tile, rows, K, bias, sums, ROWS);
  }
}

#endif
