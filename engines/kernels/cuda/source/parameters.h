/* Parameters of kernels, in C: those who launch include this without CUDA. Pointers are of device memory.

   M  tokens     N  output channels     K  input channels     H, KV  heads of queries, keys     D  channels of a head */
#ifndef TAPEOUT_PARAMETERS_H
#define TAPEOUT_PARAMETERS_H

#ifndef __CUDACC_RTC__
#include <stdint.h>
#endif

/* A weight [N, K] in groups of codes, packed by packing.py. */
typedef struct {
  const uint8_t* codes;       /* [tiles, chunks, 128 * bits] */
  const void* scales;         /* [tiles, groups, 16] half or float: rows 0, 8, 1, 9, ... of a tile */
  const uint8_t* zero_points; /* the same of bytes; NULL: the middle code */
  int32_t N, K, bits;
  int32_t group_shift; /* 2 to this are the input channels that share a scale: 32 or more, a divisor of K */
  int32_t half_scales;
} Weight;

/* y = x · weightᵀ + bias */
typedef struct {
  Weight weight;
  const void* x;     /* [M, K] 16-bit floats */
  const float* bias; /* [N] or NULL */
  float* y;          /* [M, N] */
  int32_t M;
} BlockLinear;

#endif
