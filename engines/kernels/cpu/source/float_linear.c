/* FloatLinear: a small linear in float whose bits depend on nothing but the row, such as a router of experts.

     x [.., K] float, weight [tiles, K, 16] float: tiles of 16 outputs, bias [N] or none
     y [.., N] float */
#include "float_tiles.h"
#include "ort.h"

enum { MAX_RANK = 8, LARGEST_N = 1 << 24 };

typedef struct {
  Base base;
  int64_t N;
  Tensor weight, bias; /* where they are constant */
} Kernel;

typedef struct {
  int64_t M, N, K;
  const float *x, *weight, *bias;
  float* y;
} Work;

/* One tile for all rows. */
static void tile_job(void* state, size_t tile) {
  const Work* w = state;
  const int64_t column = (int64_t)tile * LANES, left = w->N - column, lanes = left < LANES ? left : LANES;
  const F32x16 bias = w->bias ? load_first(w->bias + column, lanes) : splat(0);
  for (int64_t at = 0; at < w->M; at += ROWS) {
    const int64_t count = w->M - at < ROWS ? w->M - at : ROWS;
    const float* rows[ROWS];
    F32x16 sums[ROWS];
    for (int64_t t = 0; t < count; t++) rows[t] = w->x + (at + t) * w->K;
    multiply(w->weight + column * w->K, rows, w->K, bias, sums, count);
    for (int64_t t = 0; t < count; t++) store_first(w->y + (at + t) * w->N + column, sums[t], lanes);
  }
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  Tensor x, weight, bias;
  TRY(input(api, context, 0, NULL, &x));
  TRY(input(api, context, 1, &k->weight, &weight));
  TRY(input(api, context, 2, &k->bias, &bias));
  if (!x.present || x.type != FLOAT || !x.rank || x.rank > MAX_RANK || !x.dims[x.rank - 1])
    return failure(api, ERROR_ARGUMENT, "FloatLinear: x is not [.., K] float");
  const int64_t K = x.dims[x.rank - 1], tiles = (k->N + LANES - 1) / LANES;
  if (!weight.present || weight.type != FLOAT || weight.rank != 3 || weight.dims[0] != tiles || weight.dims[1] != K ||
      weight.dims[2] != LANES || (bias.present && !holds(&bias, FLOAT, k->N)))
    return failure(api, ERROR_ARGUMENT, "FloatLinear: a weight or bias of another shape or type");
  Work w = {.M = x.elements / K, .N = k->N, .K = K, .x = x.data, .weight = weight.data, .bias = bias.data};
  int64_t dims[MAX_RANK];
  for (size_t i = 0; i < x.rank; i++) dims[i] = x.dims[i];
  dims[x.rank - 1] = k->N;
  TRY(output(api, context, 0, dims, x.rank, &w.y));
  return w.M ? parallel(api, context, k->base.threads, tile_job, (size_t)tiles, &w, NULL) : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  Kernel found = {.base = {api, threads_of(op)}};
  TRY(attribute_int(api, info, "N", &found.N));
  if (found.N < 1 || found.N > LARGEST_N) return failure(api, ERROR_ARGUMENT, "FloatLinear: unsupported N");
  TRY(constant_input(api, info, 1, &found.weight));
  TRY(constant_input(api, info, 2, &found.bias));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation float_linear = {create, compute};
