/* GatedNorm: what a recurrence or attention gives is multiplied by an activation of a gate, with an RMSNorm or without.
   Scale: a product with constants, and a sum.

     x [.., M, X] float, of which the C columns from `x_first` on; C is `channels`, 0: all
     gate [.., M, W] float: C columns, in runs of `run`, of which the first begins at `first` and each other `period` after
       the one before; or one column of all channels, where there is `one`. It may be x
     weight [C] or [group] float, or none
     y [.., M, C]. RMSNorm divides each `group` of channels by sqrt(mean square + epsilon), and multiplies by the weight:
       norm(x) * f(gate) where `norm_first`, else norm(x * f(gate)); x * f(gate) where the group is 0.
       f is SiLU, or the sigmoid where `sigmoid`

     factors [1] or [C] float, x [.., M, C], added [.., M, C] or none: y = x * factors + added, each rounded */
#include "ort.h"
#include "vector.h"

typedef enum { GATED_NORM, SCALE } Kind; /* variants, in the order of declarations */
enum { MOST_RANK = 8 };

typedef struct {
  Base base;
  Kind kind;
  int64_t channels, x_first, first, run, period, group;
  int sigmoid, norm_first, one;
  float epsilon;
  Tensor constant; /* the weight or the factors, where they are */
} Kernel;

typedef struct {
  const Kernel* kernel;
  int64_t C, X, W, run, group, count; /* count: of the weight or the factors */
  const float *x, *gate, *weight, *added;
  float* y;
} Work;

INLINE int64_t most(int64_t left) {
  return left < LANES ? left : LANES;
}

/* x * f(gate) of the channels from `begin` to `end` of a token. Returns the sum of the squares of what is normalized. */
static float multiply(const Work* w, const float* x, const float* gate, int64_t begin, int64_t end, float* y) {
  const Kernel* k = w->kernel;
  F32x16 squares = {0};
  for (int64_t i = begin; i < end;) {
    const int64_t run = i / w->run, in_run = (run + 1) * w->run - i, left = end - i < in_run ? end - i : in_run;
    const int64_t count = most(left);
    const F32x16 by = k->one ? splat(*gate) : load_first(gate + run * k->period + i % w->run, count);
    const F32x16 given = load_first(x + i, count);
    const F32x16 product = given * (k->sigmoid ? sigmoid(by) : silu(by)), normed = k->norm_first ? given : product;
    squares = vfma(normed, normed, squares);
    store_first(y + i, product, count);
    i += count;
  }
  return reduce_add(squares);
}

static void gate_token(void* state, size_t token) {
  const Work* w = state;
  const Kernel* k = w->kernel;
  const float *x = w->x + (int64_t)token * w->X, *gate = w->gate + (int64_t)token * w->W;
  float* y = w->y + (int64_t)token * w->C;
  for (int64_t begin = 0; begin < w->C; begin += w->group) {
    const int64_t end = begin + w->group;
    const float squares = multiply(w, x, gate, begin, end, y);
    if (!k->group) continue;
    const F32x16 inverse = splat(1.0f / __builtin_sqrtf(squares / (float)w->group + k->epsilon));
    const float* weight = w->count == w->C ? w->weight + begin : w->weight;
    for (int64_t i = 0; i < w->group; i += LANES) {
      const int64_t count = most(w->group - i);
      F32x16 normed = load_first(y + begin + i, count) * inverse;
      if (weight) normed *= load_first(weight + i, count);
      store_first(y + begin + i, normed, count);
    }
  }
}

static void scale_token(void* state, size_t token) {
  const Work* w = state;
  const float* x = w->x + (int64_t)token * w->C;
  float* y = w->y + (int64_t)token * w->C;
  for (int64_t i = 0; i < w->C; i += LANES) {
    const int64_t count = most(w->C - i);
    const F32x16 factors = w->count == 1 ? splat(w->weight[0]) : load_first(w->weight + i, count);
    F32x16 scaled = load_first(x + i, count) * factors;
    if (w->added) scaled += load_first(w->added + (int64_t)token * w->C + i, count);
    store_first(y + i, scaled, count);
  }
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  Tensor x, gate = {0}, weight, added = {0};
  const int gated = k->kind == GATED_NORM;
  TRY(input(api, context, 0, NULL, &x));
  if (gated) TRY(input(api, context, 1, NULL, &gate));
  TRY(input(api, context, gated ? 2 : 1, &k->constant, &weight));
  if (!gated) TRY(input(api, context, 2, NULL, &added));
  const int64_t X = x.present && x.rank && x.rank <= MOST_RANK ? x.dims[x.rank - 1] : 0,
                C = k->channels ? k->channels : X;
  if (X < 1 || x.type != FLOAT || X < C || X - C < k->x_first)
    return failure(api, ERROR_ARGUMENT, "GatedNorm or Scale: x is not [.., M, X] float, where X has all its columns");
  const int64_t tokens = x.elements / X;
  Work w = {.kernel = k,
            .C = C,
            .X = X,
            .run = k->run ? k->run : C,
            .group = k->group ? k->group : C,
            .count = weight.elements};
  w.x = x.elements ? (const float*)x.data + k->x_first : NULL, w.weight = weight.data;
  if (!gated && (!weight.present || weight.type != FLOAT || (weight.elements != 1 && weight.elements != C)))
    return failure(api, ERROR_ARGUMENT, "Scale: factors are not [1] or [C] float");
  if (added.present && !holds(&added, FLOAT, x.elements))
    return failure(api, ERROR_ARGUMENT, "Scale: what is added is not of the shape of x");
  w.added = added.data;
  if (gated) {
    const int64_t runs = k->one ? 1 : C / w.run, width = k->one ? 1 : w.run;
    int64_t end;
    if (C % w.run || C % w.group ||
        (weight.present && (weight.type != FLOAT || (weight.elements != C && weight.elements != w.group))))
      return failure(api, ERROR_ARGUMENT,
                     "GatedNorm: groups or runs that do not divide C, or a weight of another shape");
    if (__builtin_mul_overflow(runs - 1, k->period, &end) || __builtin_add_overflow(end, k->first + width, &end) ||
        !gate.present || gate.type != FLOAT || !gate.rank || gate.dims[gate.rank - 1] < end ||
        gate.elements / gate.dims[gate.rank - 1] != tokens)
      return failure(api, ERROR_ARGUMENT, "GatedNorm: the gate is not [.., M, W] float, where W has all its columns");
    w.W = gate.dims[gate.rank - 1], w.gate = gate.elements ? (const float*)gate.data + k->first : NULL;
  }
  int64_t dims[MOST_RANK];
  memcpy(dims, x.dims, x.rank * sizeof *dims);
  dims[x.rank - 1] = C;
  TRY(output(api, context, 0, dims, x.rank, &w.y));
  return tokens ? parallel(api, context, k->base.threads, gated ? gate_token : scale_token, tokens, &w, NULL) : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  Kernel found = {.base = {api, threads_of(op)}, .kind = (Kind)declaration_of(op)->variant};
  if (found.kind == GATED_NORM) {
    found.channels = optional_int(api, info, "channels", 0), found.x_first = optional_int(api, info, "x_first", 0);
  }
  found.first = optional_int(api, info, "first", 0), found.run = optional_int(api, info, "run", 0);
  found.period = optional_int(api, info, "period", found.run), found.group = optional_int(api, info, "group", 0);
  found.sigmoid = optional_int(api, info, "sigmoid", 0) != 0;
  found.norm_first = optional_int(api, info, "norm_first", 0) != 0;
  found.one = optional_int(api, info, "one", 0) != 0;
  found.epsilon = optional_float(api, info, "epsilon", 0);
  if (found.channels < 0 || found.x_first < 0 || found.first < 0 || found.first > INT32_MAX || found.run < 0 ||
      found.run > INT32_MAX || found.period < found.run || found.group < 0 || !(found.epsilon >= 0))
    return failure(api, ERROR_ARGUMENT, "GatedNorm: unsupported columns, groups or epsilon");
  TRY(constant_input(api, info, found.kind == GATED_NORM ? 2 : 1, &found.constant));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation gated_norm = {create, compute};
