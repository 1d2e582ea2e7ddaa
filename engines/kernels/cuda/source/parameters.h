/* Parameters of kernels, in C: those who launch include this without CUDA. Pointers are of device memory.

   M  tokens     N  output channels     K  input channels     H, KV  heads of queries, keys     D  channels of a head */
#ifndef TAPEOUT_PARAMETERS_H
#define TAPEOUT_PARAMETERS_H

#ifndef __CUDACC_RTC__
#include <stdint.h>
#endif

/* A weight [N, K] in groups of codes, packed by packing.py; of 16 bits: in half, without scales. Codes in E4M3 have 8 bits,
   and a scale for each row: one group. */
typedef struct {
  const uint8_t* codes;       /* [tiles, chunks, 128 * bits] */
  const void* scales;         /* [tiles, groups, 16] half or float: rows 0, 8, 1, 9, ... of a tile */
  const uint8_t* zero_points; /* the same of bytes; NULL: the middle code */
  int32_t N, K, bits;
  int32_t group_shift; /* 2 to this are the input channels that share a scale: 32 or more, a divisor of K */
  int32_t half_scales, e4m3;
} Weight;

/* y = x · weightᵀ + bias */
typedef struct {
  Weight weight;
  const void* x;         /* [M, K] half, or codes beside a weight in E4M3: those of Quantize */
  const float* x_scales; /* [M] of codes */
  const float* bias;     /* [N] or NULL */
  float* y;              /* [M, N] */
  float* sums;           /* scratch of LINEAR_SUMS floats, for linears that are split */
  uint32_t* ended;       /* [LINEAR_PLACES] blocks that have ended: zeros, before a launch and after it */
  int32_t M;
} BlockLinear;
enum { LINEAR_SLICES = 4 }; /* of input channels, each summed by itself */
/* Blocks of 128 outputs and 64 tokens that a linear has at most where each of its slices has a block of its own. */
enum { LINEAR_PLACES = 256, LINEAR_SUMS = LINEAR_PLACES * LINEAR_SLICES * 128 * 64 };
/* Chunks that blocks of many tokens have in shared memory: together fewer than 99 KB, all that some GPUs have. */
#define WIDE_STAGES(bits) ((bits) <= 6 ? 4 : (bits) == 8 ? 3 : 2)

/* Activations in half, [M, K], as codes in E4M3 with a scale for each token, so that its largest is 448. Of each four
   channels the second and the third are exchanged: so lie those of a weight. */
typedef struct {
  const void* x;
  uint8_t* y;    /* [M, K] */
  float* scales; /* [M] */
  int32_t M, K;
} Quantize;

/* y = RMSNorm(a + b) * weight, of all tokens or of some */
typedef struct {
  const float *a, *b;  /* [M, K]; b NULL: of a alone */
  const float* weight; /* [K] */
  const int64_t* rows; /* [count] tokens; NULL: all */
  float* sum;          /* [count, K] a + b; or NULL */
  void* y;             /* [count, K] half, or codes as those of Quantize */
  float* scales;       /* [count] of codes; NULL: half */
  int32_t count, M, K;
  float epsilon;
} Norm;

/* Whether a + b of each token is finite: what the last norm reads. Of a token that is not, nothing behind is right, and caches
   of codes keep no NaN. */
typedef struct {
  const float *a, *b; /* [M, K]; b NULL: of a alone */
  uint8_t* y;         /* [M] 1, or 0 where one is NaN or infinity */
  int32_t M, K;
} Finite;

/* y = silu(first half) * second half */
typedef struct {
  const float* x; /* [M, 2 K] */
  void* y;        /* [M, K] as of Norm */
  float* scales;  /* [M] */
  int32_t M, K;
} Gated;

/* y = rows of a weight */
typedef struct {
  Weight weight;
  const int64_t* ids;    /* [M]; one that is no row gives NaNs */
  const int64_t* chosen; /* of the step before: an id of -1 - i is chosen[i]. NULL: there is none */
  float* y;              /* [M, K] */
  int32_t M;
} BlockGather;

/* How a row's token is drawn, and how many of the likeliest tokens are wanted beside it. */
typedef struct {
  uint64_t random;
  double top_p;
  float scale;   /* log2(e) over the temperature; 0: the likeliest token */
  int32_t top_k; /* 0: all */
  int32_t least; /* weight of the least likely token that is kept */
  int32_t top;   /* -1: nothing of these; at most MOST_TOP */
} Draw;
enum { MOST_TOP = 128 };

/* What log-probabilities of a row need. The largest logit plus the logarithm of total / 2^30 is that of the sum of all
   exponentials. */
typedef struct {
  int64_t total;    /* 0: nothing is wanted of this row, or not all of it is finite */
  float max, logit; /* the largest, and the chosen token's */
  int32_t tokens[MOST_TOP];
  float logits[MOST_TOP];
} Ranking;

/* The column of each row's largest logit, the first of equals, or one that is drawn; -1 where one is no number */
typedef struct {
  const float* logits; /* [M, N] */
  float* part_max;     /* [M, ARGMAX_PARTS] scratch */
  int32_t* part_index; /* the same */
  const Draw* draws;   /* [M]; NULL: all rows are greedy */
  Ranking* ranking;    /* [M]; NULL without draws */
  int64_t* y;          /* [M] */
  int32_t M, N;
} Choose;
enum { ARGMAX_PARTS = 32 };

/* Norms of heads, RoPE, the new entries of a KV cache, and attention over it, for packed tokens of B sequences: those of sequence b are
   offsets[b] to offsets[b + 1] - 1, at positions from starts[b]. Position p of it is token p % 64 of block
   table[b, p / 64]. Tokens from offsets[B] on are padding. */
typedef struct {
  const float* qkv;                        /* [M, (H + 2 KV) D] */
  const float *cosines, *sines;            /* [positions, D / 2]; NULL: no RoPE */
  void *key_cache, *value_cache;           /* [blocks, KV, 64, D] int8, E4M3 or half */
  const float *key_scales, *value_scales;  /* [KV, D] of codes; NULL for half */
  const int32_t *offsets, *starts, *table; /* [B + 1], [B], [B, columns] */
  void* query;                             /* [M, H, D] half: rotated, times the scales of scores and of keys */
  float* part_sums;                        /* [M, H, parts, D] scratch of sequences that are cut into parts */
  float* part_rows;                   /* [M, H, parts, 2]: the largest score in powers of two, and the sum of weights */
  uint32_t* ended;                    /* [M, H] blocks of rows that have ended: zeros, before a launch and after it */
  void* y;                            /* [M, H D] half */
  const float *query_norm, *key_norm; /* [D] weights of an RMSNorm of each head before RoPE; or NULL */
  int32_t M, B, columns, H, KV, D;
  int32_t fp8;                 /* codes are E4M3; else int8 */
  int32_t interleaved, window; /* window: last keys that a token sees; 0: all */
  int32_t parts;               /* of ATTENTION_PART keys, of the longest sequence */
  int32_t few_tokens;          /* sequences of up to so many new tokens are cut into parts */
  int32_t most_tokens;         /* new ones of a sequence */
  float scale, softcap;        /* softcap: 0: none */
  float epsilon;               /* of the norms */
} Attention;
enum { ATTENTION_BLOCK = 64, ATTENTION_PART = 512 };

#endif
