/* BlockGather: rows of a table of codes, decoded: the token embedding, from the very bytes that a tied head multiplies.

     ids [..] int64   codes, scales, zero points: as of BlockLinear
     y [.., K] float */
#include "ort.h"

#include <immintrin.h>
#include <stdlib.h>

enum { TILE = 16, STEP = 4 };

typedef struct {
  Api api;
  int64_t N, K, block, bits, half_scales;
} Kernel;

typedef struct {
  const Kernel* kernel;
  const int64_t* ids;
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zeros;
  float* y;
} Work;

static int code_at(const uint8_t* tile, int64_t lane, int64_t k, int bits) {
  int64_t step = k / STEP, byte = lane * STEP + k % STEP;
  if (bits == 8) return tile[64 * step + byte];
  if (bits == 4) return tile[64 * (step / 2) + byte] >> (step % 2 * 4) & 15;
  const uint8_t* four = tile + 192 * (step / 4);
  int low = four[64 * (step % 4 / 2) + byte] >> (step % 2 * 4) & 15;
  int high = four[128 + byte] >> (step % 4 * 2) & 3;
  return low | high << 4;
}

static void gather(void* state, size_t row) {
  const Work* w = state;
  const Kernel* k = w->kernel;
  int64_t id = w->ids[row] < 0 ? w->ids[row] + k->N : w->ids[row], blocks = k->K / k->block;
  const uint8_t* tile = w->codes + id / TILE * (TILE * k->K * k->bits / 8);
  for (int64_t b = 0; b < blocks; b++) {
    int64_t at = (id / TILE * blocks + b) * TILE + id % TILE;
    float scale = k->half_scales ? _cvtsh_ss(((const uint16_t*)w->scales)[at]) : ((const float*)w->scales)[at];
    int zero = w->zeros ? w->zeros[at] : 1 << (k->bits - 1);
    for (int64_t i = b * k->block; i < (b + 1) * k->block; i++)
      w->y[row * k->K + i] = (float)(code_at(tile, id % TILE, i, (int)k->bits) - zero) * scale;
  }
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->api;
  int64_t dims[8], count = 1;
  const Value* ids = input(api, context, 0);
  size_t rank = dimensions(api, ids, dims, NULL);
  if (rank > 7) return failure(api, ERROR_ARGUMENT, "BlockGather: ids have more than 7 axes");
  for (size_t i = 0; i < rank; i++) count *= dims[i];
  dims[rank] = k->K;
  Work w = {.kernel = k,
            .ids = data_of(api, ids),
            .codes = data_of(api, input(api, context, 1)),
            .scales = data_of(api, input(api, context, 2)),
            .zeros = data_of(api, input(api, context, 3))};
  TRY(output(api, context, 0, dims, rank + 1, &w.y));
  for (int64_t i = 0; i < count; i++)
    if (w.ids[i] < -k->N || w.ids[i] >= k->N)
      return failure(api, ERROR_ARGUMENT, "BlockGather: an id is outside the table");
  return count ? parallel(api, context, gather, count, &w) : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  (void)op;
  Kernel* k = calloc(1, sizeof *k);
  if (!k) return failure(api, ERROR_FAIL, "BlockGather: out of memory");
  k->api = api;
  k->N = attribute_int(api, info, "N", 0);
  k->K = attribute_int(api, info, "K", 0);
  k->block = attribute_int(api, info, "block_size", 1);
  k->bits = attribute_int(api, info, "bits", 0);
  k->half_scales = attribute_int(api, info, "half_scales", 0);
  if (k->N < 1 || k->K < 1 || k->block < 1 || k->K % k->block || (k->bits != 4 && k->bits != 6 && k->bits != 8)) {
    free(k);
    return failure(api, ERROR_ARGUMENT, "BlockGather: N, K, block_size or bits it was not built for");
  }
  *self = k;
  return NULL;
}

static const char* name(const Op* op) {
  return (void)op, "BlockGather";
}
static size_t inputs(const Op* op) {
  return (void)op, 4;
}
static int input_type(const Op* op, size_t i) {
  static const int types[] = {INT64, UINT8, ANY, UINT8};
  return (void)op, types[i];
}
static int input_presence(const Op* op, size_t i) {
  return (void)op, i < 3 ? REQUIRED : OPTIONAL;
}
static int output_type(const Op* op, size_t i) {
  return (void)op, (void)i, FLOAT;
}

Op block_gather_op = OPERATOR(name, inputs, input_type, input_presence, one, output_type, create, compute);
