/* CausalConv: each channel's convolution over the last K tokens of its sequence, whose state is a row of a pool.

     x [.., M, W] float: the tokens of all sequences, one sequence after the other; the C channels of a token are those
       from `first` on. Where it is `gated`, W is 3 C: a factor of what is convolved, a factor of the result, and what is
       convolved, as in LFM2
     weight [K, C] float, bias [C] float or none
     state [slots, K - 1, C] float: x of the tokens before; written in place
     offsets [B + 1] int32: the first token of each sequence; starts [B] int32: its position, at 0 the state is zeros
     slots [B] int32: the row of each sequence
     y [.., M, C]: bias + sum over k of weight[k] * x[token - (K - 1) + k], summed in this order; SiLU of it where
       `silu` */
#include "ort.h"
#include "vector.h"

enum { MAX_RANK = 8, MOST_TAPS = 16, AT_ONCE = 256 /* channels of a job */, AHEAD = 2 /* tokens */ };

typedef struct {
  Base base;
  int64_t first;
  int gated, silu;
  Tensor weight, bias; /* where they are constant */
} Kernel;

typedef struct {
  int64_t C, K, W, jobs; /* jobs of a sequence */
  int gated, silu;
  const float *x, *weight, *bias; /* x: of the first token's first channel */
  float *state, *y;
  const int32_t *offsets, *starts, *slots;
} Work;

/* `count` floats, LANES of them or fewer; the others are zeros. */
INLINE F32x16 load_some(const float* from, int64_t count) {
  F32x16 x = {0};
  memcpy(&x, from, count * sizeof(float));
  return x;
}

/* `vectors` of channels of one sequence from `first` on, `count` in each: LANES, or fewer of the last. All of them of a
   token before the next token: tokens lie far apart, and no processor foresees that. `K`: the taps. */
INLINE void convolve(const Work* w, int64_t sequence, int64_t first, int64_t vectors, int64_t count, const int64_t K) {
  const int64_t C = w->C, W = w->W, end = w->offsets[sequence + 1];
  const size_t bytes = count * sizeof(float);
  float* kept = w->state + (int64_t)w->slots[sequence] * (K - 1) * C + first;
  float window[MOST_TAPS - 1][AT_ONCE], *rows[MOST_TAPS]; /* of the tokens before, the oldest first */
  for (int64_t k = 0; k + 1 < K; k++) {
    rows[k] = window[k];
    for (int64_t i = 0; i < vectors; i++)
      store(window[k] + i * LANES, w->starts[sequence] ? load_some(kept + k * C + i * LANES, count) : (F32x16){0});
  }
  for (int64_t token = w->offsets[sequence]; token < end; token++) {
    const float* x = w->x + token * W + first;
    float* y = w->y + token * C + first;
    const int64_t ahead = token + AHEAD < end ? AHEAD * W : 0;
    for (int64_t i = 0; i < vectors * LANES; i += LANES) {
      F32x16 newest = load_some(x + i, count), after = {0};
      __builtin_prefetch(x + i + ahead);
      if (w->gated) {
        newest *= load_some(x + i - 2 * C, count), after = load_some(x + i - C, count);
        __builtin_prefetch(x + i - 2 * C + ahead), __builtin_prefetch(x + i - C + ahead);
      }
      F32x16 sum = w->bias ? load_some(w->bias + first + i, count) : (F32x16){0};
      for (int64_t k = 0; k + 1 < K; k++)
        sum = vfma(load_some(w->weight + k * C + first + i, count), load(rows[k] + i), sum);
      sum = vfma(load_some(w->weight + (K - 1) * C + first + i, count), newest, sum);
      store(rows[0] + i, newest);
      if (w->silu) sum = silu(sum);
      if (w->gated) sum *= after;
      memcpy(y + i, &sum, bytes);
    }
    float* written = rows[0];
    for (int64_t k = 0; k + 2 < K; k++) rows[k] = rows[k + 1];
    rows[K - 2] = written;
  }
  for (int64_t k = 0; k + 1 < K; k++)
    for (int64_t i = 0; i < vectors * LANES; i += LANES) memcpy(kept + k * C + i, rows[k] + i, bytes);
}

static void convolve_job(void* state, size_t number) {
  const Work* w = state;
  const int64_t sequence = (int64_t)number / w->jobs, begin = (int64_t)number % w->jobs * AT_ONCE;
  const int64_t channels = w->C - begin < AT_ONCE ? w->C - begin : AT_ONCE, whole = channels / LANES;
  if (w->offsets[sequence] == w->offsets[sequence + 1]) return; /* no new tokens: its state stays */
  if (whole && w->K == 4)
    convolve(w, sequence, begin, whole, LANES, 4);
  else if (whole && w->K == 3)
    convolve(w, sequence, begin, whole, LANES, 3);
  else if (whole)
    convolve(w, sequence, begin, whole, LANES, w->K);
  if (channels % LANES) convolve(w, sequence, begin + whole * LANES, 1, channels % LANES, w->K);
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
  Tensor x, weight, bias, state, offsets, starts, slots;
  TRY(input(api, context, 0, NULL, &x));
  TRY(input(api, context, 1, &k->weight, &weight));
  TRY(input(api, context, 2, &k->bias, &bias));
  TRY(input(api, context, 3, NULL, &state));
  TRY(input(api, context, 4, NULL, &offsets));
  TRY(input(api, context, 5, NULL, &starts));
  TRY(input(api, context, 6, NULL, &slots));
  if (!weight.present || weight.type != FLOAT || weight.rank != 2 || weight.dims[0] < 2 || weight.dims[0] > MOST_TAPS ||
      weight.dims[1] < 1)
    return failure(api, ERROR_ARGUMENT, "CausalConv: the weight is not [2 to 16, C] float");
  const int64_t K = weight.dims[0], C = weight.dims[1], sequences = starts.elements;
  if (!x.present || x.type != FLOAT || x.rank < 2 || x.rank > MAX_RANK ||
      (k->gated ? x.dims[x.rank - 1] % C || x.dims[x.rank - 1] / C != 3
                : x.dims[x.rank - 1] < C || x.dims[x.rank - 1] - C < k->first))
    return failure(api, ERROR_ARGUMENT, "CausalConv: x is not [.., M, W] float, where W has all channels");
  const int64_t W = x.dims[x.rank - 1], tokens = x.elements / W, first = k->gated ? 2 * C : k->first;
  if (bias.present && !holds(&bias, FLOAT, C))
    return failure(api, ERROR_ARGUMENT, "CausalConv: the bias is not [C] float");
  if (!state.present || state.type != FLOAT || state.rank != 3 || state.dims[1] != K - 1 || state.dims[2] != C)
    return failure(api, ERROR_ARGUMENT, "CausalConv: the state is not [slots, K - 1, C] float");
  Work w = {.C = C, .K = K, .W = W, .jobs = (C + AT_ONCE - 1) / AT_ONCE, .gated = k->gated, .silu = k->silu};
  w.x = x.elements ? (const float*)x.data + first : NULL, w.weight = weight.data, w.bias = bias.data;
  w.state = state.data, w.offsets = offsets.data, w.starts = starts.data, w.slots = slots.data;
  if (!holds(&offsets, INT32, sequences + 1) || !holds(&starts, INT32, sequences) || !holds(&slots, INT32, sequences) ||
      !fits(&w, sequences, tokens, state.dims[0]))
    return failure(api, ERROR_ARGUMENT, "CausalConv: offsets, starts or slots do not fit the tokens and the state");
  int64_t dims[MAX_RANK];
  memcpy(dims, x.dims, x.rank * sizeof *dims);
  dims[x.rank - 1] = C;
  TRY(output(api, context, 0, dims, x.rank, &w.y));
  return sequences ? parallel(api, context, k->base.threads, convolve_job, sequences * w.jobs, &w, NULL) : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  Kernel found = {.base = {api, threads_of(op)}, .first = optional_int(api, info, "first", 0)};
  found.gated = optional_int(api, info, "gated", 0) != 0, found.silu = optional_int(api, info, "silu", 0) != 0;
  if (found.first < 0) return failure(api, ERROR_ARGUMENT, "CausalConv: a negative first column");
  TRY(constant_input(api, info, 1, &found.weight));
  TRY(constant_input(api, info, 2, &found.bias));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation causal_conv = {create, compute};
