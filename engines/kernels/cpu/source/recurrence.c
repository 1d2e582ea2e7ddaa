/* Recurrences over a matrix for each head, whose state is a row of a pool: GatedDelta, the gated delta rule of Qwen3.5,
   and SelectiveScan, that of Mamba2, which corrects nothing and takes queries and keys as they are.

     value [.., M, H, V] float: the tokens of all sequences, one sequence after the other
     query, key [.., M, G, K] float: each of the G heads serves H / G heads of values
     decay [.., M, H] float: the logarithm of what the state is multiplied by
     beta [.., M, H] float, of GatedDelta: how much of an error a token corrects
     state [slots, H, K, V] float: after the tokens before; written in place
     offsets [B + 1] int32: the first token of each sequence; starts [B] int32: its position, at 0 the state is zeros
     slots [B] int32: the row of each sequence
     y as value: query . state, where first state = exp(decay) * state, then state += key x change with
       GatedDelta: change = beta * (value - key . state); query and key are divided by their norm, query by sqrt(K) too
       SelectiveScan: change = value

   A job computes some columns of one head's matrix, token by token: no sum depends on how a text was cut, on what else
   is in the step, or on threads. */
#include "ort.h"
#include "vector.h"

typedef enum { DELTA, SCAN } Rule; /* variants, in the order of declarations */
enum { AT_ONCE = 4 /* vectors of columns */, COLUMNS = AT_ONCE * LANES, MOST_RANK = 8 };

typedef struct {
  Base base;
  Rule rule;
} Kernel;

typedef struct {
  Rule rule;
  int64_t H, G, K, V, jobs; /* jobs of a head */
  const float *value, *query, *key, *decay, *beta;
  float *state, *y;
  const int32_t *offsets, *starts, *slots;
} Work;

/* `count` floats, LANES of them or fewer; the others are zeros. */
INLINE F32x16 load_some(const float* from, int64_t count) {
  F32x16 x = {0};
  if (count == LANES) return load(from);
  memcpy(&x, from, count * sizeof(float));
  return x;
}
INLINE void store_some(float* to, F32x16 x, int64_t count) {
  if (count == LANES)
    store(to, x);
  else
    memcpy(to, &x, count * sizeof(float));
}

/* 1 / sqrt(sum of squares + 1e-6), the squares summed in one order whatever the level. */
static float reciprocal_norm(const float* x, int64_t K) {
  F32x16 sum = {0};
  float total = 0;
  for (int64_t k = 0; k < K; k += LANES) {
    F32x16 part = load_some(x + k, K - k < LANES ? K - k : LANES);
    sum = vfma(part, part, sum);
  }
  for (int64_t lane = 0; lane < LANES; lane++) total += sum[lane];
  return 1.0f / __builtin_sqrtf(total + 1e-6f);
}

/* `vectors` of columns of one head from `first` on, over the tokens of a sequence. `last`: columns of the last vector. */
INLINE void columns(const Work* w, int64_t sequence, int64_t head, int64_t first, const int vectors, int64_t last) {
  const int64_t H = w->H, G = w->G, K = w->K, V = w->V, group = head * G / H;
  float* matrix = w->state + ((w->slots[sequence] * H + head) * K) * V + first;
  if (!w->starts[sequence])
    for (int64_t k = 0; k < K; k++) memset(matrix + k * V, 0, ((vectors - 1) * LANES + last) * sizeof(float));
  for (int64_t token = w->offsets[sequence]; token < w->offsets[sequence + 1]; token++) {
    const float *query = w->query + (token * G + group) * K, *key = w->key + (token * G + group) * K;
    const int64_t at = (token * H + head) * V + first;
    const F32x16 factor = vexp(splat(w->decay[token * H + head]));
    F32x16 change[AT_ONCE], read[AT_ONCE] = {0};
    float key_scale = 1, query_scale = 1;
    EACH (int v = 0; v < vectors; v++) change[v] = load_some(w->value + at + v * LANES, v + 1 < vectors ? LANES : last);
    if (w->rule == DELTA) {
      F32x16 answer[AT_ONCE] = {0};
      key_scale = reciprocal_norm(key, K);
      query_scale = reciprocal_norm(query, K) / __builtin_sqrtf((float)K);
      for (int64_t k = 0; k < K; k++) {
        const F32x16 scaled = splat(key[k] * key_scale);
        EACH (int v = 0; v < vectors; v++) {
          F32x16 row = load_some(matrix + k * V + v * LANES, v + 1 < vectors ? LANES : last);
          answer[v] = vfma(factor * row, scaled, answer[v]);
        }
      }
      const F32x16 beta = splat(w->beta[token * H + head]);
      EACH (int v = 0; v < vectors; v++) change[v] = (change[v] - answer[v]) * beta;
    }
    for (int64_t k = 0; k < K; k++) {
      const F32x16 by_key = splat(key[k] * key_scale), by_query = splat(query[k] * query_scale);
      EACH (int v = 0; v < vectors; v++) {
        float* place = matrix + k * V + v * LANES;
        const int64_t count = v + 1 < vectors ? LANES : last;
        const F32x16 row = vfma(by_key, change[v], factor * load_some(place, count));
        read[v] = vfma(row, by_query, read[v]);
        store_some(place, row, count);
      }
    }
    EACH (int v = 0; v < vectors; v++) store_some(w->y + at + v * LANES, read[v], v + 1 < vectors ? LANES : last);
  }
}

static void columns_job(void* state, size_t number) {
  const Work* w = state;
  const int64_t first = (int64_t)number % w->jobs * COLUMNS, head = (int64_t)number / w->jobs % w->H;
  const int64_t sequence = (int64_t)number / w->jobs / w->H;
  if (w->offsets[sequence] == w->offsets[sequence + 1]) return; /* no new tokens: its state stays */
  if (first + COLUMNS <= w->V) {
    columns(w, sequence, head, first, AT_ONCE, LANES);
    return;
  }
  for (int64_t v = first; v < w->V; v += LANES) columns(w, sequence, head, v, 1, w->V - v < LANES ? w->V - v : LANES);
}

/* Whether every sequence lies within the tokens, and has a row of the state; the engine gives each its own. */
static int fits(const Work* w, int64_t sequences, int64_t tokens, int64_t rows) {
  if (w->offsets[0] || w->offsets[sequences] != tokens) return 0;
  for (int64_t b = 0; b < sequences; b++) {
    if (w->offsets[b] > w->offsets[b + 1] || w->starts[b] < 0 || w->slots[b] < 0 || w->slots[b] >= rows) return 0;
  }
  return 1;
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  const size_t after = k->rule == DELTA ? 5 : 4; /* inputs before the state */
  Tensor value, query, key, decay, beta = {0}, state, offsets, starts, slots;
  TRY(input(api, context, 0, NULL, &value));
  TRY(input(api, context, 1, NULL, &query));
  TRY(input(api, context, 2, NULL, &key));
  TRY(input(api, context, 3, NULL, &decay));
  if (k->rule == DELTA) TRY(input(api, context, 4, NULL, &beta));
  TRY(input(api, context, after, NULL, &state));
  TRY(input(api, context, after + 1, NULL, &offsets));
  TRY(input(api, context, after + 2, NULL, &starts));
  TRY(input(api, context, after + 3, NULL, &slots));
  if (!state.present || state.type != FLOAT || state.rank != 4 || state.dims[1] < 1 || state.dims[2] < 1 ||
      state.dims[3] < 1)
    return failure(api, ERROR_ARGUMENT, "a recurrence: the state is not [slots, H, K, V] float");
  const int64_t H = state.dims[1], K = state.dims[2], V = state.dims[3], sequences = starts.elements;
  if (!value.present || value.type != FLOAT || value.rank < 3 || value.rank > MOST_RANK ||
      value.dims[value.rank - 2] != H || value.dims[value.rank - 1] != V)
    return failure(api, ERROR_ARGUMENT, "a recurrence: values are not [.., M, H, V] float");
  const int64_t tokens = value.elements / (H * V);
  if (!query.present || query.type != FLOAT || query.rank < 3 || query.dims[query.rank - 1] != K ||
      query.dims[query.rank - 2] < 1 || H % query.dims[query.rank - 2] ||
      query.elements != tokens * query.dims[query.rank - 2] * K || !holds(&key, FLOAT, query.elements))
    return failure(api, ERROR_ARGUMENT, "a recurrence: queries or keys are not [.., M, G, K] float, where G divides H");
  if (!holds(&decay, FLOAT, tokens * H) || (k->rule == DELTA && !holds(&beta, FLOAT, tokens * H)))
    return failure(api, ERROR_ARGUMENT, "a recurrence: decay or beta are not [.., M, H] float");
  Work w = {.rule = k->rule, .H = H, .G = query.dims[query.rank - 2], .K = K, .V = V};
  w.jobs = (V + COLUMNS - 1) / COLUMNS;
  w.value = value.data, w.query = query.data, w.key = key.data, w.decay = decay.data, w.beta = beta.data;
  w.state = state.data, w.offsets = offsets.data, w.starts = starts.data, w.slots = slots.data;
  if (!holds(&offsets, INT32, sequences + 1) || !holds(&starts, INT32, sequences) || !holds(&slots, INT32, sequences) ||
      !fits(&w, sequences, tokens, state.dims[0]))
    return failure(api, ERROR_ARGUMENT, "a recurrence: offsets, starts or slots do not fit the tokens and the state");
  TRY(output(api, context, 0, value.dims, value.rank, &w.y));
  return sequences ? parallel(api, context, k->base.threads, columns_job, sequences * H * w.jobs, &w, NULL) : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  (void)info;
  Kernel found = {.base = {api, threads_of(op)}, .rule = (Rule)declaration_of(op)->variant};
  return keep_kernel(&found, sizeof found, self);
}

const Implementation recurrence = {create, compute};
