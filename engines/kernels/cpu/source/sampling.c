/* From logits to tokens: what runtime/engine/draw.py computes in numpy, to the bit.

   A token's weight is its probability over that of the likeliest one, times 2^30, as an integer: sums do not depend on
   the order of their terms. Multiplies and adds round separately, as numpy's do. */
#include "memory.h"
#include "sampling.h"
#include "vector.h"

#include <math.h>

#pragma clang fp contract(off)

enum { CHUNK_VECTORS = 32, CHUNK = CHUNK_VECTORS * LANES };

static const float LOG2_E = 1.44269504f;

#define ONE 0x1p30f

/* Of V tokens, padded to whole chunks of CHUNK. */
typedef struct {
  int64_t V, chunks;
  float* scores;          /* [chunks * CHUNK]; those of padding are -infinity */
  int32_t* weights;       /* [chunks * CHUNK] */
  uint64_t *keys, *order; /* [chunks * CHUNK] */
  int64_t* sums;          /* of the weights of each chunk */
  const float* next;      /* the logits of the next row, or NULL */
  float* maxima;          /* [chunks, LANES]: of the tokens of a chunk in one lane */
} Work;

int64_t tapeout_sample_bytes(int64_t V) {
  const int64_t chunks = (V + CHUNK - 1) / CHUNK;
  return chunks * (CHUNK * (int64_t)(sizeof(float) + sizeof(int32_t) + 2 * sizeof(uint64_t)) +
                   (int64_t)(sizeof(int64_t) + LANES * sizeof(float)));
}

static Work work_in(void* memory, int64_t V) {
  Work w = {.V = V, .chunks = (V + CHUNK - 1) / CHUNK};
  w.keys = memory;
  w.order = w.keys + w.chunks * CHUNK;
  w.sums = (int64_t*)(w.order + w.chunks * CHUNK);
  w.scores = (float*)(w.sums + w.chunks);
  w.weights = (int32_t*)(w.scores + w.chunks * CHUNK);
  w.maxima = (float*)(w.weights + w.chunks * CHUNK);
  return w;
}

/* The largest key comes first; among equal scores the lowest token does. */
INLINE uint64_t key_of(float score, int64_t token) {
  uint32_t bits;
  score += 0.0f; /* -0 and 0 are equal */
  memcpy(&bits, &score, sizeof bits);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (uint64_t)bits << 32 | (uint32_t)~token;
}
INLINE int64_t token_of(uint64_t key) {
  return (int64_t)(uint32_t)~key;
}

/* Copies a row to `scores`. Whether it is free of NaN and infinity. */
static int copy(const Work* w, const float* logits) {
  I32x16 right = splat_int(-1);
  for (int64_t at = 0; at < w->chunks * CHUNK; at += LANES) {
    const int64_t left = w->V - at;
    F32x16 x = splat(-INFINITY);
    if (left >= LANES)
      x = load(logits + at);
    else if (left > 0)
      x = blend(first_lanes(left), load_first(logits + at, left), x);
    right &= (I32x16)(x < splat(INFINITY));
    store(w->scores + at, x);
  }
  return !any_of(~right);
}

/* Changes the logits that the request changes, and excludes what the mask excludes. Whether no score is NaN or infinity. */
static int adjust(const Work* w, const Row* row) {
  int finite = 1;
  for (int64_t i = 0; i < row->adjusted; i++) {
    const int32_t token = row->tokens[i];
    if (row->mask && !(row->mask[token >> 5] >> (token & 31) & 1)) continue;
    const float x = w->scores[token] + row->bias[i];
    w->scores[token] = (x > 0 ? x / row->factor[i] : x * row->factor[i]) + row->shift[i];
    finite &= w->scores[token] < INFINITY;
  }
  if (row->mask)
    for (int64_t at = 0; at < w->V; at += LANES) {
      const uint32_t bits = row->mask[at >> 5] >> (at & 16);
      store(w->scores + at, blend(mask_of(bits & 0xffff), load(w->scores + at), splat(-INFINITY)));
    }
  return finite;
}

/* The largest score, and the maxima of each chunk. */
static float find_maxima(const Work* w) {
  F32x16 max = splat(-INFINITY);
  for (int64_t c = 0; c < w->chunks; c++) {
    F32x16 largest = load(w->scores + c * CHUNK);
    for (int v = 1; v < CHUNK_VECTORS; v++) largest = vmax(load(w->scores + c * CHUNK + v * LANES), largest);
    store(w->maxima + c * LANES, largest);
    max = vmax(largest, max);
  }
  return reduce_max(max);
}

/* 2^((score - max) * scale) in fixed point. Scaling by a power of two is exact, so it comes first. */
INLINE I32x16 weights_of(F32x16 scores, F32x16 max, F32x16 scale) {
  const F32x16 exponent = vmax((scores - max) * scale, splat(-40));
  const F32x16 n = vround(exponent), f = exponent - n;
  F32x16 power = splat(0.0013264727f * ONE) * f + splat(0.009671513f * ONE);
  power = power * f + splat(0.055507336f * ONE);
  power = power * f + splat(0.24022242f * ONE);
  power = power * f + splat(0.693147f * ONE);
  power = power * f + splat(ONE);
  return round_to_int(vscalef(power, n));
}

/* Sums of integers from 0 to 2^31. */
typedef struct {
  U32x16 low, high;
} Sums;

INLINE void add_to(Sums* sums, U32x16 x) {
  sums->low += x & (U32x16)splat_int(0xffff), sums->high += x >> 16;
}
INLINE int64_t reduce(Sums sums) {
  return (int64_t)reduce_add_int((I32x16)sums.low) + ((int64_t)reduce_add_int((I32x16)sums.high) << 16);
}

/* The sum of the weights of a chunk. `filtered`: those below `least` are 0. `stored`: the weights are kept. The memory of
   the next row is fetched meanwhile. */
INLINE int64_t weigh_chunk(const Work* w, int64_t c, float max, float scale, int32_t least, const int filtered,
                           const int stored) {
  const int64_t first = c * CHUNK;
  const float* fetched = w->next && first + CHUNK <= w->V ? w->next + first : w->scores + first;
  Sums sums = {{0}, {0}};
  for (int v = 0; v < CHUNK; v += 2 * LANES) {
    I32x16 weights[2];
    EACH (int i = 0; i < 2; i++) {
      const int64_t at = first + v + i * LANES;
      prefetch_l2(fetched + v + i * LANES);
      weights[i] = weights_of(load(w->scores + at), splat(max), splat(scale));
      if (filtered) weights[i] &= (I32x16)(weights[i] >= splat_int(least));
      if (stored) store_int(w->weights + at, weights[i]);
    }
    add_to(&sums, (U32x16)weights[0] + (U32x16)weights[1]);
  }
  return reduce(sums);
}

/* The sum of all weights, and those of each chunk. */
INLINE int64_t find_weights(const Work* w, float max, float scale, int32_t least, const int filtered,
                            const int stored) {
  int64_t total = 0;
  for (int64_t c = 0; c < w->chunks; c++) total += w->sums[c] = weigh_chunk(w, c, max, scale, least, filtered, stored);
  return total;
}

INLINE void swap(uint64_t* a, uint64_t* b) {
  const uint64_t kept = *a;
  *a = *b, *b = kept;
}

/* The largest key whose key and all larger ones have together at least `needed` of the weights, or at least `needed`
   keys where `weights` is NULL; 0 if all have less. Reorders the keys. */
static uint64_t find_edge(uint64_t* keys, int64_t count, const int32_t* weights, double needed) {
  int64_t first = 0, end = count, before = 0; /* `before`: of the keys that are larger than those in question */
  while (first < end) {
    uint64_t* middle = &keys[first + (end - first) / 2];
    if (keys[first] < *middle) swap(&keys[first], middle);
    if (keys[end - 1] > keys[first])
      swap(&keys[first], &keys[end - 1]);
    else if (keys[end - 1] > *middle)
      swap(middle, &keys[end - 1]);
    const uint64_t pivot = *middle;
    swap(middle, &keys[first]);
    int64_t last = first, sum = 0; /* the last key that is larger than the pivot, and the sum of those */
    for (int64_t i = first + 1; i < end; i++) {
      const int larger = keys[i] > pivot;
      if (!larger) continue;
      sum += weights ? weights[token_of(keys[i])] : 1;
      swap(&keys[++last], &keys[i]);
    }
    swap(&keys[first], &keys[last]);
    if ((double)(before + sum) >= needed) {
      end = last;
      continue;
    }
    before += sum + (weights ? weights[token_of(pivot)] : 1);
    if ((double)before >= needed) return pivot;
    first = last + 1;
  }
  return 0;
}

/* Drops the keys below `edge`, in order. */
static int64_t keep(uint64_t* keys, int64_t count, uint64_t edge) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i++) {
    keys[kept] = keys[i];
    kept += keys[i] >= edge;
  }
  return kept;
}

static uint64_t edge_of(const Work* w, int64_t count, const int32_t* weights, double needed) {
  memcpy(w->order, w->keys, count * sizeof *w->keys);
  return find_edge(w->order, count, weights, needed);
}

/* A score that at least `k` tokens reach: the k-th largest of the maxima, which are of different tokens. Maxima of more
   tokens each do as well while there are many more than `k` of them. Overwrites the maxima. */
static float reached_by(const Work* w, int64_t k) {
  int64_t vectors = w->chunks;
  while (vectors % 2 == 0 && vectors / 2 * LANES >= 4 * k) {
    vectors /= 2;
    for (int64_t i = 0; i < vectors; i++) {
      float* max = w->maxima + i * LANES;
      store(max, vmax(load(max), load(max + vectors * LANES)));
    }
  }
  if (k > vectors * LANES) return -INFINITY;
  for (int64_t i = 0; i < vectors * LANES; i++) w->order[i] = key_of(w->maxima[i], i);
  return w->maxima[token_of(find_edge(w->order, vectors * LANES, NULL, (double)k))];
}

/* The keys of the `k` largest scores, 0 < k <= V, by ascending token. Padding comes after all tokens, so it is never
   among them. Overwrites the maxima, which must be those of the scores. */
static int64_t find_largest(const Work* w, int64_t k) {
  const float least = reached_by(w, k);
  int64_t count = 0;
  for (int64_t at = 0; at < w->V; at += LANES) {
    if (!any_of((I32x16)(load(w->scores + at) >= splat(least)))) continue;
    for (int64_t token = at; token < at + LANES; token++) {
      w->keys[count] = key_of(w->scores[token], token);
      count += w->scores[token] >= least;
    }
  }
  return keep(w->keys, count, edge_of(w, count, NULL, (double)k));
}

/* Sets the weights of the tokens of some keys; their sum. */
static int64_t weigh(const Work* w, int64_t count, float max, float scale) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; i += LANES) {
    float scores[LANES] = {0};
    int32_t weights[LANES];
    const int64_t some = count - i < LANES ? count - i : LANES;
    for (int64_t j = 0; j < some; j++) scores[j] = w->scores[token_of(w->keys[i + j])];
    store_int(weights, weights_of(load(scores), splat(max), splat(scale)));
    for (int64_t j = 0; j < some; j++) total += w->weights[token_of(w->keys[i + j])] = weights[j];
  }
  return total;
}

/* The sum of the weights that are at least `least`. */
static int64_t sum_from(const Work* w, int32_t least) {
  int64_t total = 0;
  for (int64_t c = 0; c < w->chunks; c++) {
    Sums sums = {{0}, {0}};
    for (int v = 0; v < CHUNK; v += LANES) {
      const I32x16 weights = load_int(w->weights + c * CHUNK + v);
      add_to(&sums, (U32x16)(weights & (I32x16)(weights >= splat_int(least))));
    }
    total += reduce(sums);
  }
  return total;
}

/* Keys of all tokens that can be among the most likely ones with `share` of the weights, whose sum is `total`. */
static int64_t find_likely(const Work* w, double share, int64_t total) {
  /* All tokens below the last of these weights have together less than the rest; often fewer tokens are enough. */
  const double rest = (1 - share) * (double)total;
  int32_t least = 0;
  for (double tokens = 256;; tokens *= 8) {
    const double bound = rest / (tokens < (double)w->V ? tokens : (double)w->V);
    least = bound < 1 << 30 ? (int32_t)bound : 1 << 30;
    if (tokens >= (double)w->V || (double)sum_from(w, least) >= share * (double)total) break;
  }
  least -= (least >> 20) + 1; /* weights follow the order of scores but for the rounding of a float */
  int64_t count = 0;
  for (int64_t at = 0; at < w->chunks * CHUNK; at += LANES) {
    if (!any_of((I32x16)(load_int(w->weights + at) >= splat_int(least)))) continue;
    for (int64_t token = at; token < at + LANES; token++) {
      w->keys[count] = key_of(w->scores[token], token);
      count += w->weights[token] >= least;
    }
  }
  return count;
}

INLINE int64_t point_in(uint64_t random, int64_t total) {
  return (int64_t)((unsigned __int128)random * (uint64_t)total >> 64);
}

static int32_t draw(const Work* w, const Row* row, float max) {
  if (row->scale == 0)
    for (int64_t at = 0;; at += LANES) {
      if (!any_of((I32x16)(load(w->scores + at) == splat(max)))) continue;
      while (w->scores[at] != max) at++;
      return (int32_t)at;
    }
  const int few = row->top_k > 0 && row->top_k < w->V;
  if (!few && row->top_p >= 1) {
    int64_t point = point_in(row->random, find_weights(w, max, row->scale, row->least, 1, 0)), c = 0;
    while (point >= w->sums[c]) point -= w->sums[c++];
    weigh_chunk(w, c, max, row->scale, row->least, 1, 1);
    int64_t token = c * CHUNK;
    while (point >= w->weights[token]) point -= w->weights[token++];
    return (int32_t)token;
  }
  int64_t count, total;
  if (few) {
    count = find_largest(w, row->top_k);
    total = weigh(w, count, max, row->scale);
  } else {
    total = find_weights(w, max, row->scale, 0, 0, 1);
    count = find_likely(w, row->top_p, total);
  }
  if (row->top_p < 1) count = keep(w->keys, count, edge_of(w, count, w->weights, row->top_p * (double)total));
  total = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t weight = w->weights[token_of(w->keys[i])];
    total += weight >= row->least ? weight : 0;
  }
  int64_t point = point_in(row->random, total), i = 0;
  for (;; i++) {
    const int32_t weight = w->weights[token_of(w->keys[i])];
    if (weight < row->least) continue;
    if (point < weight) return (int32_t)token_of(w->keys[i]);
    point -= weight;
  }
}

/* The likeliest tokens of the logits as they are, from the likeliest on, and the sum of all weights. */
static void find_top(const Work* w, Row* row) {
  row->max = find_maxima(w);
  row->total = 0;
  if (row->max == -INFINITY) return;
  row->total = find_weights(w, row->max, LOG2_E, 0, 0, 0);
  if (!row->top) return;
  const int64_t count = find_largest(w, row->top);
  for (int64_t i = 1; i < count; i++) /* few of them */
    for (int64_t j = i; j > 0 && w->keys[j] > w->keys[j - 1]; j--) swap(&w->keys[j], &w->keys[j - 1]);
  for (int64_t i = 0; i < count; i++) row->top_tokens[i] = (int32_t)token_of(w->keys[i]);
}

void tapeout_sample_1(Row* const* rows, int64_t count, int64_t V, void* memory) {
  Work w = work_in(memory, V);
  for (int64_t i = 0; i < count; i++) {
    Row* row = rows[i];
    row->token = NOT_FINITE;
    w.next = i + 1 < count ? rows[i + 1]->logits : NULL;
    if (!copy(&w, row->logits)) continue;
    if (row->top >= 0) find_top(&w, row);
    if (!adjust(&w, row)) continue;
    const float max = find_maxima(&w);
    row->token = max == -INFINITY ? NONE_LEFT : draw(&w, row, max);
  }
}
