/* Recurrences over a matrix for each head, whose state is a row of a pool: GatedDelta, the gated delta rule of Qwen3.5
   and of Kimi Linear, and SelectiveScan, that of Mamba2, which corrects nothing and takes queries and keys as they are.

     value [.., M, W], query and key [.., M, W], decay [.., M, W], beta [.., M, W] of GatedDelta, float: the tokens of all
       sequences, one sequence after the other. Each of them is the columns from `value_first` (and so on) of its tensor:
       H heads of V values, G heads of K queries or keys, of which each serves H / G heads of values, and a number a head;
       where `by_channel`, which GatedDelta may be, K decays a head. Several may be the same tensor
     state [slots, H, K, V] float or bfloat16: after the tokens before; written in place. In bfloat16 it is rounded after
       each token, so that every cut of a text rounds alike; a token's output is read before its state is rounded. NaN
       stays NaN as arithmetic makes it
     offsets [B + 1] int32: the first token of each sequence; starts [B] int32: its position, at 0 the state is zeros
     slots [B] int32: the row of each sequence
     rate, bias, skip [H] float, each or none; bias [H K] where `by_channel`
     y [.., M, H V]: query . state, where first state = exp(decay) * state, row by row where `by_channel`, then
       state += key x change with
       GatedDelta: change = beta * (value - key . state); query and key are divided by their norm, query by sqrt(K) too
       SelectiveScan: change = value; skip * value is added to y
   beta is a number or, where `squash`, its sigmoid times `most_beta` (1 if it is not given) is taken. decay is a logarithm; or, where there is a rate, what a time
   step is made of, softplus(decay + bias) from `least_step` to `most_step`: the logarithm is rate * step, and
   SelectiveScan's change is step * value. Where there is a `least_decay`, which is negative, the logarithm is instead
   least_decay * sigmoid(rate * (decay + bias)).

   A job computes some columns of one head's matrix, token by token: no sum depends on how a text was cut, on what else
   is in the step, or on threads. */
#include "ort.h"
#include "vector.h"

#include <float.h>

typedef enum { DELTA, SCAN } Rule; /* variants, in the order of declarations */
enum { VALUE, QUERY, KEY, DECAY, BETA, PER_TOKEN };
enum { RATE, BIAS, SKIP, EXTRAS };
enum { AT_ONCE = 4 /* vectors of columns */, COLUMNS = AT_ONCE * LANES, MOST_RANK = 8 };
typedef enum { FLOATS, ROUNDED /* floats that bfloat16 holds */, BFLOATS } Form; /* of a state in memory */
enum { FEW_TOKENS = 4, MOST_COPIED = 256 * COLUMNS /* floats of the state */, MOST_KEYS = 1024 /* by channel */ };

typedef struct {
  Base base;
  Rule rule;
  int64_t groups, first[PER_TOKEN];
  int squash, by_channel;
  float least_step, most_step, least_decay, most_beta;
  Tensor constants[EXTRAS]; /* where they are */
} Kernel;

/* The columns of an input: of token t from + t * stride. */
typedef struct {
  const float* from;
  int64_t stride;
} Columns;

typedef struct {
  const Kernel* kernel;
  int64_t H, G, K, V, jobs; /* jobs of a head */
  Columns in[PER_TOKEN];
  const float *rate, *bias, *skip;
  void* state;
  int half; /* the state is in bfloat16 */
  float* y;
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

typedef uint16_t U16x16 __attribute__((vector_size(2 * LANES)));

/* To the nearest bfloat16, of two as near the larger magnitude: two instructions, where ties to even take five. */
INLINE U32x16 rounded_bits(F32x16 x) {
  return (U32x16)x + 0x8000u;
}
INLINE F32x16 to_bfloat16(F32x16 x) {
  return (F32x16)(rounded_bits(x) & 0xFFFF0000u);
}
INLINE F32x16 load_bfloat16(const uint16_t* from, int64_t count) {
  U16x16 x = {0};
  if (count == LANES)
    memcpy(&x, from, sizeof x);
  else
    memcpy(&x, from, count * sizeof *from);
  return (F32x16)(__builtin_convertvector(x, U32x16) << 16);
}
INLINE void store_bfloat16(uint16_t* to, F32x16 x, int64_t count) {
  const U16x16 bits = __builtin_convertvector(rounded_bits(x) >> 16, U16x16);
  if (count == LANES)
    memcpy(to, &bits, sizeof bits);
  else
    memcpy(to, &bits, count * sizeof *to);
}

/* A vector of a state, `at` numbers from its first. */
INLINE F32x16 load_state(const void* state, int64_t at, int64_t count, const Form form) {
  return form == BFLOATS ? load_bfloat16((const uint16_t*)state + at, count)
                         : load_some((const float*)state + at, count);
}
INLINE void store_state(void* state, int64_t at, F32x16 x, int64_t count, const Form form) {
  if (form == BFLOATS)
    store_bfloat16((uint16_t*)state + at, x, count);
  else
    store_some((float*)state + at, form == ROUNDED ? to_bfloat16(x) : x, count);
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

/* The logarithm of a decay, from what it is made of; and the time step, where there is one. */
INLINE F32x16 decay_of(const Kernel* k, F32x16 x, float rate, F32x16* step) {
  if (k->least_decay < 0) return splat(k->least_decay) * sigmoid(x * splat(rate));
  *step = vmin(splat(k->most_step), vmax(splat(k->least_step), softplus(x)));
  return *step * splat(rate);
}

INLINE const float* of_token(const Work* w, int which, int64_t token) {
  return w->in[which].from + token * w->in[which].stride;
}

/* What the rows of a head's state are multiplied by, where each has its own decay. */
INLINE void factors_of(const Work* w, int64_t token, int64_t head, float* factors) {
  const float* decays = of_token(w, DECAY, token) + head * w->K;
  F32x16 step;
  for (int64_t i = 0; i < w->K; i += LANES) {
    const int64_t count = w->K - i < LANES ? w->K - i : LANES;
    F32x16 decay = load_some(decays + i, count);
    if (w->rate) {
      if (w->bias) decay += load_some(w->bias + head * w->K + i, count);
      decay = decay_of(w->kernel, decay, w->rate[head], &step);
    }
    store_some(factors + i, vexp(decay), count);
  }
}

/* The queries, keys and values of a token, which lie far from those of the one before: no processor foresees that. */
INLINE void prefetch_token(const Work* w, int64_t token, int64_t group, int64_t column, const int vectors) {
  const float *query = of_token(w, QUERY, token) + group * w->K, *key = of_token(w, KEY, token) + group * w->K;
  for (int64_t i = 0; i < w->K; i += LANES) __builtin_prefetch(query + i), __builtin_prefetch(key + i);
  EACH (int v = 0; v < vectors; v++) __builtin_prefetch(of_token(w, VALUE, token) + column + v * LANES);
}

/* `vectors` of columns of one head from `first` on, over the tokens of a sequence. `matrix`: these columns of the state,
   rows `stride` apart. `last`: columns of the last vector, `kept`: those of it that a row has. */
INLINE void over_tokens(const Work* w, int64_t sequence, int64_t head, int64_t first, const int vectors, int64_t last,
                        void* matrix, int64_t stride, int64_t kept, const Form form, const int by_channel) {
  const Kernel* k = w->kernel;
  float factors[MOST_KEYS];
  const int64_t H = w->H, K = w->K, V = w->V, group = head * w->G / H;
  for (int64_t token = w->offsets[sequence]; token < w->offsets[sequence + 1]; token++) {
    const float *query = of_token(w, QUERY, token) + group * K, *key = of_token(w, KEY, token) + group * K;
    const float* value = of_token(w, VALUE, token) + head * V + first;
    float* y = w->y + (token * H + head) * V + first;
    if (token + 1 < w->offsets[sequence + 1]) prefetch_token(w, token + 1, group, head * V + first, vectors);
    F32x16 factor, step = splat(1), change[AT_ONCE], read[AT_ONCE] = {0};
    float key_scale = 1, query_scale = 1;
    if (by_channel) {
      factors_of(w, token, head, factors);
    } else {
      F32x16 decay = splat(of_token(w, DECAY, token)[head]);
      if (w->rate) decay = decay_of(k, w->bias ? decay + splat(w->bias[head]) : decay, w->rate[head], &step);
      factor = vexp(decay);
    }
    EACH (int v = 0; v < vectors; v++) change[v] = load_some(value + v * LANES, v + 1 < vectors ? LANES : last);
    if (k->rule == SCAN) {
      if (w->skip)
        EACH (int v = 0; v < vectors; v++) read[v] = change[v] * splat(w->skip[head]);
      EACH (int v = 0; v < vectors; v++) change[v] *= step;
    } else {
      F32x16 answer[AT_ONCE] = {0};
      key_scale = reciprocal_norm(key, K);
      query_scale = reciprocal_norm(query, K) / __builtin_sqrtf((float)K);
      for (int64_t i = 0; i < K; i++) {
        const F32x16 scaled = splat(by_channel ? key[i] * key_scale * factors[i] : key[i] * key_scale);
        EACH (int v = 0; v < vectors; v++) {
          F32x16 row = load_state(matrix, i * stride + v * LANES, v + 1 < vectors ? LANES : kept, form);
          answer[v] = vfma(by_channel ? row : factor * row, scaled, answer[v]);
        }
      }
      F32x16 beta = splat(of_token(w, BETA, token)[head]);
      if (k->squash) beta = sigmoid(beta) * splat(k->most_beta);
      EACH (int v = 0; v < vectors; v++) change[v] = (change[v] - answer[v]) * beta;
    }
    for (int64_t i = 0; i < K; i++) {
      const F32x16 by_key = splat(key[i] * key_scale), by_query = splat(query[i] * query_scale);
      if (by_channel) factor = splat(factors[i]);
      EACH (int v = 0; v < vectors; v++) {
        const int64_t at = i * stride + v * LANES, count = v + 1 < vectors ? LANES : kept;
        const F32x16 row = vfma(by_key, change[v], factor * load_state(matrix, at, count, form));
        read[v] = vfma(row, by_query, read[v]);
        store_state(matrix, at, row, count, form);
      }
    }
    EACH (int v = 0; v < vectors; v++) store_some(y + v * LANES, read[v], v + 1 < vectors ? LANES : last);
  }
}

/* The same of the pool's state. Of several tokens the columns are copied, so that they lie together in the first-level
   cache: in the state, rows that are a power of two apart share a few of its sets. */
INLINE void columns(const Work* w, int64_t sequence, int64_t head, int64_t first, const int vectors, int64_t last,
                    const int half, const int by_channel) {
  const int64_t K = w->K, V = w->V, width = (vectors - 1) * LANES + last, stride = vectors * LANES;
  const int64_t begin = ((w->slots[sequence] * w->H + head) * K) * V + first;
  const size_t size = half ? sizeof(uint16_t) : sizeof(float);
  const Form form = half ? BFLOATS : FLOATS;
  char* matrix = (char*)w->state + begin * size;
  const int fresh = !w->starts[sequence], copied = w->offsets[sequence + 1] - w->offsets[sequence] >= FEW_TOKENS;
  if (!copied || K * stride > MOST_COPIED) {
    for (int64_t i = 0; i < K && fresh; i++) memset(matrix + i * V * size, 0, width * size);
    over_tokens(w, sequence, head, first, vectors, last, matrix, V, last, form, by_channel);
    return;
  }
  float copy[MOST_COPIED] __attribute__((aligned(64)));
  if (fresh || last < LANES) memset(copy, 0, K * stride * sizeof(float));
  for (int64_t i = 0; i < K && !fresh; i++)
    EACH (int v = 0; v < vectors; v++) {
      const int64_t count = v + 1 < vectors ? LANES : last;
      store_some(copy + i * stride + v * LANES, load_state(matrix, i * V + v * LANES, count, form), count);
    }
  over_tokens(w, sequence, head, first, vectors, last, copy, stride, LANES, half ? ROUNDED : FLOATS, by_channel);
  for (int64_t i = 0; i < K; i++)
    EACH (int v = 0; v < vectors; v++) {
      const int64_t count = v + 1 < vectors ? LANES : last;
      store_state(matrix, i * V + v * LANES, load(copy + i * stride + v * LANES), count, form);
    }
}

INLINE void columns_of(const Work* w, int64_t sequence, int64_t head, int64_t first, const int vectors, int64_t last) {
  const int by_channel = w->kernel->by_channel;
  if (w->half && by_channel)
    columns(w, sequence, head, first, vectors, last, 1, 1);
  else if (w->half)
    columns(w, sequence, head, first, vectors, last, 1, 0);
  else if (by_channel)
    columns(w, sequence, head, first, vectors, last, 0, 1);
  else
    columns(w, sequence, head, first, vectors, last, 0, 0);
}

static void columns_job(void* state, size_t number) {
  const Work* w = state;
  const int64_t first = (int64_t)number % w->jobs * COLUMNS, head = (int64_t)number / w->jobs % w->H;
  const int64_t sequence = (int64_t)number / w->jobs / w->H;
  if (w->offsets[sequence] == w->offsets[sequence + 1]) return; /* no new tokens: its state stays */
  if (first + COLUMNS <= w->V) {
    columns_of(w, sequence, head, first, AT_ONCE, LANES);
    return;
  }
  for (int64_t v = first; v < w->V; v += LANES)
    columns_of(w, sequence, head, v, 1, w->V - v < LANES ? w->V - v : LANES);
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
  const int per_token = k->rule == DELTA ? PER_TOKEN : BETA, extras = k->rule == DELTA ? SKIP : EXTRAS;
  Tensor in[PER_TOKEN], state, offsets, starts, slots, extra[EXTRAS] = {0};
  for (int i = 0; i < per_token; i++) TRY(input(api, context, i, NULL, &in[i]));
  TRY(input(api, context, per_token, NULL, &state));
  TRY(input(api, context, per_token + 1, NULL, &offsets));
  TRY(input(api, context, per_token + 2, NULL, &starts));
  TRY(input(api, context, per_token + 3, NULL, &slots));
  for (int i = 0; i < extras; i++) TRY(input(api, context, per_token + 4 + i, &k->constants[i], &extra[i]));
  if (!state.present || (state.type != FLOAT && state.type != BFLOAT16) || state.rank != 4 || state.dims[1] < 1 ||
      state.dims[2] < 1 || state.dims[3] < 1 || state.dims[1] % k->groups)
    return failure(api, ERROR_ARGUMENT,
                   "a recurrence: the state is not [slots, H, K, V] float or bfloat16, where groups divide H");
  const int64_t H = state.dims[1], K = state.dims[2], V = state.dims[3], sequences = starts.elements;
  const int64_t decays = k->by_channel ? H * K : H;
  const int64_t needed[PER_TOKEN] = {H * V, k->groups * K, k->groups * K, decays, H};
  if (k->by_channel && K > MOST_KEYS)
    return failure(api, ERROR_ARGUMENT, "a recurrence: more than 1024 key channels with a decay each");
  Work w = {.kernel = k, .H = H, .G = k->groups, .K = K, .V = V, .jobs = (V + COLUMNS - 1) / COLUMNS};
  int64_t tokens = 0;
  for (int i = 0; i < per_token; i++) {
    if (!in[i].present || in[i].type != FLOAT || in[i].rank < 2 || in[i].rank > MOST_RANK ||
        in[i].dims[in[i].rank - 1] < needed[i] || in[i].dims[in[i].rank - 1] - needed[i] < k->first[i])
      return failure(api, ERROR_ARGUMENT,
                     "a recurrence: an input is not [.., M, W] float, where W has all its columns");
    const int64_t stride = in[i].dims[in[i].rank - 1];
    w.in[i] = (Columns){in[i].elements ? (const float*)in[i].data + k->first[i] : NULL, stride};
    if (i && in[i].elements / stride != tokens)
      return failure(api, ERROR_ARGUMENT, "a recurrence: inputs of different numbers of tokens");
    tokens = in[i].elements / stride;
  }
  for (int i = 0; i < extras; i++)
    if (extra[i].present && !holds(&extra[i], FLOAT, i == BIAS ? decays : H))
      return failure(api, ERROR_ARGUMENT, "a recurrence: a rate, bias or skip that is not [H] float");
  w.rate = extra[RATE].data, w.bias = extra[BIAS].data, w.skip = extra[SKIP].data;
  w.state = state.data, w.half = state.type == BFLOAT16, w.offsets = offsets.data, w.starts = starts.data,
  w.slots = slots.data;
  if (!holds(&offsets, INT32, sequences + 1) || !holds(&starts, INT32, sequences) || !holds(&slots, INT32, sequences) ||
      !fits(&w, sequences, tokens, state.dims[0]))
    return failure(api, ERROR_ARGUMENT, "a recurrence: offsets, starts or slots do not fit the tokens and the state");
  int64_t dims[MOST_RANK];
  memcpy(dims, in[VALUE].dims, in[VALUE].rank * sizeof *dims);
  dims[in[VALUE].rank - 1] = H * V;
  TRY(output(api, context, 0, dims, in[VALUE].rank, &w.y));
  return sequences ? parallel(api, context, k->base.threads, columns_job, sequences * H * w.jobs, &w, NULL) : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  static const char* const FIRST[PER_TOKEN] = {"value_first", "query_first", "key_first", "decay_first", "beta_first"};
  Kernel found = {.base = {api, threads_of(op)}, .rule = (Rule)declaration_of(op)->variant};
  const size_t extra = found.rule == DELTA ? PER_TOKEN + 4 : BETA + 4, extras = found.rule == DELTA ? SKIP : EXTRAS;
  TRY(attribute_int(api, info, "groups", &found.groups));
  for (int i = 0; i < PER_TOKEN; i++) found.first[i] = optional_int(api, info, FIRST[i], 0);
  found.squash = optional_int(api, info, "squash", 0) != 0;
  found.by_channel = optional_int(api, info, "by_channel", 0) != 0;
  found.most_beta = optional_float(api, info, "most_beta", 1);
  found.least_decay = optional_float(api, info, "least_decay", 0);
  found.least_step = optional_float(api, info, "least_step", 0);
  found.most_step = optional_float(api, info, "most_step", FLT_MAX);
  int negative = 0;
  for (int i = 0; i < PER_TOKEN; i++) negative |= found.first[i] < 0;
  if (negative || found.groups < 1 || !(found.least_step <= found.most_step) || !(found.least_decay <= 0) ||
      (found.rule == SCAN && (found.by_channel || found.least_decay < 0)))
    return failure(api, ERROR_ARGUMENT, "a recurrence: unsupported groups, columns, decays or bounds of a time step");
  for (size_t i = 0; i < extras; i++) TRY(constant_input(api, info, extra + i, &found.constants[i]));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation recurrence = {create, compute};
