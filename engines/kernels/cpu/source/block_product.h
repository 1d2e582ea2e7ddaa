/* Products of activations in int8 with a weight in blocks of codes: what linears and experts over codes compute.

   Activations are quantized for each row and block on its own, as MatMulNBits does at accuracy level 4
   (quantization/reference.py, round_activations). Products are summed in integers within a block and in float across
   blocks, in their order. Rows share nothing, so a result does not depend on what other rows there are.

   Names: N output channels, K input channels, B blocks of K (K / block); tiles and steps as in codes.h. N is padded to pairs
   of tiles. */
#ifndef TAPEOUT_BLOCK_PRODUCT_H
#define TAPEOUT_BLOCK_PRODUCT_H

#include "codes.h"
#include "ort.h"
#include "vector.h"

/* Fewer activations than this are quantized by the calling thread: waking another takes as long as a few thousand. */
enum { PARALLEL_ACTIVATIONS = 1 << 13 };
/* Work is cut into parts for the threads: at least PARTS if there are so many pairs of tiles, and more where a part would
   have more than PART_BYTES of weights, which take about ten microseconds to read. */
enum { PARTS = 64, PART_BYTES = 1 << 18 };
/* With 255 * 127 a product and 128 * 127 an offset, sums over a block of 2^15 channels fit 32 bits. */
enum { LARGEST_BLOCK = 1 << 15 };
/* The sums of GROUP rows and one tile are held in registers, or of GROUP / WIDE rows and WIDE tiles, where rows are several
   groups. Of more than WHOLE rows they are those of half a tile. At least CHAINS sums do not depend on each other, so few rows
   have several each. */
#if AVX512
enum { GROUP = 12, WIDE = 2, CHAINS = 4 };
#elif HALVES
enum { GROUP = 8, WHOLE = 4, WIDE = 1, CHAINS = 1 };
#else
enum { GROUP = 4, WIDE = 1, CHAINS = 1 };
#endif

/* What a node says of a weight. `e2m1`: its codes of 4 bits are floats, and its scales bytes. */
typedef struct {
  int64_t N, K, block, bits, half_scales, symmetric, e2m1;
} BlockShape;

/* A weight, or some tiles of one: `after` more tiles follow in memory. */
typedef struct {
  BlockShape shape;
  int64_t blocks, tiles, after;
  const uint8_t* codes;
  const uint8_t* scales;      /* [tiles, B, 16], of `scale_bytes` each */
  const uint8_t* zero_points; /* likewise, or NULL: all are the midpoint */
  const float* bias;          /* [N], or NULL */
} BlockWeight;

/* Quantized activations of `count` rows. Scales and sums of a block lie `stride` after those of the block before. */
typedef struct {
  int64_t count, stride;
  int8_t* codes; /* [count, row_bytes(K)] */
  float* scales; /* [B, stride] */
  int32_t* sums; /* [B, stride] minus the sum of a block's codes; symmetric: times the midpoint of the weights */
} BlockRows;

/* The largest outputs of a row so far, in each lane of its tiles, and their columns. */
typedef struct {
  float value[TILE];
  int32_t column[TILE];
} LaneMax;

static inline int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* Of the codes of a row. An odd number of cache lines: at an even one, such as 2,048 / 64, rows take turns in the same few
   sets of the first-level cache, and eight of them leave no room for weights. */
static inline int64_t row_bytes(int64_t K) {
  return ((K + 63) / 64 | 1) * 64;
}
/* Of a row with its scales and sums. */
static inline int64_t rows_bytes(const BlockShape* s, int64_t count) {
  return count * (row_bytes(s->K) + 8 * (s->K / s->block));
}
/* Rows in `memory` of so many bytes. */
static inline BlockRows rows_in(void* memory, const BlockShape* s, int64_t count) {
  float* scales = (float*)((char*)memory + count * row_bytes(s->K));
  return (BlockRows){count, count, memory, scales, (int32_t*)(scales + count * (s->K / s->block))};
}
/* `count` of the rows from `first` on. */
static inline BlockRows some_rows(const BlockRows* rows, int64_t K, int64_t first, int64_t count) {
  return (BlockRows){count, rows->stride, rows->codes + first * row_bytes(K), rows->scales + first, rows->sums + first};
}

static inline int64_t padded_tiles(int64_t N) {
  return (N + 2 * TILE - 1) / (2 * TILE) * 2;
}
static inline int64_t tile_bytes(const BlockShape* s) {
  return TILE * s->K * s->bits / 8;
}
static inline int64_t scale_bytes(const BlockShape* s) {
  return s->e2m1 ? 1 : s->half_scales ? 2 : 4;
}
static inline int scale_type(const BlockShape* s) {
  return s->e2m1 ? UINT8 : s->half_scales ? HALF : FLOAT;
}
/* Whether there are kernels for the weight. */
static inline int is_supported_shape(const BlockShape* s) {
  return is_supported(s->N, s->K, s->block, s->bits) && (!s->e2m1 || (s->bits == 4 && s->symmetric));
}
static inline BlockWeight block_weight(const BlockShape* s, const Tensor* codes, const Tensor* scales,
                                       const Tensor* zero_points, const float* bias) {
  return (BlockWeight){.shape = *s,
                       .blocks = s->K / s->block,
                       .tiles = padded_tiles(s->N),
                       .codes = codes->data,
                       .scales = scales->data,
                       .zero_points = s->symmetric ? NULL : zero_points->data,
                       .bias = bias};
}
/* Whether the tensors hold scales and zero points of `copies` weights of this shape, one after another. */
static inline int is_block_grid(const BlockShape* s, int64_t copies, const Tensor* scales, const Tensor* zero_points) {
  const int64_t count = copies * padded_tiles(s->N) * TILE * (s->K / s->block);
  return holds(scales, scale_type(s), count) && (s->symmetric || holds(zero_points, UINT8, count));
}
/* The same with their codes. */
static inline int is_block_weight(const BlockShape* s, int64_t copies, const Tensor* codes, const Tensor* scales,
                                  const Tensor* zero_points) {
  return holds(codes, UINT8, copies * padded_tiles(s->N) * tile_bytes(s)) &&
         is_block_grid(s, copies, scales, zero_points);
}
/* Tiles `first` to `end` of a weight, as one. */
static inline BlockWeight some_tiles(const BlockWeight* w, int64_t first, int64_t end) {
  BlockWeight part = *w;
  const int64_t at = first * w->blocks * TILE, left = w->shape.N - first * TILE;
  part.shape.N = smaller(left, (end - first) * TILE);
  part.tiles = end - first, part.after = w->tiles + w->after - end;
  part.codes += first * tile_bytes(&w->shape), part.scales += at * scale_bytes(&w->shape);
  if (part.zero_points) part.zero_points += at;
  if (part.bias) part.bias += first * TILE;
  return part;
}

/* Codes, scales and sums of a row of K activations, for this weight. The sums of a symmetric one depend on its bits: they are
   those of a weight that is not, times `sum_factor`. */
int32_t sum_factor(const BlockShape* s);
void quantize_row(const BlockWeight* w, const BlockRows* rows, int64_t row, const float* x);

/* Tiles `first` to `end` for all rows: to y [rows, N], or into the largest of each row. */
void multiply_rows(const BlockWeight* w, const BlockRows* rows, int64_t first, int64_t end, float* y, LaneMax* max);

#endif
