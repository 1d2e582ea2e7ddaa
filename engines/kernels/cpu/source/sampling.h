/* The kernel that draws tokens from logits; Python calls it through engines/kernels/cpu/sampling.py. */
#ifndef TAPEOUT_SAMPLING_H
#define TAPEOUT_SAMPLING_H

#include <stdint.h>

enum { NOT_FINITE = -1, NONE_LEFT = -2 };

/* One draw; engines/kernels/cpu/sampling.py has the same fields in the same order. */
typedef struct {
  const float* logits;   /* [V] */
  const uint32_t* mask;  /* a bit for each token that is allowed; NULL: all are */
  const int32_t* tokens; /* whose logits change, [adjusted] */
  const float *bias, *factor, *shift;
  int64_t adjusted;
  uint64_t random;
  double top_p;
  float scale;   /* log2(e) over the temperature; 0: the likeliest token */
  int32_t top_k; /* 0: all */
  int32_t least; /* weight of the least likely token that is kept */
  int32_t top;   /* how many of the likeliest tokens are wanted, of the logits as they are; -1: nothing of these */
  int32_t* top_tokens;
  int64_t total; /* out: the sum of all weights at temperature 1 */
  float max;     /* out: the largest logit */
  int32_t token; /* out, or why there is none */
} Row;

/* Bytes of memory that draws from V logits need. */
__attribute__((visibility("default"))) int64_t tapeout_sample_bytes(int64_t V);

/* Draws the token of each row. `memory`: so many bytes, aligned as an int64_t. */
__attribute__((visibility("default"))) void tapeout_sample_1(Row* const* rows, int64_t count, int64_t V, void* memory);

#endif
