/* ChooseExperts: the experts of each token and their weights, from a router's logits.

     logits [.., M, E] float, bias [E] float or none; k: `chosen`
     index [M, k] int64: of the largest scores + bias, from the largest on, the first of equals first. Scores are the
       softmax of the logits (`scores` 0), the logits (1), or their sigmoids (2). Of `groups` of neighbouring experts, where
       there are several, only those `kept` are chosen from whose `best` largest sum to most
     weight [M, k] float: the scores of the chosen, of logits their softmax; `normalized`: divided by their sum and `added`,
       or by `least` where that is more; times `factor`

   A row of NaN gets some experts, each once, and weights that are NaN. */
#include "ort.h"
#include "vector.h"

#include <math.h>

enum { LARGEST_E = 1 << 16, PARALLEL_LOGITS = 1 << 12 };
typedef enum { SOFTMAX, OF_CHOSEN, SIGMOID, SCORES } Scores; /* as engines/passes/onnxruntime/routers.py has them */

typedef struct {
  Base base;
  int64_t chosen, groups, kept, best;
  Scores scores;
  int normalized;
  float added, least, factor;
  Tensor bias;
} Kernel;

typedef struct {
  const Kernel* k;
  int64_t E;
  const float *logits, *bias;
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

static void to_sigmoids(float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    const F32x16 logits = load(x + i);
    store(x + i, blend(visnan(logits), splat(NAN), sigmoid(logits)));
  }
}

static void choose(const float* x, int64_t count, int64_t chosen, int64_t* index) {
  for (int64_t c = 0; c < chosen; c++) {
    int64_t best = -1;
    for (int64_t e = 0; e < count; e++) {
      int taken = 0;
      for (int64_t i = 0; i < c; i++) taken |= index[i] == e;
      if (!taken && (best < 0 || x[e] > x[best])) best = e;
    }
    index[c] = best;
  }
}

/* Leaves `kept` groups to choose from. `index`, `sums`: memory for as many numbers as there are experts. */
static void keep_groups(const Kernel* k, float* x, int64_t E, int64_t* index, float* sums) {
  const int64_t size = E / k->groups;
  for (int64_t g = 0; g < k->groups; g++) {
    choose(x + g * size, size, k->best, index);
    sums[g] = 0;
    for (int64_t i = 0; i < k->best; i++) sums[g] += x[g * size + index[i]];
  }
  choose(sums, k->groups, k->kept, index);
  for (int64_t g = 0; g < k->groups; g++) {
    int is_kept = 0;
    for (int64_t i = 0; i < k->kept; i++) is_kept |= index[i] == g;
    for (int64_t e = g * size; e < (g + 1) * size && !is_kept; e++) x[e] = -INFINITY;
  }
}

static void choose_of_token(void* state, size_t token) {
  Work* w = state;
  const Kernel* k = w->k;
  const int64_t E = w->E, chosen = k->chosen, padded = (E + LANES - 1) / LANES * LANES;
  float* x = scratch(SCRATCH_ROW, 5 * padded * sizeof(float));
  if (!x) {
    w->out_of_memory = 1;
    return;
  }
  float *values = x + padded, *by = values + padded;
  int64_t* in_group = (int64_t*)(by + padded);
  memset(x, 0, 3 * padded * sizeof(float));
  memcpy(x, w->logits + (int64_t)token * E, E * sizeof(float));
  int64_t* index = w->index + (int64_t)token * chosen;
  if (k->scores == SOFTMAX) soften(x, E);
  if (k->scores == SIGMOID) to_sigmoids(x, E);
  for (int64_t e = 0; e < E; e++) by[e] = w->bias ? x[e] + w->bias[e] : x[e];
  if (k->groups > 1) keep_groups(k, by, E, in_group, values);
  choose(by, E, chosen, index);
  memset(values, 0, padded * sizeof(float));
  for (int64_t c = 0; c < chosen; c++) values[c] = x[index[c]];
  if (k->scores == OF_CHOSEN) soften(values, chosen);
  if (k->normalized) {
    float sum = k->added;
    for (int64_t c = 0; c < chosen; c++) sum += values[c];
    if (sum < k->least) sum = k->least;
    for (int64_t c = 0; c < chosen; c++) values[c] /= sum;
  }
  float* weight = w->weight + (int64_t)token * chosen;
  for (int64_t c = 0; c < chosen; c++) weight[c] = values[c] * k->factor;
  release_scratch(SCRATCH_ROW);
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  Tensor logits, bias;
  TRY(input(api, context, 0, NULL, &logits));
  TRY(input(api, context, 1, &k->bias, &bias));
  const int64_t E = logits.present && logits.rank ? logits.dims[logits.rank - 1] : 0;
  if (logits.type != FLOAT || E < k->chosen || E > LARGEST_E)
    return failure(api, ERROR_ARGUMENT,
                   "ChooseExperts: logits are not [.., M, E] float with as many experts as are chosen");
  Work w = {.k = k, .E = E, .logits = logits.data, .bias = bias.data};
  if (bias.present && !holds(&bias, FLOAT, w.E))
    return failure(api, ERROR_ARGUMENT, "ChooseExperts: the bias is not [E] float");
  if (w.E % k->groups || w.E / k->groups < k->best)
    return failure(api, ERROR_ARGUMENT, "ChooseExperts: groups of too few experts, or of different sizes");
  const int64_t tokens = logits.elements / E, dims[] = {tokens, k->chosen};
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
  int64_t scores, normalized;
  TRY(attribute_int(api, info, "chosen", &found.chosen));
  TRY(attribute_int(api, info, "scores", &scores));
  TRY(attribute_int(api, info, "normalized", &normalized));
  found.scores = (Scores)scores, found.normalized = normalized != 0;
  found.groups = optional_int(api, info, "groups", 1), found.kept = optional_int(api, info, "kept", 1);
  found.best = optional_int(api, info, "best", 1);
  found.added = optional_float(api, info, "added", 0), found.least = optional_float(api, info, "least", 0);
  found.factor = optional_float(api, info, "factor", 1);
  if (found.chosen < 1 || found.chosen > LARGEST_E || scores < 0 || scores >= SCORES)
    return failure(api, ERROR_ARGUMENT, "ChooseExperts: unsupported number of experts, or scores");
  if (found.groups < 1 || found.kept < 1 || found.kept > found.groups || found.best < 1)
    return failure(api, ERROR_ARGUMENT, "ChooseExperts: unsupported groups");
  TRY(constant_input(api, info, 1, &found.bias));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation choose_experts = {create, compute};
