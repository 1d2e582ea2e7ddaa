/* NormRows: RMSNorm of the tokens whose logits are wanted, with the residual sum before it.

     x [.., K] float, residual as x or none, weight [K] float, rows [P] int64: tokens, counted over all other axes
     y [P, K] float: of each row, (x + residual) / sqrt(mean square + epsilon) * weight */
#include "ort.h"
#include "vector.h"

#include <math.h>
#include <stdlib.h>

enum { MAX_RANK = 8 };

typedef struct {
  Base base;
  float epsilon;
  Tensor weight; /* where it is constant */
} Kernel;

typedef struct {
  int64_t K;
  float epsilon;
  const float *x, *residual, *weight;
  const int64_t* rows;
  float* y;
} Work;

static void norm_row(void* state, size_t number) {
  const Work* w = state;
  const int64_t K = w->K, at = w->rows[number] * K;
  const float *x = w->x + at, *residual = w->residual ? w->residual + at : NULL;
  float* y = w->y + (int64_t)number * K;
  F32x16 squares = {0};
  for (int64_t i = 0; i < K; i += LANES) {
    const F32x16 sum = residual ? load(x + i) + load(residual + i) : load(x + i);
    store(y + i, sum);
    squares = vfma(sum, sum, squares);
  }
  const F32x16 inverse = splat(1.0f / sqrtf(reduce_add(squares) / (float)K + w->epsilon));
  for (int64_t i = 0; i < K; i += LANES) store(y + i, load(y + i) * inverse * load(w->weight + i));
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  Tensor x, residual, weight, rows;
  TRY(input(api, context, 0, NULL, &x));
  TRY(input(api, context, 1, NULL, &residual));
  TRY(input(api, context, 2, &k->weight, &weight));
  TRY(input(api, context, 3, NULL, &rows));
  if (!x.present || x.type != FLOAT || !x.rank || x.rank > MAX_RANK || x.dims[x.rank - 1] % LANES)
    return failure(api, ERROR_ARGUMENT, "NormRows: the input is not float or its channels are no multiple of 16");
  const int64_t K = x.dims[x.rank - 1], tokens = K ? x.elements / K : 0;
  if (!holds(&weight, FLOAT, K) || (residual.present && !holds(&residual, FLOAT, x.elements)))
    return failure(api, ERROR_ARGUMENT, "NormRows: a residual or weight of another shape or type");
  if (!rows.present || rows.type != INT64 || rows.rank != 1)
    return failure(api, ERROR_ARGUMENT, "NormRows: rows are not int64 of one axis");
  Work w = {K, k->epsilon, x.data, residual.data, weight.data, rows.data, NULL};
  for (int64_t i = 0; i < rows.elements; i++)
    if (w.rows[i] < 0 || w.rows[i] >= tokens)
      return failure(api, ERROR_ARGUMENT, "NormRows: a row is outside the input");
  TRY(output(api, context, 0, (int64_t[]){rows.elements, K}, 2, &w.y));
  return rows.elements ? parallel(api, context, k->base.threads, norm_row, rows.elements, &w, NULL) : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  Kernel found = {.base = {api, threads_of(op)}, .epsilon = optional_float(api, info, "epsilon", 1e-5f)};
  if (!(found.epsilon >= 0)) return failure(api, ERROR_ARGUMENT, "NormRows: a negative epsilon");
  TRY(constant_input(api, info, 2, &found.weight));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation norm_rows = {create, compute};
