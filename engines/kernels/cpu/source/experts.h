/* What experts over floats and over codes have in common: the tokens of a step by expert, and the gate. */
#ifndef TAPEOUT_EXPERTS_H
#define TAPEOUT_EXPERTS_H

#include "ort.h"
#include "vector.h"

#include <math.h>

enum { SILU, GELU_TANH, RELU2, ACTIVATIONS };

/* Of an inner channel: activation(min(gate, limit)) * (clip(up, -limit, limit) + offset), or without a gate
   activation(min(up, limit)). */
typedef struct {
  int64_t activation;
  float alpha, limit, offset;
} ExpertGate;

static inline Status* read_gate(Api api, const Info* info, ExpertGate* gate) {
  TRY(attribute_int(api, info, "activation", &gate->activation));
  TRY(attribute_float(api, info, "alpha", &gate->alpha));
  TRY(attribute_float(api, info, "limit", &gate->limit));
  TRY(attribute_float(api, info, "offset", &gate->offset));
  if (gate->activation < 0 || gate->activation >= ACTIVATIONS || !(gate->alpha > 0) || !(gate->limit >= 0))
    return failure(api, ERROR_ARGUMENT, "experts: an unknown activation, or an alpha or limit that is negative");
  if (!gate->limit) gate->limit = INFINITY;
  return NULL;
}

INLINE F32x16 activated(const ExpertGate* gate, F32x16 x) {
  x = vmin(splat(gate->limit), x);
  if (gate->activation == RELU2) {
    x = vmax(splat(0), x);
    return x * x;
  }
  F32x16 sharpened = x * splat(gate->alpha);
  if (gate->activation == GELU_TANH) sharpened = splat(1.5957691f) * vfma(x * x * splat(0.044715f), x, x);
  return x / (splat(1) + vexp(splat(0) - sharpened));
}

INLINE F32x16 gated(const ExpertGate* gate, F32x16 x, F32x16 up) {
  const F32x16 clipped = vmin(splat(gate->limit), vmax(splat(-gate->limit), up));
  return activated(gate, x) * (clipped + splat(gate->offset));
}

/* Pairs of a token and one of its choices, numbered token * chosen + choice, by expert. */
typedef struct {
  int64_t tokens, chosen, experts;
  const int64_t* index; /* [tokens, chosen] */
  int64_t hit;          /* experts with a token */
  int64_t* order;       /* [pairs] by expert, those of an expert in the order of tokens */
  int64_t* begins;      /* [experts + 1] of each in `order` */
  int64_t* hits;        /* [hit] */
} Routing;

/* Integers that `route` needs. */
static inline int64_t routing_numbers(const Routing* r) {
  return r->tokens * r->chosen + 2 * r->experts + 1;
}

/* 0: an index that no expert has. */
static inline int route(Routing* r, int64_t* memory) {
  const int64_t pairs = r->tokens * r->chosen;
  r->order = memory, r->begins = r->order + pairs, r->hits = r->begins + r->experts + 1, r->hit = 0;
  memset(r->begins, 0, (r->experts + 1) * sizeof *r->begins);
  for (int64_t i = 0; i < pairs; i++) {
    if (r->index[i] < 0 || r->index[i] >= r->experts) return 0;
    r->begins[r->index[i] + 1]++;
  }
  for (int64_t e = 0; e < r->experts; e++) {
    if (r->begins[e + 1]) r->hits[r->hit++] = e;
    r->begins[e + 1] += r->begins[e];
  }
  for (int64_t i = 0; i < pairs; i++) r->order[r->begins[r->index[i]]++] = i;
  for (int64_t e = r->experts; e > 0; e--) r->begins[e] = r->begins[e - 1]; /* each was moved to its end */
  r->begins[0] = 0;
  return 1;
}

#endif
