/* Products of inputs rounded to int8 with weights in 4, 6 or 8 bits: y = f(x) · Wᵀ + bias.

   Inputs are rounded for every row and block of its own, as MatMulNBits does at accuracy level 4
   (quantization/reference.py, round_activations); products are summed in integers within a block and in float across
   blocks. Rows share nothing, so an answer does not depend on what else is in the batch. What comes right before a
   product in a transformer is done while its inputs are rounded, and never goes to memory:

     BlockLinear         x [.., K]                            x
     GatedLinear         x [.., 2K]                           silu(first half) * second half
     NormLinear          x [.., K], weight [K]                x / rms(x) * weight
     ResidualNormLinear  a [.., K], b [.., K], weight [K]     the same of a + b, which is a second output
     HeadLinear          x [M, K], greedy bool                x; where greedy, y has no rows, and a second output [M] says
                                                              where each row would be largest, the first of equals,
                                                              or -1 for a row with one that is not finite

   All take codes, scales, zero points and bias after these; engines/passes/block_linears.py packs them.

   Names: M rows, N output channels, K input channels, B blocks in a row (K / block). A tile is 16 output channels, the
   lanes of a vector; a step is 4 input channels, what a lane sums at once. */
#include "ort.h"
#include "vector.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Inputs below this are rounded by the calling thread: handing rows to others takes as long as a few thousand. */
enum { SHARED_INPUTS = 1 << 13 };
enum { PARTS = 32 }; /* of the columns, dealt to the threads */
enum { TILE = LANES, STEP = 4, FEW_ROWS = 2 };
/* ROWS by WIDE sums of tiles are held in registers, and where there are few rows CHAINS of one tile, which do not wait
   for each other. */
#if AVX512
enum { ROWS = 6, WIDE = 2, CHAINS = 4 };
#else
enum { ROWS = 4, WIDE = 1, CHAINS = 1 };
#endif

typedef enum { PLAIN, GATED, NORM, RESIDUAL_NORM, HEAD } Kind;

typedef struct {
  Api api;
  Kind kind;
  int64_t N, K, block, bits, half_scales, symmetric;
  float epsilon;
  _Atomic int checked;
} Kernel;

/* The largest values of a row, in every lane of its tiles, and their columns. */
typedef struct {
  float value[TILE];
  int32_t column[TILE];
} Largest;

typedef struct {
  const Kernel* kernel;
  int64_t M, blocks, tiles, parts;
  _Atomic int failed;
  const float* x;
  const float* residual; /* what is added to x before its norm */
  const float* weight;   /* of the norm */
  float* sum;            /* x + residual */
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zeros;
  const float* bias;
  float* y;
  Largest* largest; /* [parts, M] instead of y */
  int8_t* rounded;  /* [M, K] */
  float* steps;     /* [M, B] size of a code of x */
  int32_t* sums;    /* [M, B] sum of a block's codes; times the midpoint where zero points are all the same */
} Work;

static inline Floats scale_at(const Work* w, int64_t tile, int64_t block) {
  int64_t at = (tile * w->blocks + block) * TILE;
  if (w->kernel->half_scales) return load_halves(w->scales + 2 * at);
  return load(w->scales + 4 * at);
}

/* A row of the product's inputs: memory of the caller's, or `made` [K] with what was made of it. */
static const float* inputs_of(const Work* w, size_t row, float* made) {
  const Kernel* k = w->kernel;
  const int64_t K = k->K;
  if (k->kind == PLAIN || k->kind == HEAD) return w->x + row * K;
  if (k->kind == GATED) {
    const float *gate = w->x + row * 2 * K, *up = gate + K;
    for (int64_t i = 0; i < K; i += LANES) store(made + i, silu(load(gate + i)) * load(up + i));
    return made;
  }
  const float* x = w->x + row * K;
  if (k->kind == RESIDUAL_NORM) {
    float* sum = w->sum + row * K;
    const float* residual = w->residual + row * K;
    for (int64_t i = 0; i < K; i += LANES) store(sum + i, load(x + i) + load(residual + i));
    x = sum;
  }
  Floats squares = {0};
  for (int64_t i = 0; i < K; i += LANES) squares = multiply_add(load(x + i), load(x + i), squares);
  Floats inverse = same(1.0f / sqrtf(sum_of(squares) / (float)K + k->epsilon));
  for (int64_t i = 0; i < K; i += LANES) store(made + i, load(x + i) * inverse * load(w->weight + i));
  return made;
}

static void round_row(void* state, size_t row) {
  Work* w = state;
  const Kernel* k = w->kernel;
  float* made = scratch(SCRATCH_ROW, k->K * sizeof(float));
  if (!made) {
    w->failed = 1;
    return;
  }
  const float* x = inputs_of(w, row, made);
  int8_t* rounded_row = w->rounded + row * k->K;
  for (int64_t b = 0; b < w->blocks; b++) {
    const float* from = x + b * k->block;
    Floats largest = {0}, poison = {0};
    for (int64_t i = 0; i < k->block; i += LANES) {
      largest = larger(largest, magnitude(load(from + i)));
      poison = multiply_add(load(from + i), same(0), poison); /* the larger loses what is no number, a sum does not */
    }
    float top = largest_of(largest) + sum_of(poison);
    Floats inverse = same(top > 0 ? 127.0f / top : 0.0f);
    Words sum = {0};
    for (int64_t i = 0; i < k->block; i += LANES) {
      Words code = rounded(load(from + i) * inverse);
      sum += code;
      store_codes(rounded_row + b * k->block + i, saturated(code));
    }
    int32_t total = sum_of_words(sum);
    w->steps[row * w->blocks + b] = top / 127.0f;
    w->sums[row * w->blocks + b] = k->symmetric ? total * ((1 << (k->bits - 1)) - centre((int)k->bits)) : total;
  }
}

/* Codes of `STEP` input channels of a tile, a byte each: step `s` of the tile that begins at `tile`. */
INLINE Words codes_at(const uint8_t* tile, int64_t s, const int bits) {
  if (bits == 8) return load_words(tile + 64 * s);
  const Words nibble = same_word(0x0f0f0f0f), top = same_word(0x30303030);
  if (bits == 4) {
    Words both = load_words(tile + 64 * (s / 2));
    return (s % 2 ? both >> 4 : both) & nibble;
  }
  /* Six: of every four steps, 128 bytes hold the low four bits and 64 the two high ones. */
  const uint8_t* four = tile + 192 * (s / 4);
  Words low = load_words(four + 64 * (s % 4 / 2)), high = load_words(four + 128);
  if (s % 2) low >>= 4;
  if (s % 4 == 0) high <<= 4;
  if (s % 4 == 1) high <<= 2;
  if (s % 4 == 3) high >>= 2;
  return (low & nibble) | (high & top);
}

INLINE void keep_largest(Largest* largest, Floats y, int64_t column, int64_t count) {
  /* What is no number counts as infinite, so that it is not lost. */
  y = choose(no_numbers(y), same(INFINITY), y);
  Floats value = load(largest->value);
  Lanes more = first_lanes(count) & above(y, value);
  const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  store(largest->value, choose(more, y, value));
  store_words(largest->column, choose_words(more, lanes + same_word((int32_t)column), load_words(largest->column)));
}

/* `rows` rows by `tiles` tiles. `rows`, `tiles` and `bits` are constants where this is inlined. */
INLINE void product(const Work* w, Largest* largest, int64_t tile, int64_t row, const int rows, const int tiles,
                    const int bits) {
  const Kernel* k = w->kernel;
  const int64_t K = k->K, block_steps = k->block / STEP;
  const int chains = tiles == 1 ? CHAINS : 1, few = depth(bits);
  Floats y[ROWS][WIDE];
  EACH (int r = 0; r < rows; r++)
    EACH (int t = 0; t < tiles; t++) y[r][t] = (Floats){0};
  const uint8_t* codes = w->codes + tile * (TILE * K * bits / 8);
  const int64_t stride = TILE * K * bits / 8;
  for (int64_t b = 0; b < w->blocks; b++) {
    Words sum[ROWS][WIDE], more[FEW_ROWS][CHAINS];
    EACH (int r = 0; r < rows; r++)
      EACH (int t = 0; t < tiles; t++)
        sum[r][t] = k->symmetric ? same_word(-w->sums[(row + r) * w->blocks + b]) : (Words){0};
    EACH (int r = 0; r < rows; r++)
      EACH (int i = 1; i < chains; i++) more[r][i] = (Words){0};
    const int8_t* x = w->rounded + row * K + b * k->block;
    const uint8_t* from = codes + b * (TILE * k->block * bits / 8);
    for (int64_t s = 0; s < block_steps; s += 4)
      EACH (int i = 0; i < 4; i += few) {
        Words weights[4][WIDE];
        EACH (int j = 0; j < few; j++)
          EACH (int t = 0; t < tiles; t++) weights[j][t] = codes_at(from + t * stride + 64 * s * bits / 8, i + j, bits);
        EACH (int r = 0; r < rows; r++)
          EACH (int t = 0; t < tiles; t++) {
            Words* to = i % chains ? &more[r][i] : &sum[r][t];
            Words part = begin_sum(*to, bits);
            EACH (int j = 0; j < few; j++)
              part = add_product(part, weights[j][t], same_four(x + r * K + STEP * (s + i + j)), bits);
            *to = end_sum(*to, part, bits);
          }
      }
    EACH (int r = 0; r < rows; r++)
      EACH (int i = 1; i < chains; i++) sum[r][0] += more[r][i];
    EACH (int t = 0; t < tiles; t++) {
      Floats scale = scale_at(w, tile + t, b);
      Words zero = {0};
      if (!k->symmetric) zero = widened_bytes(w->zeros + ((tile + t) * w->blocks + b) * TILE) - same_word(centre(bits));
      EACH (int r = 0; r < rows; r++) {
        int64_t at = (row + r) * w->blocks + b;
        if (!k->symmetric) sum[r][t] -= zero * same_word(w->sums[at]);
        Floats step = scale * same(w->steps[at]);
        y[r][t] = multiply_add(to_floats(sum[r][t]), step, y[r][t]);
      }
    }
  }
  EACH (int t = 0; t < tiles; t++) {
    int64_t column = (tile + t) * TILE, left = k->N - column;
    const int64_t count = left >= TILE ? TILE : left > 0 ? left : 0;
    Floats bias = w->bias ? load_first(w->bias + column, count) : (Floats){0};
    EACH (int r = 0; r < rows; r++)
      if (largest)
        keep_largest(largest + row + r, y[r][t] + bias, column, count);
      else
        store_first(w->y + (row + r) * k->N + column, y[r][t] + bias, count);
  }
}

#define PANEL(bits)                                               \
  switch (rows) {                                                 \
    case 1: product(w, largest, tile, row, 1, 1, bits); break;    \
    case 2: product(w, largest, tile, row, 2, 1, bits); break;    \
    case 3: product(w, largest, tile, row, 3, WIDE, bits); break; \
    case 4:                                                       \
      product(w, largest, tile, row, 4, WIDE, bits);              \
      break;                                                      \
      MORE_ROWS(bits)                                             \
  }
#if AVX512
#define MORE_ROWS(bits)                                         \
  case 5: product(w, largest, tile, row, 5, WIDE, bits); break; \
  case 6: product(w, largest, tile, row, 6, WIDE, bits); break;
#else
#define MORE_ROWS(bits)
#endif

static void panel(const Work* w, Largest* largest, int64_t tile, int64_t row, int rows) {
  if (w->kernel->bits == 8)
    PANEL(8)
  else if (w->kernel->bits == 6)
    PANEL(6)
  else
    PANEL(4)
}

/* One of `parts` runs of pairs of tiles, for all rows: a pair stays in the cache while all rows pass it, and the next one
   is asked for meanwhile, or memory would rest while there is more than one group of rows to compute (32 rows of 576 x
   3072: 145 us without, 115 with). One or two rows take tile after tile, so that memory is read in one stream. */
static void columns(void* state, size_t part) {
  const Work* w = state;
  int64_t first = w->tiles / 2 * part / w->parts * 2, end = w->tiles / 2 * (part + 1) / w->parts * 2;
  int64_t groups = (w->M + ROWS - 1) / ROWS, width = w->M <= FEW_ROWS ? 1 : WIDE;
  Largest* largest = w->largest ? w->largest + part * w->M : NULL;
  for (int64_t row = 0; largest && row < w->M; row++)
    for (int lane = 0; lane < TILE; lane++) largest[row].value[lane] = -INFINITY, largest[row].column[lane] = INT32_MAX;
  const int64_t bytes = width * TILE * w->kernel->K * w->kernel->bits / 8;
  for (int64_t tile = first; tile < end; tile += width)
    for (int64_t g = 0; g < groups; g++) {
      int64_t row = w->M * g / groups;
      const char* next = (const char*)w->codes + (tile / width + 1) * bytes;
      for (int64_t at = bytes * g / groups; groups > 1 && at < bytes * (g + 1) / groups; at += 64)
        _mm_prefetch(next + at, _MM_HINT_T0);
      panel(w, largest, tile, row, (int)(w->M * (g + 1) / groups - row));
    }
}

static int64_t first_of_largest(const Work* w, int64_t row) {
  float value = -INFINITY;
  int32_t column = INT32_MAX;
  for (int64_t part = 0; part < w->parts; part++) {
    const Largest* found = w->largest + part * w->M + row;
    for (int lane = 0; lane < TILE; lane++)
      if (found->value[lane] > value || (found->value[lane] == value && found->column[lane] < column)) {
        value = found->value[lane];
        column = found->column[lane];
      }
  }
  return column == INT32_MAX || isinf(value) ? -1 : column;
}

/* That weights are of the sizes that the attributes say, once: initializers do not change. */
static Status* check(Kernel* k, Context* context, size_t codes) {
  Api api = k->api;
  const int64_t padded = (k->N + 2 * TILE - 1) / (2 * TILE) * 2 * TILE, blocks = padded * (k->K / k->block);
  int64_t dims[8];
  int type;
  const Value *scales = input(api, context, codes + 1), *zeros = input(api, context, codes + 2),
              *bias = input(api, context, codes + 3);
  dimensions(api, scales, dims, &type);
  if (!holds(api, input(api, context, codes), padded * k->K * k->bits / 8) || !holds(api, scales, blocks) ||
      type != (k->half_scales ? HALF : FLOAT) || (!k->symmetric && !holds(api, zeros, blocks)) ||
      (bias && !holds(api, bias, k->N)) ||
      ((k->kind == NORM || k->kind == RESIDUAL_NORM) && !holds(api, input(api, context, codes - 1), k->K)))
    return failure(api, ERROR_ARGUMENT, "a block-quantized product: weights of another shape or type");
  k->checked = 1;
  return NULL;
}

static Status* compute(void* self, Context* context) {
  Kernel* k = self;
  Api api = k->api;
  int64_t dims[8];
  const Value* x = input(api, context, 0);
  size_t rank = dimensions(api, x, dims, NULL), next = 1;
  if (!rank || dims[rank - 1] != (k->kind == GATED ? 2 * k->K : k->K))
    return failure(api, ERROR_ARGUMENT, "a block-quantized product: its input has not K columns");
  Work w = {.kernel = k,
            .M = 1,
            .blocks = k->K / k->block,
            .tiles = (k->N + 2 * TILE - 1) / (2 * TILE) * 2,
            .x = data_of(api, x)};
  for (size_t i = 0; i + 1 < rank; i++) w.M *= dims[i];
  if (k->kind == RESIDUAL_NORM) {
    const Value* residual = input(api, context, next++);
    if (!holds(api, residual, w.M * k->K))
      return failure(api, ERROR_ARGUMENT, "ResidualNormLinear: its inputs differ in shape");
    w.residual = data_of(api, residual);
    TRY(output(api, context, 1, dims, rank, &w.sum));
  }
  const char* greedy = k->kind == HEAD ? data_of(api, input(api, context, next++)) : NULL;
  if (k->kind == NORM || k->kind == RESIDUAL_NORM) w.weight = data_of(api, input(api, context, next++));
  if (!k->checked) TRY(check(k, context, next));
  w.codes = data_of(api, input(api, context, next++));
  w.scales = data_of(api, input(api, context, next++));
  w.zeros = data_of(api, input(api, context, next++));
  w.bias = data_of(api, input(api, context, next));
  dims[rank - 1] = k->N;
  int64_t* chosen = NULL;
  if (k->kind == HEAD) {
    if (rank != 2) return failure(api, ERROR_ARGUMENT, "HeadLinear: its input is not rows of K columns");
    dims[0] = *greedy ? w.M : 0;
    TRY(output(api, context, 1, dims, 1, &chosen));
    dims[0] = *greedy ? 0 : w.M;
    if (!*greedy) chosen = NULL;
  }
  TRY(output(api, context, 0, dims, rank, &w.y));
  if (!w.M) return NULL;
  w.parts = w.tiles / 2 < PARTS ? w.tiles / 2 : PARTS;
  size_t codes = (w.M * k->K + 63) / 64 * 64, blocks = w.M * w.blocks, candidates = chosen ? w.parts * w.M : 0;
  uint8_t* memory = scratch(SCRATCH_LINEAR, codes + blocks * 8 + candidates * sizeof(Largest));
  if (!memory) return failure(api, ERROR_FAIL, "a block-quantized product: out of memory");
  w.rounded = (int8_t*)memory;
  w.steps = (float*)(memory + codes);
  w.sums = (int32_t*)(memory + codes + 4 * blocks);
  if (chosen) w.largest = (Largest*)(memory + codes + 8 * blocks);
  if (w.M * k->K < SHARED_INPUTS)
    for (int64_t row = 0; row < w.M; row++) round_row(&w, row);
  else
    TRY(parallel(api, context, round_row, w.M, &w));
  if (w.failed) return failure(api, ERROR_FAIL, "a block-quantized product: out of memory");
  TRY(parallel(api, context, columns, w.parts, &w));
  for (int64_t row = 0; chosen && row < w.M; row++) chosen[row] = first_of_largest(&w, row);
  return NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  Kernel* k = calloc(1, sizeof *k);
  if (!k) return failure(api, ERROR_FAIL, "a block-quantized product: out of memory");
  k->api = api;
  k->kind = (Kind)(op - linear_ops);
  k->N = attribute_int(api, info, "N", 0);
  k->K = attribute_int(api, info, "K", 0);
  k->block = attribute_int(api, info, "block_size", 0);
  k->bits = attribute_int(api, info, "bits", 0);
  k->half_scales = attribute_int(api, info, "half_scales", 0);
  k->symmetric = attribute_int(api, info, "symmetric", 1);
  k->epsilon = attribute_float(api, info, "epsilon", 1e-5f);
  if (k->N < 1 || k->K < 1 || k->block < 16 || k->block % 16 || k->K % k->block ||
      (k->bits != 4 && k->bits != 6 && k->bits != 8)) {
    free(k);
    return failure(api, ERROR_ARGUMENT, "a block-quantized product: N, K, block_size or bits it was not built for");
  }
  *self = k;
  return NULL;
}

static const char* name(const Op* op) {
  static const char* const names[] = {"BlockLinear", "GatedLinear", "NormLinear", "ResidualNormLinear", "HeadLinear"};
  return names[op - linear_ops];
}

static size_t before_codes(const Op* op) {
  static const size_t counts[] = {1, 1, 2, 3, 2};
  return counts[op - linear_ops];
}

static size_t inputs(const Op* op) {
  return before_codes(op) + 4;
}

static int input_type(const Op* op, size_t i) {
  static const int types[] = {UINT8, ANY, UINT8, FLOAT}; /* codes, scales, zero points, bias */
  if (op - linear_ops == HEAD && i == 1) return BOOL;
  return i < before_codes(op) ? FLOAT : types[i - before_codes(op)];
}

static int input_presence(const Op* op, size_t i) {
  return i < before_codes(op) + 2 ? REQUIRED : OPTIONAL;
}
static size_t outputs(const Op* op) {
  return op - linear_ops >= RESIDUAL_NORM ? 2 : 1;
}
static int output_type(const Op* op, size_t i) {
  return op - linear_ops == HEAD && i == 1 ? INT64 : FLOAT;
}

#define LINEAR OPERATOR(name, inputs, input_type, input_presence, outputs, output_type, create, compute)
Op linear_ops[] = {[PLAIN] = LINEAR, [GATED] = LINEAR, [NORM] = LINEAR, [RESIDUAL_NORM] = LINEAR, [HEAD] = LINEAR};
