/* Experts: the experts of a mixture that each token was given, weighted and added up.

     x [.., M, H] float, index [M, k] int64 of the experts of a token, weight [M, k] float
     up [E, U, H, 16] float: tiles of 16 inner channels, first those of the gates, then those of the ups, where there are
       gates: U is twice the tiles of I, or those of I; up_bias [E, U, 16] or none
     down [E, D, I, 16] float, D tiles of H; down_bias [E, D, 16] or none
     y as x: the sum over a token's experts, in the order of its choices, of weight * (down · inner + bias), where inner is
       activation(min(gate, limit)) * (clip(up, -limit, limit) + offset), or activation(min(up, limit)) without a gate

   The tokens of a step are grouped by expert, so that the weights of an expert are read once. A sum over channels begins at
   the bias and takes them in their order, whatever other tokens there are: a token's bits depend on nothing else. */
#include "experts.h"
#include "float_tiles.h"

enum { MAX_RANK = 8, AT_ONCE = 4 /* tiles of a job */ };

typedef struct {
  Base base;
  ExpertGate gate;
  Tensor up, down, up_bias, down_bias; /* where they are constant */
} Kernel;

typedef struct {
  const Kernel* k;
  Routing routing;
  int64_t H, I;
  int64_t up_tiles, inner_tiles, hidden_tiles; /* `up_tiles`: of gates and ups */
  int64_t up_jobs, down_jobs;                  /* of an expert */
  const float *x, *up, *down, *up_bias, *down_bias, *weight;
  float *inner, *answers, *y; /* inner [pairs, I], answers [pairs, H], whole tiles each */
} Work;

static F32x16 bias_of(const float* biases, int64_t tile) {
  return biases ? load(biases + tile * LANES) : splat(0);
}

/* Some inner channels of one expert, for all its tokens. */
static void up_job(void* state, size_t number) {
  const Work* w = state;
  const Routing* r = &w->routing;
  const int64_t expert = r->hits[(int64_t)number / w->up_jobs], first = (int64_t)number % w->up_jobs * AT_ONCE;
  const int64_t end = first + AT_ONCE < w->inner_tiles ? first + AT_ONCE : w->inner_tiles, K = w->H;
  for (int64_t tile = first; tile < end; tile++) {
    const int64_t gates = expert * w->up_tiles + tile, ups = gates + w->inner_tiles;
    for (int64_t at = r->begins[expert]; at < r->begins[expert + 1]; at += ROWS) {
      const int64_t left = r->begins[expert + 1] - at, count = left < ROWS ? left : ROWS;
      const float* rows[ROWS];
      F32x16 gate[ROWS], up[ROWS];
      for (int64_t t = 0; t < count; t++) rows[t] = w->x + r->order[at + t] / r->chosen * K;
      multiply(w->up + gates * K * LANES, rows, K, bias_of(w->up_bias, gates), gate, count);
      if (w->up_tiles > w->inner_tiles) multiply(w->up + ups * K * LANES, rows, K, bias_of(w->up_bias, ups), up, count);
      for (int64_t t = 0; t < count; t++) {
        const F32x16 y =
            w->up_tiles > w->inner_tiles ? gated(&w->k->gate, gate[t], up[t]) : activated(&w->k->gate, gate[t]);
        store(w->inner + (r->order[at + t] * w->inner_tiles + tile) * LANES, y);
      }
    }
  }
}

/* Some output channels of one expert, for all its tokens. */
static void down_job(void* state, size_t number) {
  const Work* w = state;
  const Routing* r = &w->routing;
  const int64_t expert = r->hits[(int64_t)number / w->down_jobs], first = (int64_t)number % w->down_jobs * AT_ONCE;
  const int64_t end = first + AT_ONCE < w->hidden_tiles ? first + AT_ONCE : w->hidden_tiles, K = w->I;
  for (int64_t tile = first; tile < end; tile++) {
    const int64_t place = expert * w->hidden_tiles + tile;
    for (int64_t at = r->begins[expert]; at < r->begins[expert + 1]; at += ROWS) {
      const int64_t left = r->begins[expert + 1] - at, count = left < ROWS ? left : ROWS;
      const float* rows[ROWS];
      F32x16 sums[ROWS];
      for (int64_t t = 0; t < count; t++) rows[t] = w->inner + r->order[at + t] * w->inner_tiles * LANES;
      multiply(w->down + place * K * LANES, rows, K, bias_of(w->down_bias, place), sums, count);
      for (int64_t t = 0; t < count; t++)
        store(w->answers + (r->order[at + t] * w->hidden_tiles + tile) * LANES, sums[t]);
    }
  }
}

static void add_job(void* state, size_t token) {
  const Work* w = state;
  for (int64_t tile = 0; tile < w->hidden_tiles; tile++) {
    const int64_t begin = tile * LANES, count = w->H - begin < LANES ? w->H - begin : LANES;
    F32x16 sum = {0};
    for (int64_t choice = 0; choice < w->routing.chosen; choice++) {
      const int64_t pair = (int64_t)token * w->routing.chosen + choice;
      sum = vfma(splat(w->weight[pair]), load(w->answers + pair * w->hidden_tiles * LANES + begin), sum);
    }
    memcpy(w->y + (int64_t)token * w->H + begin, &sum, count * sizeof(float));
  }
}

static Status* run(Work* w, Api api, Context* context) {
  const int64_t pairs = w->routing.tokens * w->routing.chosen, numbers = routing_numbers(&w->routing);
  const size_t floats = pairs * (w->inner_tiles + w->hidden_tiles) * LANES;
  float* memory = scratch(SCRATCH_EXPERTS, floats * sizeof(float) + numbers * sizeof(int64_t));
  if (!memory) return failure(api, ERROR_FAIL, "Experts: out of memory");
  w->inner = memory, w->answers = memory + pairs * w->inner_tiles * LANES;
  Threads* threads = w->k->base.threads;
  Status* status = NULL;
  if (!route(&w->routing, (int64_t*)(memory + floats)))
    status = failure(api, ERROR_ARGUMENT, "Experts: an index is of no expert");
  if (!status) status = parallel(api, context, threads, up_job, w->routing.hit * w->up_jobs, w, NULL);
  if (!status) status = parallel(api, context, threads, down_job, w->routing.hit * w->down_jobs, w, NULL);
  if (!status) status = parallel(api, context, threads, add_job, w->routing.tokens, w, NULL);
  release_scratch(SCRATCH_EXPERTS);
  return status;
}

/* Whether a weight is [E, tiles, K, 16]. */
static int is_tiled(const Tensor* t, int64_t experts, int64_t K) {
  return t->present && t->type == FLOAT && t->rank == 4 && t->dims[0] == experts && t->dims[2] == K &&
         t->dims[3] == LANES;
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  Tensor x, index, weight, up, down, up_bias, down_bias;
  TRY(input(api, context, 0, NULL, &x));
  TRY(input(api, context, 1, NULL, &index));
  TRY(input(api, context, 2, NULL, &weight));
  TRY(input(api, context, 3, &k->up, &up));
  TRY(input(api, context, 4, &k->down, &down));
  TRY(input(api, context, 5, &k->up_bias, &up_bias));
  TRY(input(api, context, 6, &k->down_bias, &down_bias));
  if (!x.present || x.type != FLOAT || x.rank < 2 || x.rank > MAX_RANK || !x.dims[x.rank - 1])
    return failure(api, ERROR_ARGUMENT, "Experts: x is not [.., M, H] float");
  Work w = {.k = k, .H = x.dims[x.rank - 1], .x = x.data, .up = up.data, .down = down.data};
  Routing* r = &w.routing;
  r->tokens = x.elements / w.H;
  if (!up.present || up.rank != 4 || !down.present || down.rank != 4)
    return failure(api, ERROR_ARGUMENT, "Experts: weights are not [E, tiles, channels, 16]");
  r->experts = up.dims[0], w.I = down.dims[2], w.up_tiles = up.dims[1];
  w.inner_tiles = (w.I + LANES - 1) / LANES, w.hidden_tiles = (w.H + LANES - 1) / LANES;
  if (!w.I || !r->experts || !is_tiled(&up, r->experts, w.H) || !is_tiled(&down, r->experts, w.I) ||
      down.dims[1] != w.hidden_tiles || (w.up_tiles != w.inner_tiles && w.up_tiles != 2 * w.inner_tiles))
    return failure(api, ERROR_ARGUMENT, "Experts: weights do not fit x, or each other");
  if ((up_bias.present && !holds(&up_bias, FLOAT, r->experts * w.up_tiles * LANES)) ||
      (down_bias.present && !holds(&down_bias, FLOAT, r->experts * w.hidden_tiles * LANES)))
    return failure(api, ERROR_ARGUMENT, "Experts: a bias does not fit its weight");
  if (!index.present || index.type != INT64 || index.rank != 2 || index.dims[0] != r->tokens ||
      !holds(&weight, FLOAT, index.elements))
    return failure(api, ERROR_ARGUMENT, "Experts: index is not [M, k] int64, or weight not [M, k] float");
  r->chosen = index.dims[1], r->index = index.data, w.weight = weight.data;
  w.up_bias = up_bias.data, w.down_bias = down_bias.data;
  w.up_jobs = (w.inner_tiles + AT_ONCE - 1) / AT_ONCE, w.down_jobs = (w.hidden_tiles + AT_ONCE - 1) / AT_ONCE;
  TRY(output(api, context, 0, x.dims, x.rank, &w.y));
  if (!r->tokens) return NULL;
  if (!r->chosen) return failure(api, ERROR_ARGUMENT, "Experts: no expert of a token");
  return run(&w, api, context);
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  Kernel found = {.base = {api, threads_of(op)}};
  TRY(read_gate(api, info, &found.gate));
  TRY(constant_input(api, info, 3, &found.up));
  TRY(constant_input(api, info, 4, &found.down));
  TRY(constant_input(api, info, 5, &found.up_bias));
  TRY(constant_input(api, info, 6, &found.down_bias));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation experts = {create, compute};
