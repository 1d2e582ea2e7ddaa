/* Linears with activations quantized to int8 and weights of 4, 5, 6 or 8 bits: y = f(x) * W^T + bias.

   Activations are quantized for each token and block on its own, as MatMulNBits does at accuracy level 4
   (quantization/reference.py, round_activations). Products are summed in integers within a block and in float across
   blocks. Tokens share nothing, so a result does not depend on what else is in the batch. The operation that comes right
   before a linear in a transformer is done while its activations are quantized, and its result never goes to memory:

     BlockLinear         x [.., K]                            x
     GatedLinear         x [.., 2K]                           silu(first half) * second half
     NormLinear          x [.., K], weight [K]                x / rms(x) * weight
     ResidualNormLinear  a [.., K], b [.., K], weight [K]     the same of a + b, which is a second output
     HeadLinear          x [M, K], greedy bool                x; if greedy, y has no rows, and a second output [M] has the
                                                              index of each token's largest logit, the first of equals,
                                                              or -1 if a logit of the token is not finite

   All take codes, scales, zero points and bias after these; engines/passes/onnxruntime/block_linears.py packs them.

   Names: M tokens, N output channels, K input channels, B blocks of K (K / block); tiles and steps as in codes.h. N is
   padded to pairs of tiles. */
#include "codes.h"
#include "memory.h"
#include "ort.h"
#include "vector.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Fewer activations than this are quantized by the calling thread: waking another takes as long as a few thousand. */
enum { PARALLEL_ACTIVATIONS = 1 << 13 };
/* The columns are cut into parts for the threads: at least PARTS if there are so many pairs of tiles, and more where a
   part would have more than PART_BYTES of weights, which take about ten microseconds to read. */
enum { PARTS = 64, PART_BYTES = 1 << 18 };
enum { MAX_RANK = 8 };
/* With 255 * 127 a product and 128 * 127 an offset, sums over a block of 2^15 channels fit 32 bits. */
enum { LARGEST_BLOCK = 1 << 15 };
/* The sums of GROUP tokens and one tile are held in registers, or of GROUP / WIDE tokens and WIDE tiles, where tokens are
   several groups. At least CHAINS sums do not depend on each other, so few tokens have several each. */
#if AVX512
enum { GROUP = 12, WIDE = 2, CHAINS = 4 };
#else
enum { GROUP = 4, WIDE = 1, CHAINS = 1 };
#endif
/* Weights of a run, which all groups of tokens pass in turn: with the next ones they fit the second-level cache, unless a
   pair of tiles alone has more. And how far ahead of the dot products weights are prefetched that one group passes: on a
   Zen 5, 4 KB is as fast where memory reads 50 GB/s, and slower where it reads 65; 12 and 24 KB are slower at one token. */
enum { RUN_BYTES = 64 << 10, STREAM_AHEAD = 8 << 10 };

typedef enum { PLAIN, GATED, NORM, RESIDUAL_NORM, HEAD } Kind; /* variants, in the order of declarations */

typedef struct {
  Base base;
  Kind kind;
  int64_t N, K, block, bits, half_scales, symmetric;
  float epsilon;
  Stream* stream;                                  /* of `threads` */
  Tensor weight, codes, scales, zero_points, bias; /* where they are constant */
} Kernel;

/* The largest logits of a token so far, in each lane of its tiles, and their columns. */
typedef struct {
  float value[TILE];
  int32_t column[TILE];
} LaneMax;

/* The largest logit of a token in a part of the columns, and its column. */
typedef struct {
  float value;
  int32_t column;
} Max;

typedef struct {
  Kernel* kernel;
  int64_t M, blocks, tiles, parts;
  _Atomic int out_of_memory;
  const float* x;
  const float* residual; /* what is added to x before its norm */
  const float* weight;   /* of the norm */
  float* sum;            /* x + residual */
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zero_points;
  const float* bias;
  float* y;
  Max* max;        /* [M, parts] instead of y */
  int8_t* x_codes; /* [M, row_bytes(K)] quantized activations */
  float* x_scales; /* [B, M] */
  int32_t* x_sums; /* [B, M] minus the sum of a block's codes; symmetric: times the midpoint of the weights */
} Work;

static inline int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* Of the codes of a token's activations. An odd number of cache lines: at an even one, such as 2,048 / 64, tokens take
   turns in the same few sets of the first-level cache, and eight of them leave no room for weights. */
static inline int64_t row_bytes(int64_t K) {
  return ((K + 63) / 64 | 1) * 64;
}

static inline F32x16 scale_at(const Work* w, int64_t tile, int64_t block) {
  int64_t at = (tile * w->blocks + block) * TILE;
  if (w->kernel->half_scales) return load_half(w->scales + 2 * at);
  return load(w->scales + 4 * at);
}

/* The activations of a token: memory of the caller's, or `buffer` [K] with the result of the operation before. */
static const float* activations_of(const Work* w, size_t token, float* buffer) {
  const Kernel* k = w->kernel;
  const int64_t K = k->K;
  if (k->kind == PLAIN || k->kind == HEAD) return w->x + token * K;
  if (k->kind == GATED) {
    const float *gate = w->x + token * 2 * K, *up = gate + K;
    for (int64_t i = 0; i < K; i += LANES) store(buffer + i, silu(load(gate + i)) * load(up + i));
    return buffer;
  }
  const float* x = w->x + token * K;
  if (k->kind == RESIDUAL_NORM) {
    float* sum = w->sum + token * K;
    const float* residual = w->residual + token * K;
    for (int64_t i = 0; i < K; i += LANES) store(sum + i, load(x + i) + load(residual + i));
    x = sum;
  }
  F32x16 squares = {0};
  for (int64_t i = 0; i < K; i += LANES) squares = vfma(load(x + i), load(x + i), squares);
  F32x16 inverse = splat(1.0f / sqrtf(reduce_add(squares) / (float)K + k->epsilon));
  for (int64_t i = 0; i < K; i += LANES) store(buffer + i, load(x + i) * inverse * load(w->weight + i));
  return buffer;
}

static void quantize_token(void* state, size_t token) {
  Work* w = state;
  const Kernel* k = w->kernel;
  float* buffer = scratch(SCRATCH_ROW, k->K * sizeof(float));
  if (!buffer) {
    w->out_of_memory = 1;
    return;
  }
  const float* x = activations_of(w, token, buffer);
  int8_t* codes = w->x_codes + token * row_bytes(k->K);
  const int32_t midpoint = k->symmetric ? (1 << (k->bits - 1)) - code_offset((int)k->bits) : 1;
  for (int64_t b = 0; b < w->blocks; b++) {
    const float* from = x + b * k->block;
    F32x16 max = {0}, non_finite = {0};
    for (int64_t i = 0; i < k->block; i += LANES) {
      max = vmax(max, vabs(load(from + i)));
      non_finite = vfma(load(from + i), splat(0), non_finite); /* max drops NaN; the sum propagates it */
    }
    const float largest = reduce_max(max) + reduce_add(non_finite);
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    I32x16 sum = {0};
    if (largest <= FLT_MAX && inverse <= FLT_MAX)
      for (int64_t i = 0; i < k->block; i += LANES) {
        I32x16 code = round_to_int(load(from + i) * splat(inverse));
        sum += code;
        store_int8(codes + b * k->block + i, saturate_int8(code));
      }
    else /* NaN and infinity have no codes, the scale is NaN; what is too small to divide by counts as 0 */
      memset(codes + b * k->block, 0, k->block);
    w->x_scales[b * w->M + (int64_t)token] = largest / 127.0f;
    w->x_sums[b * w->M + (int64_t)token] = -reduce_add_int(sum) * midpoint;
  }
  release_scratch(SCRATCH_ROW);
}

/* Codes of `STEP` input channels of a tile, a byte each: step `s` of the tile that begins at `tile`. */
INLINE I32x16 codes_at(const uint8_t* tile, int64_t s, const int bits) {
  if (bits == 8) return load_int(tile + 64 * s);
  const I32x16 nibble = splat_int(0x0f0f0f0f);
  if (bits == 4) {
    I32x16 both = load_int(tile + 64 * (s / 2));
    return (s % 2 ? both >> 4 : both) & nibble;
  }
  if (bits == 5) {
    /* Of eight steps, 256 bytes hold the low four bits and 64 the high one. */
    const uint8_t* eight_steps = tile + 320 * (s / 8);
    I32x16 low = load_int(eight_steps + 64 * (s % 8 / 2)), high = load_int(eight_steps + 256);
    if (s % 2) low >>= 4;
    high = s % 8 < 4 ? shift_left(high, 4 - s % 8) : high >> (s % 8 - 4);
    return (low & nibble) | (high & splat_int(0x10101010));
  }
  /* 6 bits: of four steps, 128 bytes hold the low four bits and 64 the high two. */
  const uint8_t* four_steps = tile + 192 * (s / 4);
  I32x16 low = load_int(four_steps + 64 * (s % 4 / 2)), high = load_int(four_steps + 128);
  if (s % 2) low >>= 4;
  if (s % 4 == 0) high = shift_left(high, 4);
  if (s % 4 == 1) high = shift_left(high, 2);
  if (s % 4 == 3) high >>= 2;
  return (low & nibble) | (high & splat_int(0x30303030));
}

INLINE void update_max(LaneMax* max, F32x16 y, int64_t column, int64_t count) {
  y = blend(visnan(y), splat(INFINITY), y); /* so that NaN is not dropped */
  F32x16 value = load(max->value);
  Mask greater_lanes = first_lanes(count) & greater(y, value);
  const I32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  store(max->value, blend(greater_lanes, y, value));
  store_int(max->column, blend_int(greater_lanes, lane + splat_int((int32_t)column), load_int(max->column)));
}

/* `tokens` tokens by `tiles` tiles. `tokens`, `tiles` and `bits` are constants where this is inlined. `ahead` is memory to
   prefetch, some lines with each block; NULL: the weights that follow, line by line as others are used. */
INLINE void matmul_tiles(const Work* w, LaneMax* max, Ahead* ahead, int64_t tile, int64_t token, const int tokens,
                         const int tiles, const int bits) {
  const Kernel* k = w->kernel;
  const int64_t block_steps = k->block / STEP, stride = row_bytes(k->K), tile_bytes = TILE * k->K * bits / 8;
  const int chains = (CHAINS + tokens * tiles - 1) / (tokens * tiles), depth = depth_of(bits),
            joined = joined_steps(bits);
  F32x16 y[GROUP][WIDE];
  EACH (int m = 0; m < tokens; m++)
    EACH (int t = 0; t < tiles; t++) y[m][t] = (F32x16){0};
  const uint8_t* codes = w->codes + tile * tile_bytes;
  const int64_t last_steps = w->tiles * tile_bytes - 64 * joined * bits / 8;
  for (int64_t b = 0; b < w->blocks; b++) {
    const float* x_scales = w->x_scales + b * w->M + token;
    const int32_t* x_sums = w->x_sums + b * w->M + token;
    I32x16 sum[GROUP][WIDE], more[CHAINS][WIDE][CHAINS];
    EACH (int m = 0; m < tokens; m++)
      EACH (int t = 0; t < tiles; t++) sum[m][t] = k->symmetric ? splat_int(x_sums[m]) : (I32x16){0};
    EACH (int m = 0; m < tokens; m++)
      EACH (int t = 0; t < tiles; t++)
        EACH (int i = 1; i < chains; i++) more[m][t][i] = (I32x16){0};
    const int8_t* x = w->x_codes + token * stride + b * k->block;
    const uint8_t* from = codes + b * (TILE * k->block * bits / 8);
    for (int64_t s = 0; s < block_steps; s += joined) {
      const uint8_t* steps = from + 64 * s * bits / 8;
      if (!ahead) {
        const uint8_t* next = w->codes + smaller(steps - w->codes + STREAM_AHEAD, last_steps);
        EACH (int i = 0; i < joined * bits / 8; i++) prefetch_l1(next + 64 * i);
      }
      EACH (int i = 0; i < joined; i += depth) {
        I32x16 weights[4][WIDE];
        EACH (int j = 0; j < depth; j++)
          EACH (int t = 0; t < tiles; t++) weights[j][t] = codes_at(steps + t * tile_bytes, i + j, bits);
        EACH (int m = 0; m < tokens; m++) {
          I32x16 partial[WIDE], *to[WIDE];
          EACH (int t = 0; t < tiles; t++) {
            to[t] = i % chains ? &more[m][t][i % chains] : &sum[m][t];
            partial[t] = begin_dots(*to[t], bits);
          }
          EACH (int j = 0; j < depth; j++) {
            const I32x16 activations = splat_int8x4(x + m * stride + STEP * (s + i + j));
            EACH (int t = 0; t < tiles; t++) partial[t] = add_dot(partial[t], weights[j][t], activations, bits);
          }
          EACH (int t = 0; t < tiles; t++) *to[t] = end_dots(*to[t], partial[t], bits);
        }
      }
    }
    if (ahead) prefetch_some(ahead);
    EACH (int m = 0; m < tokens; m++)
      EACH (int t = 0; t < tiles; t++)
        EACH (int i = 1; i < chains; i++) sum[m][t] += more[m][t][i];
    EACH (int t = 0; t < tiles; t++) {
      F32x16 scale = scale_at(w, tile + t, b);
      I32x16 zero_point = {0};
      if (!k->symmetric)
        zero_point = widen_bytes(w->zero_points + ((tile + t) * w->blocks + b) * TILE) - splat_int(code_offset(bits));
      EACH (int m = 0; m < tokens; m++) {
        if (!k->symmetric) sum[m][t] += zero_point * splat_int(x_sums[m]);
        F32x16 combined = scale * splat(x_scales[m]);
        y[m][t] = vfma(to_float(sum[m][t]), combined, y[m][t]);
      }
    }
  }
  EACH (int t = 0; t < tiles; t++) {
    /* A tile of padding has no columns; it must not even form addresses beyond those of the last. */
    const int64_t left = k->N - (tile + t) * TILE;
    const int64_t count = left >= TILE ? TILE : left > 0 ? left : 0, column = left > 0 ? (tile + t) * TILE : 0;
    F32x16 bias = w->bias ? load_first(w->bias + column, count) : (F32x16){0};
    EACH (int m = 0; m < tokens; m++)
      if (max)
        update_max(max + token + m, y[m][t] + bias, column, count);
      else
        store_first(w->y + (token + m) * k->N + column, y[m][t] + bias, count);
  }
}

#define TOKENS(count, tiles, bits) \
  case count: matmul_tiles(w, max, ahead, tile, token, count, tiles, bits); break;
#if AVX512
#define LARGER_GROUPS(bits) \
  TOKENS(5, 1, bits)        \
  TOKENS(6, 1, bits)        \
  TOKENS(7, 1, bits)        \
  TOKENS(8, 1, bits)        \
  TOKENS(9, 1, bits)        \
  TOKENS(10, 1, bits)       \
  TOKENS(11, 1, bits)       \
  TOKENS(12, 1, bits)
/* Of more than GROUP tokens, each group has at least four. */
#define WIDE_GROUPS(bits) \
  TOKENS(4, WIDE, bits)   \
  TOKENS(5, WIDE, bits)   \
  TOKENS(6, WIDE, bits)
#else
#define LARGER_GROUPS(bits)
#define WIDE_GROUPS(bits)
#endif
#define MATMUL_GROUP(bits)         \
  if (width > 1) switch (tokens) { \
      WIDE_GROUPS(bits)            \
    }                              \
  else                             \
    switch (tokens) {              \
      TOKENS(1, 1, bits)           \
      TOKENS(2, 1, bits)           \
      TOKENS(3, 1, bits)           \
      TOKENS(4, 1, bits)           \
      LARGER_GROUPS(bits)          \
    }

_Static_assert(WIDE == 1 || GROUP / WIDE == 6, "of more than GROUP tokens a group has 4 to GROUP / WIDE");
/* A group of tokens by `width` tiles. */
static void matmul_group(const Work* w, LaneMax* max, Ahead* ahead, int64_t tile, int64_t width, int64_t token,
                         int tokens) {
  if (w->kernel->bits == 8)
    MATMUL_GROUP(8)
  else if (w->kernel->bits == 6)
    MATMUL_GROUP(6)
  else if (w->kernel->bits == 5)
    MATMUL_GROUP(5)
  else
    MATMUL_GROUP(4)
}

/* The largest of a token's lanes, the first of equals. */
static Max max_of_lanes(const LaneMax* lanes) {
  F32x16 value = load(lanes->value);
  const float largest = reduce_max(value);
  I32x16 column = blend_int(greater(splat(largest), value), splat_int(INT32_MAX), load_int(lanes->column));
  return (Max){largest, reduce_min_int(column)};
}

/* One of `parts` ranges of tiles, for all tokens. Each group of tokens passes a run of tiles before the next group does, so
   its activations stay in the first-level cache and the weights in the second. The next run is prefetched meanwhile, some
   lines with each block: without this, memory is idle while tokens are computed. Where all tokens are one group, memory is
   read in one stream and prefetched two pages ahead. The processor's own prefetching stops at the end of a page, and the
   fewer bits a weight has, the fewer bytes its window of instructions reaches beyond it. */
static void matmul_part(void* state, size_t part) {
  const Work* w = state;
  const int64_t pairs = w->tiles / 2, index = (int64_t)part;
  const int64_t first = pairs * index / w->parts * 2, end = pairs * (index + 1) / w->parts * 2;
  const int64_t width = w->M > GROUP ? WIDE : 1, most_tokens = GROUP / width;
  const int64_t groups = (w->M + most_tokens - 1) / most_tokens;
  LaneMax* max = NULL;
  if (w->max) {
    max = scratch(SCRATCH_ROW, w->M * sizeof(LaneMax));
    if (!max) {
      ((Work*)state)->out_of_memory = 1;
      return;
    }
    for (int64_t token = 0; token < w->M; token++) {
      store(max[token].value, splat(-INFINITY));
      store_int(max[token].column, splat_int(INT32_MAX));
    }
  }
  const int64_t bytes = TILE * w->kernel->K * w->kernel->bits / 8;
  const int64_t most = RUN_BYTES > width * bytes ? RUN_BYTES / (width * bytes) * width : width;
  for (int64_t begin = first; begin < end; begin += most) {
    const int64_t stop = smaller(begin + most, end);
    /* The run after this one may be the first of another part. It is prefetched in as many portions as this run has blocks. */
    const int64_t left = stop < end ? end - stop : smaller(end - first, w->tiles - stop), next = smaller(most, left);
    const int64_t portions = groups * w->blocks * (stop - begin) / width;
    const char* from = (const char*)w->codes + stop * bytes;
    Ahead ahead = {from, from + next * bytes, (next * bytes / 64 + portions - 1) / portions};
    for (int64_t g = 0; g < groups; g++) {
      const int64_t token = w->M * g / groups;
      const int tokens = (int)(w->M * (g + 1) / groups - token);
      for (int64_t tile = begin; tile < stop; tile += width)
        matmul_group(w, max, groups > 1 ? &ahead : NULL, tile, width, token, tokens);
    }
  }
  if (!max) return;
  for (int64_t token = 0; token < w->M; token++) w->max[token * w->parts + index] = max_of_lanes(max + token);
  release_scratch(SCRATCH_ROW);
}

/* The column of a token's largest logit, or -1 if one of its logits is not finite. */
static int64_t argmax(const Work* w, int64_t token) {
  Max max = {-INFINITY, INT32_MAX};
  const Max* found = w->max + token * w->parts;
  for (int64_t part = 0; part < w->parts; part++) /* in the order of columns: the first of equals stays */
    if (found[part].value > max.value) max = found[part];
  return max.column == INT32_MAX || isinf(max.value) ? -1 : max.column;
}

/* The tokens of `w`, whose memory is bounded, at once. */
static Status* compute_tokens(Work* w, Context* context, void* memory, int64_t* greedy) {
  Kernel* k = w->kernel;
  Api api = k->base.api;
  const int64_t code_bytes = w->M * row_bytes(k->K), blocks = w->M * w->blocks;
  w->x_codes = memory;
  w->x_scales = (float*)((char*)memory + code_bytes);
  w->x_sums = (int32_t*)(w->x_scales + blocks);
  if (greedy) w->max = (Max*)(w->x_sums + blocks);
  if (w->M * k->K < PARALLEL_ACTIVATIONS)
    for (int64_t token = 0; token < w->M; token++) quantize_token(w, token);
  else
    TRY(parallel(api, context, k->base.threads, quantize_token, w->M, w, NULL));
  if (!w->out_of_memory) TRY(parallel(api, context, k->base.threads, matmul_part, w->parts, w, k->stream));
  if (w->out_of_memory) return failure(api, ERROR_FAIL, "block-quantized linear: out of memory");
  for (int64_t token = 0; greedy && token < w->M; token++) greedy[token] = argmax(w, token);
  return NULL;
}

/* The tokens of `all`, as many at once as the scratch memory of a thread has room for. */
static Status* compute_chunks(const Work* all, Context* context, int64_t* greedy) {
  const Kernel* k = all->kernel;
  const int64_t token_bytes =
      row_bytes(k->K) + 8 * all->blocks + (greedy ? 8 * all->parts + (int64_t)sizeof(LaneMax) : 0);
  int64_t most = (SCRATCH_KEPT - 64) / token_bytes / GROUP * GROUP;
  if (most < GROUP) most = GROUP;
  const int64_t chunk = all->M < most ? all->M : most, inputs = k->kind == GATED ? 2 * k->K : k->K;
  void* memory = scratch(SCRATCH_LINEAR, chunk * token_bytes + 64);
  if (!memory) return failure(k->base.api, ERROR_FAIL, "block-quantized linear: out of memory");
  Status* status = NULL;
  for (int64_t token = 0; !status && token < all->M; token += chunk) {
    Work w = *all;
    w.M = all->M - token < chunk ? all->M - token : chunk;
    w.x += token * inputs;
    if (w.residual) w.residual += token * k->K, w.sum += token * k->K;
    if (!greedy) w.y += token * k->N;
    status = compute_tokens(&w, context, memory, greedy ? greedy + token : NULL);
  }
  release_scratch(SCRATCH_LINEAR);
  return status;
}

/* Whether the weights have the shapes and types that the kernel was created for. */
static int are_sound(const Kernel* k, const Tensor* weight, const Tensor* codes, const Tensor* scales,
                     const Tensor* zero_points, const Tensor* bias) {
  const int64_t padded = (k->N + 2 * TILE - 1) / (2 * TILE) * 2 * TILE, scale_count = padded * (k->K / k->block);
  return holds(codes, UINT8, padded * k->K * k->bits / 8) &&
         holds(scales, k->half_scales ? HALF : FLOAT, scale_count) &&
         (k->symmetric || holds(zero_points, UINT8, scale_count)) && (!bias->present || holds(bias, FLOAT, k->N)) &&
         ((k->kind != NORM && k->kind != RESIDUAL_NORM) || holds(weight, FLOAT, k->K));
}

/* What computes `tokens` tokens, but for their inputs and outputs. */
static Work work_of(Kernel* k, int64_t tokens, const Tensor* weight, const Tensor* codes, const Tensor* scales,
                    const Tensor* zero_points, const Tensor* bias) {
  const int64_t tiles = (k->N + 2 * TILE - 1) / (2 * TILE) * 2, pairs = tiles / 2;
  const int64_t pair_bytes = 2 * TILE * k->K * k->bits / 8;
  int64_t pairs_of_part = (pairs + PARTS - 1) / PARTS;
  if (pairs_of_part * pair_bytes > PART_BYTES) pairs_of_part = PART_BYTES / pair_bytes ? PART_BYTES / pair_bytes : 1;
  return (Work){.kernel = k,
                .M = tokens,
                .blocks = k->K / k->block,
                .tiles = tiles,
                .parts = (pairs + pairs_of_part - 1) / pairs_of_part,
                .weight = weight->data,
                .codes = codes->data,
                .scales = scales->data,
                .zero_points = zero_points->data,
                .bias = bias->data};
}

size_t linear_bytes(const void* self) {
  const Kernel* k = self;
  const int constant = are_sound(k, &k->weight, &k->codes, &k->scales, &k->zero_points, &k->bias);
  return constant && k->kind != HEAD ? (size_t)k->codes.elements : 0;
}

int compute_zeros(void* self, int64_t tokens) {
  Kernel* k = self;
  const int64_t inputs = k->kind == GATED ? 2 * k->K : k->K;
  float* memory = calloc((size_t)(tokens * (inputs + 2 * k->K + k->N)), sizeof *memory);
  if (!memory) return 0;
  Work w = work_of(k, tokens, &k->weight, &k->codes, &k->scales, &k->zero_points, &k->bias);
  float* residual = memory + tokens * inputs;
  w.x = memory, w.y = residual + 2 * tokens * k->K;
  if (k->kind == RESIDUAL_NORM) w.residual = residual, w.sum = residual + tokens * k->K;
  Status* status = compute_chunks(&w, NULL, NULL);
  const int done = !status;
  release_status(k->base.api, status);
  free(memory);
  return done;
}

static Status* compute(void* self, Context* context) {
  Kernel* k = self;
  Api api = k->base.api;
  const int normed = k->kind == NORM || k->kind == RESIDUAL_NORM;
  Tensor x, residual = {0}, greedy = {0}, weight = {0}, codes, scales, zero_points, bias;
  size_t next = 0;
  TRY(input(api, context, next++, NULL, &x));
  if (k->kind == RESIDUAL_NORM) TRY(input(api, context, next++, NULL, &residual));
  if (k->kind == HEAD) TRY(input(api, context, next++, NULL, &greedy));
  if (normed) TRY(input(api, context, next++, &k->weight, &weight));
  TRY(input(api, context, next++, &k->codes, &codes));
  TRY(input(api, context, next++, &k->scales, &scales));
  TRY(input(api, context, next++, &k->zero_points, &zero_points));
  TRY(input(api, context, next, &k->bias, &bias));

  if (!x.present || x.type != FLOAT || !x.rank || x.rank > MAX_RANK ||
      x.dims[x.rank - 1] != (k->kind == GATED ? 2 * k->K : k->K))
    return failure(api, ERROR_ARGUMENT, "block-quantized linear: the input does not have K columns");
  const int64_t M = x.elements / x.dims[x.rank - 1];
  if (!are_sound(k, &weight, &codes, &scales, &zero_points, &bias))
    return failure(api, ERROR_ARGUMENT, "block-quantized linear: weights of another shape or type");
  if (k->kind == RESIDUAL_NORM && !holds(&residual, FLOAT, x.elements))
    return failure(api, ERROR_ARGUMENT, "ResidualNormLinear: its inputs differ in shape");
  if (k->kind == HEAD && (x.rank != 2 || !holds(&greedy, BOOL, 1)))
    return failure(api, ERROR_ARGUMENT, "HeadLinear: the input is not [M, K] or greedy is not one bool");

  Work w = work_of(k, M, &weight, &codes, &scales, &zero_points, &bias);
  w.x = x.data, w.residual = residual.data;
  int64_t dims[MAX_RANK], *chosen = NULL;
  for (size_t i = 0; i < x.rank; i++) dims[i] = x.dims[i];
  if (k->kind == RESIDUAL_NORM) TRY(output(api, context, 1, dims, x.rank, &w.sum));
  dims[x.rank - 1] = k->N;
  if (k->kind == HEAD) {
    const int is_greedy = *(const char*)greedy.data != 0;
    dims[0] = is_greedy ? M : 0;
    TRY(output(api, context, 1, dims, 1, &chosen));
    dims[0] = is_greedy ? 0 : M;
    if (!is_greedy) chosen = NULL;
  }
  TRY(output(api, context, 0, dims, x.rank, &w.y));
  if (!M) return NULL;
  return compute_chunks(&w, context, chosen);
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  const Declaration* declared = declaration_of(op);
  Kernel found = {.base = {api, threads_of(op)}, .kind = (Kind)declared->variant};
  TRY(attribute_int(api, info, "N", &found.N));
  TRY(attribute_int(api, info, "K", &found.K));
  TRY(attribute_int(api, info, "block_size", &found.block));
  TRY(attribute_int(api, info, "bits", &found.bits));
  TRY(attribute_int(api, info, "half_scales", &found.half_scales));
  TRY(attribute_int(api, info, "symmetric", &found.symmetric));
  found.epsilon = optional_float(api, info, "epsilon", 1e-5f);
  if (!is_supported(found.N, found.K, found.block, found.bits))
    return failure(api, ERROR_ARGUMENT, "block-quantized linear: unsupported N, K, block_size or bits");
  if (found.block > LARGEST_BLOCK)
    return failure(api, ERROR_ARGUMENT, "block-quantized linear: sums over more than 32768 channels overflow");
  if (!(found.epsilon >= 0)) return failure(api, ERROR_ARGUMENT, "block-quantized linear: a negative epsilon");
  const size_t first = declared->input_count - 4; /* codes, scales, zero points, bias */
  if (found.kind == NORM || found.kind == RESIDUAL_NORM) TRY(constant_input(api, info, first - 1, &found.weight));
  TRY(constant_input(api, info, first, &found.codes));
  TRY(constant_input(api, info, first + 1, &found.scales));
  TRY(constant_input(api, info, first + 2, &found.zero_points));
  TRY(constant_input(api, info, first + 3, &found.bias));
  TRY(keep_kernel(&found, sizeof found, self));
  Kernel* k = *self;
  const Tensor* codes = &k->codes; /* not constant: nothing is read ahead */
  if (!k->base.threads || (k->stream = create_stream(k->base.threads, codes->data, codes->elements))) return NULL;
  release_threads(k->base.threads);
  free(k);
  *self = NULL;
  return failure(api, ERROR_FAIL, "block-quantized linear: out of memory");
}

const Implementation block_linear = {create, compute};
