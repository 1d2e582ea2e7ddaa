/* Norm, ResidualNorm: RMSNorm of every token, ResidualNorm of a sum, which it gives as well. NormRows: of the tokens whose
   logits are wanted, with the residual sum before it. Norm may have tokens of more channels than its weight: the next are
   normalized by themselves where there is a weight for them, and what is left is copied. So are queries and keys of a
   token normalized beside its values.

     x [.., W] float, residual as x (of NormRows or none), weight [K] float, next_weight [L] float (of Norm, or none),
       rows [P] int64: tokens, counted over all other axes. W = K, but W >= K + L of Norm
     y as x, or [P, K] float: of each row, (x + residual) / sqrt(mean square + epsilon) * weight
     sum as x: x + residual */
#include "ort.h"
#include "vector.h"

#include <math.h>
#include <stdlib.h>

enum { MAX_RANK = 8 };
typedef enum { NORM_ROWS, NORM, RESIDUAL_NORM } Kind; /* as engines/kernels/operators.py declares them */

typedef struct {
  Base base;
  Kind kind;
  float epsilon;
  Tensor weight, next; /* where they are constant */
} Kernel;

typedef struct {
  int64_t W, K, L;
  float epsilon;
  const float *x, *residual, *weight, *next; /* next: where L > 0 */
  const int64_t* rows;                       /* NULL: all, in their order */
  float *y, *sum;                            /* sum: NULL where it is not asked for */
} Work;

/* K channels from `at` on. */
static void norm_part(const Work* w, int64_t at, const float* weight, int64_t K, float* y) {
  const float *x = w->x + at, *residual = w->residual ? w->residual + at : NULL;
  F32x16 squares = {0};
  for (int64_t i = 0; i < K; i += LANES) {
    const F32x16 sum = residual ? load(x + i) + load(residual + i) : load(x + i);
    store(y + i, sum);
    if (w->sum) store(w->sum + at + i, sum);
    squares = vfma(sum, sum, squares);
  }
  const F32x16 inverse = splat(1.0f / sqrtf(reduce_add(squares) / (float)K + w->epsilon));
  for (int64_t i = 0; i < K; i += LANES) store(y + i, load(y + i) * inverse * load(weight + i));
}

static void norm_row(void* state, size_t number) {
  const Work* w = state;
  const int64_t at = (w->rows ? w->rows[number] : (int64_t)number) * w->W;
  float* y = w->y + (int64_t)number * w->W;
  norm_part(w, at, w->weight, w->K, y);
  if (w->L) norm_part(w, at + w->K, w->next, w->L, y + w->K);
  for (int64_t i = w->K + w->L; i < w->W; i += LANES) store(y + i, load(w->x + at + i));
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  Tensor x, residual = {0}, weight, next = {0}, rows = {0};
  TRY(input(api, context, 0, NULL, &x));
  if (k->kind != NORM) TRY(input(api, context, 1, NULL, &residual));
  TRY(input(api, context, k->kind == NORM ? 1 : 2, &k->weight, &weight));
  if (k->kind == NORM_ROWS) TRY(input(api, context, 3, NULL, &rows));
  if (k->kind == NORM) TRY(input(api, context, 2, &k->next, &next));
  if (!x.present || x.type != FLOAT || !x.rank || x.rank > MAX_RANK || x.dims[x.rank - 1] % LANES)
    return failure(api, ERROR_ARGUMENT, "the input is not float or its channels are no multiple of 16");
  const int64_t W = x.dims[x.rank - 1], tokens = W ? x.elements / W : 0;
  const int64_t K = k->kind == NORM ? weight.elements : W, L = next.present ? next.elements : 0;
  if (!holds(&weight, FLOAT, K) || (residual.present && !holds(&residual, FLOAT, x.elements)))
    return failure(api, ERROR_ARGUMENT, "a residual or weight of another shape or type");
  if (K < 1 || K % LANES || L % LANES || K > W || L > W - K || (next.present && (next.type != FLOAT || !L)))
    return failure(api, ERROR_ARGUMENT,
                   "the weights are not float or not of the input's first channels, in multiples of 16");
  if (k->kind == RESIDUAL_NORM && !residual.present)
    return failure(api, ERROR_ARGUMENT, "ResidualNorm: there is nothing to add");
  Work w = {.W = W, .K = K, .L = L, .epsilon = k->epsilon, .x = x.data, .residual = residual.data};
  w.weight = weight.data, w.next = next.data;
  int64_t count = tokens;
  if (k->kind == NORM_ROWS) {
    if (!rows.present || rows.type != INT64 || rows.rank != 1)
      return failure(api, ERROR_ARGUMENT, "NormRows: rows are not int64 of one axis");
    w.rows = rows.data, count = rows.elements;
    for (int64_t i = 0; i < count; i++)
      if (w.rows[i] < 0 || w.rows[i] >= tokens)
        return failure(api, ERROR_ARGUMENT, "NormRows: a row is outside the input");
    TRY(output(api, context, 0, (int64_t[]){count, K}, 2, &w.y));
  } else
    TRY(output(api, context, 0, x.dims, x.rank, &w.y));
  if (k->kind == RESIDUAL_NORM) TRY(output(api, context, 1, x.dims, x.rank, &w.sum));
  return count ? parallel(api, context, k->base.threads, norm_row, (size_t)count, &w, NULL) : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  Kernel found = {.base = {api, threads_of(op)}, .kind = (Kind)declaration_of(op)->variant};
  found.epsilon = optional_float(api, info, "epsilon", 1e-5f);
  if (!(found.epsilon >= 0)) return failure(api, ERROR_ARGUMENT, "a negative epsilon");
  TRY(constant_input(api, info, found.kind == NORM ? 1 : 2, &found.weight));
  if (found.kind == NORM) TRY(constant_input(api, info, 2, &found.next));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation norm_rows = {create, compute};
