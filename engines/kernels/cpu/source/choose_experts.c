/* ChooseExperts: the experts of each token and their weights, from a router's logits.

     logits [M, E] float; k: `chosen`
     index [M, k] int64: of the largest logits, from the largest on, the first of equals first
     weight [M, k] float: of the softmax over all logits; `normalized`: divided by its sum; or, with `after`, of the softmax
       over the chosen ones

   A row of NaN gets some experts, each once, and weights that are NaN. */
#include "ort.h"
#include "vector.h"

#include <math.h>

enum { LARGEST_E = 1 << 16, PARALLEL_LOGITS = 1 << 12 };

typedef struct {
  Base base;
  int64_t chosen, normalized, after;
} Kernel;

typedef struct {
  const Kernel* k;
  int64_t E;
  const float* logits;
  int64_t* index;
  float* weight;
  _Atomic int out_of_memory;
} Work;

/* Softmax of `count` logits, in place; memory for whole vectors. */
static void soften(float* x, int64_t count) {
  float largest = -INFINITY;
  for (int64_t i = 0; i < count; i++) largest = x[i] > largest ? x[i] : largest;
  F32x16 sum = {0};
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t lanes = count - i < LANES ? count - i : LANES;
    const F32x16 logits = load(x + i), exact = vexp(logits - splat(largest));
    /* vexp clamps, and drops NaN */
    F32x16 shares = blend(visnan(logits - splat(largest)), splat(NAN), exact);
    shares = blend(first_lanes(lanes), shares, splat(0));
    store(x + i, shares);
    sum += shares;
  }
  const F32x16 total = splat(reduce_add(sum));
  for (int64_t i = 0; i < count; i += LANES) store(x + i, load(x + i) / total);
}

static void choose(const float* x, int64_t E, int64_t chosen, int64_t* index, float* values) {
  for (int64_t c = 0; c < chosen; c++) {
    int64_t best = -1;
    for (int64_t e = 0; e < E; e++) {
      int taken = 0;
      for (int64_t i = 0; i < c; i++) taken |= index[i] == e;
      if (!taken && (best < 0 || x[e] > x[best])) best = e;
    }
    index[c] = best, values[c] = x[best];
  }
}

static void choose_of_token(void* state, size_t token) {
  Work* w = state;
  const Kernel* k = w->k;
  const int64_t E = w->E, chosen = k->chosen, padded = (E + LANES - 1) / LANES * LANES;
  float* x = scratch(SCRATCH_ROW, 2 * padded * sizeof(float));
  if (!x) {
    w->out_of_memory = 1;
    return;
  }
  float* values = x + padded;
  memset(x, 0, 2 * padded * sizeof(float));
  memcpy(x, w->logits + (int64_t)token * E, E * sizeof(float));
  int64_t* index = w->index + (int64_t)token * chosen;
  if (!k->after) soften(x, E);
  choose(x, E, chosen, index, values);
  if (k->after) soften(values, chosen);
  if (k->normalized) {
    float sum = 0;
    for (int64_t c = 0; c < chosen; c++) sum += values[c];
    for (int64_t c = 0; c < chosen; c++) values[c] /= sum;
  }
  memcpy(w->weight + (int64_t)token * chosen, values, chosen * sizeof(float));
  release_scratch(SCRATCH_ROW);
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  Tensor logits;
  TRY(input(api, context, 0, NULL, &logits));
  if (!logits.present || logits.type != FLOAT || logits.rank != 2 || logits.dims[1] < k->chosen ||
      logits.dims[1] > LARGEST_E)
    return failure(api, ERROR_ARGUMENT,
                   "ChooseExperts: logits are not [M, E] float with as many experts as are chosen");
  Work w = {.k = k, .E = logits.dims[1], .logits = logits.data};
  const int64_t tokens = logits.dims[0], dims[] = {tokens, k->chosen};
  TRY(output(api, context, 0, dims, 2, &w.index));
  TRY(output(api, context, 1, dims, 2, &w.weight));
  if (tokens * w.E < PARALLEL_LOGITS)
    for (int64_t token = 0; token < tokens; token++) choose_of_token(&w, (size_t)token);
  else
    TRY(parallel(api, context, k->base.threads, choose_of_token, (size_t)tokens, &w, NULL));
  return w.out_of_memory ? failure(api, ERROR_FAIL, "ChooseExperts: out of memory") : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  Kernel found = {.base = {api, threads_of(op)}};
  TRY(attribute_int(api, info, "chosen", &found.chosen));
  TRY(attribute_int(api, info, "normalized", &found.normalized));
  TRY(attribute_int(api, info, "after", &found.after));
  if (found.chosen < 1 || found.chosen > LARGEST_E)
    return failure(api, ERROR_ARGUMENT, "ChooseExperts: unsupported number of experts");
  return keep_kernel(&found, sizeof found, self);
}

const Implementation choose_experts = {create, compute};
