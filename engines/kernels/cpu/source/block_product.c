#include "block_product.h"

#include "amx.h"
#include "memory.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Weights of a run, which all groups of tokens pass in turn: with the next ones they fit the second-level cache, unless a
   pair of tiles alone has more. And how far ahead of the dot products weights are prefetched that one group passes: on a
   Zen 5, 4 KB is as fast where memory reads 50 GB/s, and slower where it reads 65; 12 and 24 KB are slower at one token. On
   a Sapphire Rapids 2 KB is faster than 1 and 8, for a loop that only reads, too. */
enum { RUN_BYTES = 64 << 10, STREAM_AHEAD = AMX ? 2 << 10 : 8 << 10 };

static inline F32x16 scale_at(const BlockWeight* w, int64_t tile, int64_t block) {
  const int64_t at = (tile * w->blocks + block) * TILE;
  if (w->shape.e2m1) return (F32x16)shift_left(widen_bytes(w->scales + at), 23); /* the exponent of a float */
  if (w->shape.half_scales) return load_half(w->scales + 2 * at);
  return load(w->scales + 4 * at);
}

int32_t sum_factor(const BlockShape* s) {
  const int bits = s->e2m1 ? E2M1_BITS : (int)s->bits;
  return s->symmetric ? (1 << (bits - 1)) - code_offset(bits) : 1;
}

void quantize_row(const BlockWeight* w, const BlockRows* rows, int64_t row, const float* x) {
  const BlockShape* k = &w->shape;
  int8_t* codes = rows->codes + row * row_bytes(k->K);
  const int32_t factor = sum_factor(k);
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
    rows->scales[b * rows->stride + row] = largest / 127.0f;
    rows->sums[b * rows->stride + row] = -reduce_add_int(sum) * factor;
  }
}

/* 64 bytes of a tile's codes. Where `half` is set, the 32 of half a tile, twice. */
INLINE I32x16 load_codes(const uint8_t* from, const int half) {
#if HALVES
  if (half) return load_twice(from);
#endif
  return (void)half, load_int(from);
}

/* Codes of `STEP` input channels of a tile, a byte each: step `s` of the tile, or of the half, that begins at `tile`. Those of
   E2M1 have E2M1_BITS then. */
INLINE I32x16 codes_at(const uint8_t* tile, int64_t s, const int bits, const int e2m1, const int half) {
  if (bits == 8) return load_codes(tile + 64 * s, half);
  const I32x16 nibble = splat_int(0x0f0f0f0f);
  if (bits == 4) {
    const I32x16 both = load_codes(tile + 64 * (s / 2), half), codes = s % 2 ? both >> 4 : both;
    return e2m1 ? look_up((U8x16)load_int8(E2M1_CODES), codes) : codes & nibble;
  }
  if (bits == 5) {
    /* Of eight steps, 256 bytes hold the low four bits and 64 the high one. */
    const uint8_t* eight_steps = tile + 320 * (s / 8);
    I32x16 low = load_codes(eight_steps + 64 * (s % 8 / 2), half), high = load_codes(eight_steps + 256, half);
    if (s % 2) low >>= 4;
    high = s % 8 < 4 ? shift_left(high, 4 - s % 8) : high >> (s % 8 - 4);
    return (low & nibble) | (high & splat_int(0x10101010));
  }
  /* 6 bits: of four steps, 128 bytes hold the low four bits and 64 the high two. */
  const uint8_t* four_steps = tile + 192 * (s / 4);
  I32x16 low = load_codes(four_steps + 64 * (s % 4 / 2), half), high = load_codes(four_steps + 128, half);
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

/* The columns of a tile that a weight has, and their bias. */
typedef struct {
  int64_t first, count;
  F32x16 bias;
} Columns;

INLINE Columns columns_of(const BlockWeight* w, int64_t tile) {
  /* A tile of padding has no columns; it must not even form addresses beyond those of the last. */
  const int64_t left = w->shape.N - tile * TILE;
  const int64_t columns = left >= TILE ? TILE : left > 0 ? left : 0, column = left > 0 ? tile * TILE : 0;
  return (Columns){column, columns, w->bias ? load_first(w->bias + column, columns) : (F32x16){0}};
}
/* Sums of a row and a tile: to its outputs, or into the largest of the row. */
INLINE void write_outputs(const BlockWeight* w, const Columns* to, F32x16 sums, int64_t row, float* y, LaneMax* max) {
  if (max)
    update_max(max + row, sums + to->bias, to->first, to->count);
  else
    store_first(y + row * w->shape.N + to->first, sums + to->bias, to->count);
}

/* Where the last joined steps of a weight begin, in its codes. */
INLINE int64_t last_steps_of(const BlockWeight* w, const int bits) {
  return (w->tiles + w->after) * (TILE * w->shape.K * bits / 8) - 64 * joined_steps(bits) * bits / 8;
}
/* As many lines as joined steps have, STREAM_AHEAD after those. */
INLINE void prefetch_after(const BlockWeight* w, const uint8_t* steps, const int64_t last_steps, const int bits) {
  const uint8_t* next = w->codes + smaller(steps - w->codes + STREAM_AHEAD, last_steps);
  EACH (int i = 0; i < joined_steps(bits) * bits / 8; i++) prefetch_l1(next + 64 * i);
}

#if HALVES
/* As `add_block`, for one tile: its lower half, then its upper half. */
INLINE void add_halves(const BlockWeight* w, I32x16 sum[GROUP][WIDE], const int8_t* x, const uint8_t* from,
                       const int stream, const int64_t last_steps, const int count, const int bits, const int e2m1) {
  const int64_t block_steps = w->shape.block / STEP, stride = row_bytes(w->shape.K);
  const int summed = e2m1 ? E2M1_BITS : bits, depth = depth_of(summed), joined = joined_steps(bits);
  I32x8 sums[2][GROUP];
  EACH (int half = 0; half < 2; half++) {
    EACH (int m = 0; m < count; m++) sums[half][m] = half ? HIGH(sum[m][0]) : LOW(sum[m][0]);
    for (int64_t s = 0; s < block_steps; s += joined) {
      const uint8_t* steps = from + 64 * s * bits / 8;
      if (stream && !half) prefetch_after(w, steps, last_steps, bits);
      EACH (int i = 0; i < joined; i += depth) {
        I32x16 weights[4];
        EACH (int j = 0; j < depth; j++) weights[j] = codes_at(steps + 32 * half, i + j, bits, e2m1, 1);
        EACH (int m = 0; m < count; m++) {
          const I32x16 to = BOTH(sums[half][m], sums[half][m]);
          I32x16 partial = begin_dots(to, summed);
          EACH (int j = 0; j < depth; j++)
            partial = add_dot(partial, weights[j], splat_int8x4(x + m * stride + STEP * (s + i + j)), summed);
          sums[half][m] = LOW(end_dots(to, partial, summed));
          if (bits == 8) sums[half][m] = in_register(sums[half][m]);
        }
      }
    }
  }
  EACH (int m = 0; m < count; m++) sum[m][0] = BOTH(sums[0][m], sums[1][m]);
}
#endif

/* Adds a block's products to the sums of `count` rows by `tiles` tiles, whose codes begin at `from`. */
INLINE void add_block(const BlockWeight* w, I32x16 sum[GROUP][WIDE], const int8_t* x, const uint8_t* from,
                      const int stream, const int64_t last_steps, const int count, const int tiles, const int bits,
                      const int e2m1) {
  const int64_t block_steps = w->shape.block / STEP, stride = row_bytes(w->shape.K),
                bytes = TILE * w->shape.K * bits / 8;
  const int chains = (CHAINS + count * tiles - 1) / (count * tiles), summed = e2m1 ? E2M1_BITS : bits,
            depth = depth_of(summed), joined = joined_steps(bits);
  I32x16 more[CHAINS][WIDE][CHAINS];
  EACH (int m = 0; m < count; m++)
    EACH (int t = 0; t < tiles; t++)
      EACH (int i = 1; i < chains; i++) more[m][t][i] = (I32x16){0};
  for (int64_t s = 0; s < block_steps; s += joined) {
    const uint8_t* steps = from + 64 * s * bits / 8;
    if (stream) prefetch_after(w, steps, last_steps, bits);
    EACH (int i = 0; i < joined; i += depth) {
      I32x16 weights[4][WIDE];
      EACH (int j = 0; j < depth; j++)
        EACH (int t = 0; t < tiles; t++) weights[j][t] = codes_at(steps + t * bytes, i + j, bits, e2m1, 0);
      EACH (int m = 0; m < count; m++) {
        I32x16 partial[WIDE], *to[WIDE];
        EACH (int t = 0; t < tiles; t++) {
          to[t] = i % chains ? &more[m][t][i % chains] : &sum[m][t];
          partial[t] = begin_dots(*to[t], summed);
        }
        EACH (int j = 0; j < depth; j++) {
          const I32x16 activations = splat_int8x4(x + m * stride + STEP * (s + i + j));
          EACH (int t = 0; t < tiles; t++) partial[t] = add_dot(partial[t], weights[j][t], activations, summed);
        }
        EACH (int t = 0; t < tiles; t++) *to[t] = end_dots(*to[t], partial[t], summed);
      }
    }
  }
  EACH (int m = 0; m < count; m++)
    EACH (int t = 0; t < tiles; t++)
      EACH (int i = 1; i < chains; i++) sum[m][t] += more[m][t][i];
}

/* `count` rows by `tiles` tiles. `count`, `tiles`, `bits` and `e2m1` are constants where this is inlined. `ahead` is memory to
   prefetch, some lines with each block; NULL: the weights that follow, line by line as others are used. */
INLINE void multiply_tiles(const BlockWeight* w, const BlockRows* rows, float* to_y, LaneMax* max, Ahead* ahead,
                           int64_t tile, int64_t row, const int count, const int tiles, const int bits,
                           const int e2m1) {
  const BlockShape* k = &w->shape;
  const int64_t stride = row_bytes(k->K), last_steps = last_steps_of(w, bits);
  F32x16 y[GROUP][WIDE];
  EACH (int m = 0; m < count; m++)
    EACH (int t = 0; t < tiles; t++) y[m][t] = (F32x16){0};
  const uint8_t* codes = w->codes + tile * (TILE * k->K * bits / 8);
  for (int64_t b = 0; b < w->blocks; b++) {
    const float* x_scales = rows->scales + b * rows->stride + row;
    const int32_t* x_sums = rows->sums + b * rows->stride + row;
    I32x16 sum[GROUP][WIDE];
    EACH (int m = 0; m < count; m++)
      EACH (int t = 0; t < tiles; t++) sum[m][t] = k->symmetric ? splat_int(x_sums[m]) : (I32x16){0};
    const int8_t* x = rows->codes + row * stride + b * k->block;
    const uint8_t* from = codes + b * (TILE * k->block * bits / 8);
#if HALVES
    if (count > WHOLE)
      add_halves(w, sum, x, from, !ahead, last_steps, count, bits, e2m1);
    else
#endif
      add_block(w, sum, x, from, !ahead, last_steps, count, tiles, bits, e2m1);
    if (ahead) prefetch_some(ahead);
    EACH (int t = 0; t < tiles; t++) {
      F32x16 scale = scale_at(w, tile + t, b);
      I32x16 zero_point = {0};
      if (!k->symmetric)
        zero_point = widen_bytes(w->zero_points + ((tile + t) * w->blocks + b) * TILE) - splat_int(code_offset(bits));
      EACH (int m = 0; m < count; m++) {
        if (!k->symmetric) sum[m][t] += zero_point * splat_int(x_sums[m]);
        F32x16 combined = scale * splat(x_scales[m]);
        y[m][t] = vfma(to_float(sum[m][t]), combined, y[m][t]);
      }
    }
  }
  EACH (int t = 0; t < tiles; t++) {
    const Columns to = columns_of(w, tile + t);
    EACH (int m = 0; m < count; m++) write_outputs(w, &to, y[m][t], row + m, to_y, max);
  }
}

#define ROWS(count, tiles, bits, e2m1) \
  case count: multiply_tiles(w, rows, y, max, ahead, tile, row, count, tiles, bits, e2m1); break;
#if AVX512
#define LARGER_GROUPS(bits, e2m1) \
  ROWS(5, 1, bits, e2m1)          \
  ROWS(6, 1, bits, e2m1)          \
  ROWS(7, 1, bits, e2m1)          \
  ROWS(8, 1, bits, e2m1)          \
  ROWS(9, 1, bits, e2m1)          \
  ROWS(10, 1, bits, e2m1)         \
  ROWS(11, 1, bits, e2m1)         \
  ROWS(12, 1, bits, e2m1)
/* Of more than GROUP rows, each group has at least four. */
#define WIDE_GROUPS(bits, e2m1) \
  ROWS(4, WIDE, bits, e2m1)     \
  ROWS(5, WIDE, bits, e2m1)     \
  ROWS(6, WIDE, bits, e2m1)
#elif HALVES
#define LARGER_GROUPS(bits, e2m1) \
  ROWS(5, 1, bits, e2m1)          \
  ROWS(6, 1, bits, e2m1)          \
  ROWS(7, 1, bits, e2m1)          \
  ROWS(8, 1, bits, e2m1)
#define WIDE_GROUPS(bits, e2m1)
#else
#define LARGER_GROUPS(bits, e2m1)
#define WIDE_GROUPS(bits, e2m1)
#endif
#define MULTIPLY_GROUP(bits, e2m1) \
  if (width > 1) switch (count) {  \
      WIDE_GROUPS(bits, e2m1)      \
    }                              \
  else                             \
    switch (count) {               \
      ROWS(1, 1, bits, e2m1)       \
      ROWS(2, 1, bits, e2m1)       \
      ROWS(3, 1, bits, e2m1)       \
      ROWS(4, 1, bits, e2m1)       \
      LARGER_GROUPS(bits, e2m1)    \
    }

_Static_assert(WIDE == 1 || GROUP / WIDE == 6, "of more than GROUP rows a group has 4 to GROUP / WIDE");
/* A group of rows by `width` tiles. */
static void multiply_group(const BlockWeight* w, const BlockRows* rows, float* y, LaneMax* max, Ahead* ahead,
                           int64_t tile, int64_t width, int64_t row, int count) {
  if (w->shape.bits == 8)
    MULTIPLY_GROUP(8, 0)
  else if (w->shape.bits == 6)
    MULTIPLY_GROUP(6, 0)
  else if (w->shape.bits == 5)
    MULTIPLY_GROUP(5, 0)
  else if (w->shape.e2m1)
    MULTIPLY_GROUP(4, 1)
  else
    MULTIPLY_GROUP(4, 0)
}

#if AMX
/* Products by tiles of AMX, for many rows. The codes of some tiles and blocks are unpacked to memory that the caches hold, less
   their zero points, and all rows pass them in groups of up to 16. Sums within a block are the same integers, and blocks are
   scaled and added in the same order, so results have the bits of the vectors' code.

   Registers: four of sums, and two each of activations and of weights. A product's sums are stored two products later and scaled
   two products after that: a product takes 16 cycles, but its sums are there only 52 cycles after it began. So products follow
   each other without a pause, from tile to tile and from group to group. */
enum { SUMS = 4, ACTIVATIONS = SUMS, WEIGHTS = ACTIVATIONS + 2, STORE_AFTER = 2, SCALE_AFTER = 4 };
/* At most so many channels and tiles are unpacked at once: two tiles and the activations of a group then stay in the first-level
   cache. */
enum { CHUNK_CHANNELS = 640, RUN_TILES = 8 };
/* Fewer are as fast with vectors, which need no unpacked codes. */
enum { LEAST_ROWS = 24 };

/* Some blocks of some tiles, and groups of as many rows each, which all pass them. */
typedef struct {
  const BlockWeight* w;
  const BlockRows* rows;
  int64_t tile, tiles, block, blocks, row, groups;
  int64_t channels;    /* of a product */
  const int8_t* codes; /* [tiles, blocks, block size * 16] */
  const int8_t* rests; /* [tiles, blocks, 64] of 8 bits with zero points, which is added to each code; else NULL */
  const float* scales; /* [tiles, blocks, 16] */
  float* sums;         /* [groups, tiles, rows of a group, 16] of the blocks before, and then with these */
  float* y;
  LaneMax* max;
  Ahead* ahead; /* prefetched, some lines with each product */
} Panel;

/* A product of a panel: of the group of rows from `row` on, a tile and a block. */
typedef struct {
  int64_t row, tile, block;
  const int8_t *x, *codes, *rests;
  const float *scales, *x_scales;
} Product;

INLINE Product first_product(const Panel* p) {
  const BlockRows* rows = p->rows;
  const BlockShape* k = &p->w->shape;
  const int8_t* x = rows->codes + p->row * row_bytes(k->K) + p->block * k->block;
  const float* x_scales = rows->scales + p->block * rows->stride + p->row;
  return (Product){p->row, 0, 0, x, p->codes, p->rests, p->scales, x_scales};
}
/* To the next product; whether this one was the last of its tile. */
INLINE int advance(const Panel* p, Product* at, const int count) {
  const BlockShape* k = &p->w->shape;
  at->x += k->block, at->codes += k->block * TILE, at->scales += TILE, at->x_scales += p->rows->stride;
  if (p->rests) at->rests += TILE * STEP;
  if (++at->block < p->blocks) return 0;
  at->block = 0, at->x -= p->blocks * k->block, at->x_scales -= p->blocks * p->rows->stride;
  if (++at->tile < p->tiles) return 1;
  at->tile = 0, at->row += count, at->x += count * row_bytes(k->K), at->x_scales += count;
  at->codes = p->codes, at->rests = p->rests, at->scales = p->scales;
  return 1;
}

INLINE I32x16 four_times(I32x16 bytes) {
  return bytes | shift_left(bytes, 8) | shift_left(bytes, 16) | shift_left(bytes, 24);
}

/* Signed codes of the blocks `begin` to `end` of a tile, each less its zero point, and their scales. Codes of 8 bits less their
   zero points do not fit a byte: they are less 128, and what is left, 128 less the zero point, is a product of its own. */
INLINE void unpack_blocks(const BlockWeight* w, int8_t* to, int8_t* rests, float* scales, int64_t tile, int64_t begin,
                          int64_t end, const int bits, const int e2m1) {
  const BlockShape* k = &w->shape;
  const int joined = joined_steps(bits);
  const uint8_t* from = w->codes + (tile * k->K + begin * k->block) * TILE * bits / 8;
  for (int64_t b = begin; b < end; b++, scales += TILE, rests += TILE * STEP) {
    store(scales, scale_at(w, tile, b));
    I32x16 zero = splat_int(1 << ((e2m1 ? E2M1_BITS : bits) - 1));
    if (!k->symmetric) {
      const I32x16 points = widen_bytes(w->zero_points + (tile * w->blocks + b) * TILE);
      if (bits == 8)
        store_int(rests, four_times((zero - points) & splat_int(255)));
      else
        zero = points;
    }
    const I8x64 zeros = (I8x64)four_times(zero);
    for (int64_t s = 0; s < k->block / STEP; s += joined, from += 64 * joined * bits / 8)
      EACH (int i = 0; i < joined; i++, to += TILE * STEP)
        store_int(to, (I32x16)((I8x64)codes_at(from, i, bits, e2m1, 0) - zeros));
  }
}

static void unpack(const BlockWeight* w, int8_t* to, int8_t* rests, float* scales, int64_t tile, int64_t begin,
                   int64_t end) {
#define UNPACK(bits, e2m1) unpack_blocks(w, to, rests, scales, tile, begin, end, bits, e2m1)
  if (w->shape.bits == 8)
    UNPACK(8, 0);
  else if (w->shape.bits == 6)
    UNPACK(6, 0);
  else if (w->shape.bits == 5)
    UNPACK(5, 0);
  else if (w->shape.e2m1)
    UNPACK(4, 1);
  else
    UNPACK(4, 0);
}

/* The sums of a product, into register `i`. Registers are part of an instruction. */
#define PRODUCT(i)                                                     \
  case i:                                                              \
    _tile_zero(i);                                                     \
    for (int64_t c = 0; c < size; c += p->channels) {                  \
      _tile_loadd(ACTIVATIONS + i % 2, at->x + c, stride);             \
      _tile_loadd(WEIGHTS + i % 2, at->codes + c * TILE, TILE * STEP); \
      _tile_dpbssd(i, ACTIVATIONS + i % 2, WEIGHTS + i % 2);           \
      if (!p->rests) continue;                                         \
      _tile_loadd(WEIGHTS + i % 2, at->rests, 0);                      \
      _tile_dpbssd(i, ACTIVATIONS + i % 2, WEIGHTS + i % 2);           \
    }                                                                  \
    break;
INLINE void begin_sums(const int i, const Panel* p, const Product* at) {
  const int64_t size = p->w->shape.block, stride = row_bytes(p->w->shape.K);
  switch (i) { PRODUCT(0) PRODUCT(1) PRODUCT(2) PRODUCT(3) }
}
INLINE void store_sums(const int i, int32_t* to) {
  switch (i) {
    case 0: _tile_stored(0, to, TILE * sizeof *to); break;
    case 1: _tile_stored(1, to, TILE * sizeof *to); break;
    case 2: _tile_stored(2, to, TILE * sizeof *to); break;
    case 3: _tile_stored(3, to, TILE * sizeof *to); break;
  }
}
INLINE void scale_sums(const Product* at, F32x16 y[TILE_ROWS], const int32_t* sums, const int count) {
  const F32x16 scale = load(at->scales);
  EACH (int m = 0; m < count; m++) {
    const F32x16 combined = scale * splat(at->x_scales[m]);
    y[m] = vfma(to_float(load_int(sums + m * TILE)), combined, y[m]);
  }
}

/* The lines that the outputs of a tile will be written to. */
INLINE void prefetch_outputs(const Panel* p, const Product* at, const int count) {
  const int64_t N = p->w->shape.N, column = (p->tile + at->tile) * TILE;
  if (p->max || column >= N) return;
  const float* to = p->y + at->row * N + column;
  EACH (int m = 0; m < count; m++) __builtin_prefetch(to + m * N, 1, 3);
}

/* The outputs of a tile for `count` rows, whose sums are complete. */
INLINE void finish_tile(const Panel* p, const Product* at, const F32x16 y[TILE_ROWS], const int count) {
  const Columns to = columns_of(p->w, p->tile + at->tile);
  if (p->max)
    for (int m = 0; m < count; m++) write_outputs(p->w, &to, y[m], at->row + m, NULL, p->max);
  else
    EACH (int m = 0; m < count; m++) write_outputs(p->w, &to, y[m], at->row + m, p->y, NULL);
}

/* The sums of a tile's blocks before those of the panel. */
INLINE void begin_tile(const Panel* p, const float* so_far, F32x16 y[TILE_ROWS], const int count) {
  EACH (int m = 0; m < count; m++) y[m] = p->block ? load(so_far + m * TILE) : splat(0);
}

/* All products of a panel. `count` is a constant where this is inlined. */
INLINE void add_products(const Panel* p, const int count) {
  const int64_t products = p->groups * p->tiles * p->blocks;
  const int complete = p->block + p->blocks == p->w->blocks;
  _Alignas(64) int32_t sums[SUMS][TILE_ROWS * TILE];
  Product next = first_product(p), scaled = next;
  float* so_far = p->sums;
  F32x16 y[TILE_ROWS];
  begin_tile(p, so_far, y, count);
  if (complete) prefetch_outputs(p, &next, count);
  for (int64_t first = 0; first < products + SCALE_AFTER; first += SUMS)
    EACH (int i = 0; i < SUMS; i++) {
      const int64_t begun = first + i;
      const int stored = (i + SUMS - STORE_AFTER) % SUMS;
      if (begun >= STORE_AFTER && begun < products + STORE_AFTER) store_sums(stored, sums[stored]);
      if (begun < products) {
        begin_sums(i, p, &next);
        prefetch_some(p->ahead);
        if (advance(p, &next, count) && complete && begun < products - 1) prefetch_outputs(p, &next, count);
      }
      if (begun < SCALE_AFTER || begun >= products + SCALE_AFTER) continue;
      scale_sums(&scaled, y, sums[i], count);
      const Product last = scaled;
      if (!advance(p, &scaled, count)) continue;
      if (complete)
        finish_tile(p, &last, y, count);
      else
        EACH (int m = 0; m < count; m++) store(so_far + m * TILE, y[m]);
      so_far += count * TILE;
      if (begun < products + SCALE_AFTER - 1) begin_tile(p, so_far, y, count);
    }
}

#define COUNT(count) \
  case count: add_products(p, count); break;
static void multiply_panel(const Panel* p, int count) {
  switch (count) { COUNT(11) COUNT(12) COUNT(13) COUNT(14) COUNT(15) COUNT(16) }
}
_Static_assert(LEAST_ROWS == 24, "a group of as many rows or more has at least 11, of 33 rows");

/* Passes a panel by all groups. The first have one row more than the others, or as many. */
static void pass_groups(Panel* p, int64_t groups) {
  const int64_t rows = p->rows->count, larger = rows % groups;
  float* sums = p->sums;
  TileShapes shapes = {0};
  for (int more = larger > 0; more >= 0; more--) {
    const int count = (int)(rows / groups) + more;
    p->groups = more ? larger : groups - larger;
    p->row = more ? 0 : larger * (count + 1);
    p->sums = sums + p->row * p->tiles * TILE;
    shape_tiles(&shapes, 0, ACTIVATIONS, count, TILE * STEP);
    shape_tiles(&shapes, ACTIVATIONS, WEIGHTS, count, (int)p->channels);
    shape_tiles(&shapes, WEIGHTS, TILE_REGISTERS, (int)p->channels / STEP, TILE * STEP);
    _tile_loadconfig(&shapes);
    multiply_panel(p, count);
  }
}

/* Whether tiles compute it: codes less zero points, or 128 less zero points of 8 bits, must be signed bytes. */
static int takes_tiles(const BlockWeight* w, const BlockRows* rows, int64_t first, int64_t end) {
  if (rows->count < LEAST_ROWS || !has_tiles()) return 0;
  if (w->shape.symmetric) return 1;
  U8x16 least = (U8x16){0} - 1, most = {0};
  for (int64_t at = first * w->blocks; at < end * w->blocks; at++) {
    U8x16 zeros;
    memcpy(&zeros, w->zero_points + at * TILE, sizeof zeros);
    least = __builtin_elementwise_min(least, zeros), most = __builtin_elementwise_max(most, zeros);
  }
  return w->shape.bits == 8 ? __builtin_reduce_min(least) > 0 : __builtin_reduce_max(most) < 128;
}

/* What `multiply_rows` does, by tiles. 0: there is no memory. */
static int multiply_by_tiles(const BlockWeight* w, const BlockRows* rows, int64_t first, int64_t end, float* y,
                             LaneMax* max) {
  const BlockShape* k = &w->shape;
  const int64_t most = CHUNK_CHANNELS > k->block ? smaller(CHUNK_CHANNELS / k->block, w->blocks) : 1;
  const int64_t chunks = (w->blocks + most - 1) / most, most_tiles = smaller(RUN_TILES, end - first);
  const int64_t codes = most_tiles * most * k->block * TILE, rests = most_tiles * most * TILE * STEP;
  const int64_t scales = most_tiles * most * TILE, sums = most_tiles * rows->count * TILE;
  char* memory = scratch(SCRATCH_TILES, codes + rests + (scales + sums) * sizeof(float));
  if (!memory) return 0;
  const int64_t groups = (rows->count + TILE_ROWS - 1) / TILE_ROWS, bytes = tile_bytes(k);
  for (int64_t begin = first; begin < end; begin += RUN_TILES) {
    const int64_t stop = smaller(begin + RUN_TILES, end), tiles = stop - begin;
    /* The next run, or that of another part, is prefetched in as many portions as there are products. */
    const int64_t portions = groups * tiles * w->blocks;
    const int64_t left = stop < end ? end - stop : smaller(end - first, w->tiles + w->after - stop);
    const int64_t next = smaller(RUN_TILES, left);
    const char* from = (const char*)w->codes + stop * bytes;
    Ahead ahead = {from, from + next * bytes, (next * bytes / 64 + portions - 1) / portions};
    for (int64_t c = 0; c < chunks; c++) {
      const int64_t block = w->blocks * c / chunks, blocks = w->blocks * (c + 1) / chunks - block;
      int8_t *to_codes = (int8_t*)memory, *to_rests = to_codes + codes;
      float* to_scales = (float*)(to_rests + rests);
      for (int64_t t = 0; t < tiles; t++)
        unpack(w, to_codes + t * blocks * k->block * TILE, to_rests + t * blocks * TILE * STEP,
               to_scales + t * blocks * TILE, begin + t, block, block + blocks);
      Panel p = {.w = w, .rows = rows, .tile = begin, .tiles = tiles, .block = block, .blocks = blocks};
      p.codes = to_codes, p.rests = k->bits == 8 && !k->symmetric ? to_rests : NULL;
      p.scales = to_scales, p.sums = to_scales + scales, p.y = y, p.max = max, p.ahead = &ahead;
      /* As many as a register has, or what divides a block. */
      p.channels = smaller(k->block & -k->block, TILE_ROW_BYTES);
      pass_groups(&p, groups);
    }
  }
  _tile_release();
  release_scratch(SCRATCH_TILES);
  return 1;
}
#endif

/* Each group of rows passes a run of tiles before the next group does, so its activations stay in the first-level cache and
   the weights in the second. The next run is prefetched meanwhile, some lines with each block: without this, memory is idle
   while rows are computed. Where all rows are one group, memory is read in one stream and prefetched two pages ahead. The
   processor's own prefetching stops at the end of a page, and the fewer bits a weight has, the fewer bytes its window of
   instructions reaches beyond it. */
void multiply_rows(const BlockWeight* w, const BlockRows* rows, int64_t first, int64_t end, float* y, LaneMax* max) {
#if AMX
  if (takes_tiles(w, rows, first, end) && multiply_by_tiles(w, rows, first, end, y, max)) return;
#endif
  const int64_t width = rows->count > GROUP ? WIDE : 1, largest = GROUP / width;
  const int64_t groups = (rows->count + largest - 1) / largest, bytes = tile_bytes(&w->shape);
  const int64_t most = RUN_BYTES > width * bytes ? RUN_BYTES / (width * bytes) * width : width;
  for (int64_t begin = first; begin < end; begin += most) {
    const int64_t stop = smaller(begin + most, end);
    /* The run after this one may be the first of another part. It is prefetched in as many portions as this run has blocks. */
    const int64_t left = stop < end ? end - stop : smaller(end - first, w->tiles + w->after - stop);
    const int64_t next = smaller(most, left), portions = groups * w->blocks * (stop - begin) / width;
    const char* from = (const char*)w->codes + stop * bytes;
    Ahead ahead = {from, from + next * bytes, (next * bytes / 64 + portions - 1) / portions};
    for (int64_t g = 0; g < groups; g++) {
      const int64_t row = rows->count * g / groups;
      const int count = (int)(rows->count * (g + 1) / groups - row);
      for (int64_t tile = begin; tile < stop; tile += width)
        multiply_group(w, rows, y, max, groups > 1 ? &ahead : NULL, tile, width, row, count);
    }
  }
}
