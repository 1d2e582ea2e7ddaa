/* CachedAttention: rotary, attention over a cache of keys and values, and the cache's new rows, in one operator.

     query [B, S, H·D] float, key and value [B, S, KV·D] float; or query, key and value packed, [B, S, (H + 2·KV)·D]
     past key and value [B, KV, T, D], float or int8 with scales [KV, D]; present ones where they lie, or a copy
     lengths [B] int32, what a row's tokens are after this step, less one; tables of cosines and sines [.., D / 2]
     y [B, S, H·D] float

   Row b's tokens are the last S of its length. Each sees keys up to itself, the last `local_window_size` of them where
   there is a window.

   Work is cut into units: a row's queries of one key head, of a few neighbouring tokens. A unit passes its keys in
   tiles of 64 from the first, with a softmax that is corrected as larger scores turn up. What a query computes depends
   on its own keys alone, not on the batch, nor on how a prompt is cut into steps.

   Codes are never scaled back: the scales of keys go into the query, those of values into the result. With AVX-512
   queries and weights become numbers of 24 bits, by their largest, in three digits of 8: products are sums of integers,
   four to an instruction, as good as products of floats and in fewer instructions. With weights of two digits prompts
   took an eighth less, and results were off by up to 1e-4 of the largest. Without AVX-512 codes become floats, a tile at
   a time: digits took twice as long for prompts.

   Names: H query heads, KV key heads, D channels of a head, T tokens there is room for. A row is a query from where a
   unit begins, a step what a lane multiplies at once: a channel, or four of codes. */
#include "ort.h"
#include "vector.h"

#include <stdlib.h>
#include <string.h>

/* A unit has about UNIT_ROWS queries, which pass a tile in groups of up to ROWS. */
enum { VECTORS = 4, KEYS = LANES * VECTORS, ROWS = 6, DIGITS = 3, UNIT_ROWS = 48, LARGEST_HEAD = 512 };
enum { AHEAD = 2 };  /* units: one would be with another thread by now */
enum { FEW = 4096 }; /* products of a query and a key that are over before another thread has woken up */

static const float HIDDEN = -1e30f, LOG2_E = 1.44269504f;
static const float LARGEST_WEIGHT = (1 << 24) - 64;

typedef struct {
  Api api;
  int64_t heads, kv_heads, rotary, interleaved, window;
  float scale, softcap;
  _Atomic int checked;
} Kernel;

typedef struct {
  const Kernel* kernel;
  int64_t B, S, D, T, group, codes; /* codes: whether the cache is int8 */
  const float *query, *key, *value; /* of the first token */
  int64_t query_stride, key_stride; /* from a token to the next */
  const char *past_key, *past_value;
  char *present_key, *present_value;
  const int32_t* last;
  const float *cosines, *sines, *key_scale, *value_scale;
  float* y;
  int64_t blocks; /* units of a row and key head */
  _Atomic int out_of_memory;
} Work;

/* A unit's memory. */
typedef struct {
  int64_t rows, first; /* position of the first token */
  char* queries;       /* [rows, D] float, or [rows, DIGITS, D] int8 */
  int32_t* offsets;    /* [rows, DIGITS] what makes up for the 128 that is added to a key's codes */
  float* steps;        /* [rows] from a product to a score, in powers of two */
  float* largest;      /* [rows] score so far */
  float* sums;         /* [rows, LANES] of weights */
  float* outputs;      /* [rows, D] sums of values times weights */
  char* keys;          /* [steps, KEYS] words of four bytes: a tile, turned */
  char* values;        /* of a tile of codes: [KEYS / 4, D] words of four keys' codes, or [KEYS, D] float */
} Unit;

/* 2 to the x times `unit`, exact where x is whole, 0 where x is far below. The polynomial, whose first coefficient is
   held at 1, is the one of its degree that is nowhere off by more than 2e-7 of 2^f, for f from 0 to 1. */
INLINE Floats power(Floats x, const float unit) {
  Floats f = fraction(x), y = same(0.0018671304f * unit);
  y = multiply_add(y, f, same(0.0090170300f * unit));
  y = multiply_add(y, f, same(0.055799913f * unit));
  y = multiply_add(y, f, same(0.24016444f * unit));
  y = multiply_add(y, f, same(0.69315130f * unit));
  y = multiply_add(y, f, same(unit));
  return scaled(y, x);
}

/* Query or key at a position, turned. `to` may not be `from`. */
static void rotate(const Work* w, const float* from, int64_t position, float* to) {
  int64_t half = w->D / 2;
  if (!w->kernel->rotary) {
    memcpy(to, from, w->D * sizeof(float));
    return;
  }
  const float *cosines = w->cosines + position * half, *sines = w->sines + position * half;
  if (w->kernel->interleaved) {
    for (int64_t i = 0; i < half; i++) {
      to[2 * i] = from[2 * i] * cosines[i] - from[2 * i + 1] * sines[i];
      to[2 * i + 1] = from[2 * i + 1] * cosines[i] + from[2 * i] * sines[i];
    }
    return;
  }
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    Floats c = load(cosines + i), s = load(sines + i), a = load(from + i), b = load(from + half + i);
    Floats turned = b * s, other = a * s;
    store(to + i, multiply_add(a, c, -turned));
    store(to + half + i, multiply_add(b, c, other));
  }
  if (i < half) {
    const int64_t left = half - i; /* eight */
    Floats c = load_first(cosines + i, left), s = load_first(sines + i, left);
    Floats a = load_first(from + i, left), b = load_first(from + half + i, left);
    Floats turned = b * s, other = a * s;
    store_first(to + i, multiply_add(a, c, -turned), left);
    store_first(to + half + i, multiply_add(b, c, other), left);
  }
}

static void round_to_codes(const float* from, const float* scale, int64_t count, int8_t* to) {
  for (int64_t i = 0; i < count; i += LANES) store_codes(to + i, saturated(rounded(load(from + i) / load(scale + i))));
}

/* The new rows of a sequence's cache of one key head. */
static void write(void* state, size_t index) {
  const Work* w = state;
  const Kernel* k = w->kernel;
  int64_t b = index / k->kv_heads, head = index % k->kv_heads, D = w->D;
  int64_t size = w->codes ? D : D * (int64_t)sizeof(float), first = w->last[b] + 1 - w->S, at = index * w->T * size;
  if (w->present_key != w->past_key) memcpy(w->present_key + at, w->past_key + at, first * size);
  if (w->present_value != w->past_value) memcpy(w->present_value + at, w->past_value + at, first * size);
  float turned[LARGEST_HEAD];
  for (int64_t s = 0; s < w->S; s++) {
    int64_t token = (b * w->S + s) * w->key_stride + head * D;
    char *to_key = w->present_key + at + (first + s) * size, *to_value = w->present_value + at + (first + s) * size;
    if (w->codes) {
      rotate(w, w->key + token, first + s, turned);
      round_to_codes(turned, w->key_scale + head * D, D, (int8_t*)to_key);
      round_to_codes(w->value + token, w->value_scale + head * D, D, (int8_t*)to_value);
    } else {
      rotate(w, w->key + token, first + s, (float*)to_key);
      memcpy(to_value, w->value + token, size);
    }
  }
}

/* SQUARE keys' SQUARE words, or the `count` and `left` there are, turned; `flip` changes bits of each word. */
INLINE void pack_square(const char* from, int64_t words, int64_t count, int64_t left, int32_t flip, char* to) {
  Line x[SQUARE];
  EACH (int i = 0; i < SQUARE; i++) x[i] = load_line(from + 4 * i * words, i < count ? left : 0) ^ flip;
  turn(x);
  EACH (int i = 0; i < SQUARE; i++)
    if (i < left) memcpy(to + 4 * i * KEYS, &x[i], sizeof x[i]);
}

/* `count` keys of `words` words each, to `to` as [words, KEYS], with some bits of each changed. */
INLINE void pack_keys(const char* from, int64_t count, int64_t words, const int32_t flip, char* to) {
  for (int64_t key = 0; key < count; key += SQUARE)
    for (int64_t word = 0; word < words; word += SQUARE) {
      const char* corner = from + 4 * (key * words + word);
      char* column = to + 4 * (word * KEYS + key);
      if (count - key >= SQUARE && words - word >= SQUARE)
        pack_square(corner, words, SQUARE, SQUARE, flip, column);
      else
        pack_square(corner, words, count - key, words - word < SQUARE ? words - word : SQUARE, flip, column);
    }
}

#define FOR_ROWS(call)      \
  switch (rows) {           \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 5: call(5); break; \
    case 6: call(6); break; \
  }

/* How many vectors of sums of `rows` queries are held in registers at once, with other vectors beside them. */
INLINE int vectors_of(const int rows) {
  return AVX512 || rows == 1 ? VECTORS : rows <= 3 ? 2 : 1;
}

/* Products of `rows` queries with all keys of a tile; `rows` is a constant where these are inlined. */
INLINE void multiply_floats(const Unit* unit, int64_t row, int64_t D, float (*products)[KEYS], const int rows) {
  const float* query = (const float*)unit->queries + row * D;
  const int vectors = vectors_of(rows);
  for (int64_t key = 0; key < KEYS; key += vectors * LANES) {
    Floats sum[ROWS][VECTORS];
    EACH (int r = 0; r < rows; r++)
      EACH (int v = 0; v < vectors; v++) sum[r][v] = (Floats){0};
    for (int64_t i = 0; i < D; i++) {
      Floats keys[VECTORS];
      EACH (int v = 0; v < vectors; v++) keys[v] = load(unit->keys + 4 * (i * KEYS + key + v * LANES));
      EACH (int r = 0; r < rows; r++) {
        Floats one = same(query[r * D + i]);
        EACH (int v = 0; v < vectors; v++) sum[r][v] = multiply_add(keys[v], one, sum[r][v]);
      }
    }
    EACH (int r = 0; r < rows; r++)
      EACH (int v = 0; v < vectors; v++) store(products[r] + key + v * LANES, sum[r][v]);
  }
}

/* outputs = outputs · keep + result · take, for a query's `vectors` of channels. */
INLINE void add_values(const Floats* result, float keep, float take, float* outputs, const int vectors) {
  EACH (int v = 0; v < vectors; v++) {
    Floats kept = load(outputs + v * LANES) * same(keep);
    store(outputs + v * LANES, multiply_add(result[v], same(take), kept));
  }
}

/* Adds `count` values times weights to the outputs of `rows` queries, to `vectors` of their channels, which are
   constants where these are inlined. */
INLINE void add_floats(const char* values, int64_t count, int64_t D, const char (*weights)[4 * KEYS], const float* keep,
                       const float* take, float* outputs, const int rows, const int vectors) {
  Floats sum[ROWS][VECTORS];
  EACH (int r = 0; r < rows; r++)
    EACH (int v = 0; v < vectors; v++) sum[r][v] = (Floats){0};
  for (int64_t key = 0; key < count; key++) {
    Floats one[VECTORS];
    EACH (int v = 0; v < vectors; v++) one[v] = load(values + 4 * (key * D + v * LANES));
    EACH (int r = 0; r < rows; r++) {
      Floats weight = same(((const float*)weights[r])[key]);
      EACH (int v = 0; v < vectors; v++) sum[r][v] = multiply_add(weight, one[v], sum[r][v]);
    }
  }
  EACH (int r = 0; r < rows; r++) add_values(sum[r], keep[r], take[r], outputs + r * D, vectors);
}

/* The same of any number of rows up to ROWS, and all channels. */
static void multiply_rows(const Unit* unit, int64_t row, int rows, int64_t D, float (*products)[KEYS]) {
#define KEYS_OF(n) multiply_floats(unit, row, D, products, n)
  FOR_ROWS(KEYS_OF)
}

static void add_rows(const char* values, int64_t count, int64_t D, const char (*weights)[4 * KEYS], const float* keep,
                     const float* take, float* outputs, int rows) {
  for (int64_t channel = 0; channel < D;) {
    const int wide = D - channel >= vectors_of(rows) * LANES;
    const char* from = values + 4 * channel;
    float* to = outputs + channel;
#define FLOATS_OF(n)                                                       \
  if (wide)                                                                \
    add_floats(from, count, D, weights, keep, take, to, n, vectors_of(n)); \
  else                                                                     \
    add_floats(from, count, D, weights, keep, take, to, n, 1)
    FOR_ROWS(FLOATS_OF)
    channel += wide ? vectors_of(rows) * LANES : LANES;
  }
}

/* Codes: a query is taken, a tile's keys and values are packed, and both products. */
#if AVX512
/* A query times the scales of keys, as digits; returns what the last of them counts. */
static float take_query(const float* query, const float* scale, int64_t D, const Unit* unit, int64_t row) {
  int8_t* digits = (int8_t*)unit->queries + row * DIGITS * D;
  Floats largest = {0};
  for (int64_t i = 0; i < D; i += LANES) largest = larger(largest, magnitude(load(query + i) * load(scale + i)));
  const float top = largest_of(largest), LARGEST_QUERY = 127 * 65536;
  Floats inverse = same(top > 0 ? LARGEST_QUERY / top : 0.0f);
  Words sums[DIGITS];
  EACH (int d = 0; d < DIGITS; d++) sums[d] = (Words){0};
  for (int64_t i = 0; i < D; i += LANES) {
    Words rest = rounded(load(query + i) * load(scale + i) * inverse);
    EACH (int d = DIGITS - 1; d >= 0; d--) {
      FewCodes digit = low_bytes(rest);
      store_codes(digits + d * D + i, digit);
      sums[d] += widened(digit);
      rest = (rest + 128) >> 8;
    }
  }
  EACH (int d = 0; d < DIGITS; d++) unit->offsets[row * DIGITS + d] = -128 * sum_of_words(sums[d]);
  return top / LARGEST_QUERY;
}

/* Codes of up to four values, to `to` as [D] words of four keys' codes. */
INLINE void pack_four(const char* from, int64_t D, const int64_t count, char* to) {
  const FewCodes none = {0};
  for (int64_t i = 0; i < D; i += LANES) {
    const char* at = from + i;
    FewCodes second = count > 1 ? load_codes(at + D) : none, third = count > 2 ? load_codes(at + 2 * D) : none;
    FewCodes fourth = count > 3 ? load_codes(at + 3 * D) : none;
    store_words(to + 4 * i, interleaved(load_codes(at), second, third, fourth));
  }
}

/* Keys as [D / 4, KEYS] words of their codes, which become unsigned, as one side of an instruction's product has to be,
   by 128 that are added; values as [count / 4, D] words of four keys' codes. */
static void pack_codes(const Unit* unit, const char* keys, const char* values, int64_t count, int64_t D) {
  pack_keys(keys, count, D / 4, (int32_t)0x80808080, unit->keys);
  int64_t key = 0;
  for (; key + 4 <= count; key += 4) pack_four(values + key * D, D, 4, unit->values + key * D);
  if (key < count) pack_four(values + key * D, D, count - key, unit->values + key * D);
}

/* Of three digits' sums. Two of them fit 32 bits together, for up to LARGEST_HEAD products. */
INLINE Floats number(Words high, Words middle, Words low) {
  return multiply_add(to_floats((high << 8) + middle), same(256), to_floats(low));
}

INLINE void multiply_digits(const Unit* unit, int64_t row, int64_t D, float (*products)[KEYS], const int rows) {
  const char* query = unit->queries + row * DIGITS * D;
  Words sum[2][DIGITS][VECTORS];
  EACH (int r = 0; r < rows; r++)
    EACH (int d = 0; d < DIGITS; d++) {
      Words offset = same_word(unit->offsets[(row + r) * DIGITS + d]);
      EACH (int v = 0; v < VECTORS; v++) sum[r][d][v] = offset;
    }
  for (int64_t i = 0; i < D; i += 4) {
    Words keys[VECTORS];
    EACH (int v = 0; v < VECTORS; v++) keys[v] = load_words(unit->keys + i * KEYS + 4 * v * LANES);
    EACH (int r = 0; r < rows; r++)
      EACH (int d = 0; d < DIGITS; d++) {
        Words four = same_four(query + (r * DIGITS + d) * D + i);
        EACH (int v = 0; v < VECTORS; v++) sum[r][d][v] = dot(sum[r][d][v], keys[v], four);
      }
  }
  EACH (int r = 0; r < rows; r++)
    EACH (int v = 0; v < VECTORS; v++) store(products[r] + v * LANES, number(sum[r][0][v], sum[r][1][v], sum[r][2][v]));
}

INLINE void multiply_codes(const Unit* unit, int64_t row, int rows, int64_t D, float (*products)[KEYS]) {
  for (int r = 0; r + 2 <= rows; r += 2) multiply_digits(unit, row + r, D, products + r, 2);
  if (rows % 2) multiply_digits(unit, row + rows - 1, D, products + rows - 1, 1);
}

INLINE void add_digits(const char* values, int64_t count, int64_t D, const char (*weights)[4 * KEYS], const float* keep,
                       const float* take, float* outputs, const int rows, const int vectors) {
  Words sum[2][DIGITS][VECTORS];
  EACH (int r = 0; r < rows; r++)
    EACH (int d = 0; d < DIGITS; d++)
      EACH (int v = 0; v < vectors; v++) sum[r][d][v] = (Words){0};
  for (int64_t key = 0; key < count; key += 4) {
    Words four[VECTORS];
    EACH (int v = 0; v < vectors; v++) four[v] = load_words(values + key * D + 4 * v * LANES);
    EACH (int r = 0; r < rows; r++)
      EACH (int d = 0; d < DIGITS; d++) {
        Words digits = same_four(weights[r] + 4 * (key + d));
        EACH (int v = 0; v < vectors; v++) sum[r][d][v] = dot(sum[r][d][v], digits, four[v]);
      }
  }
  EACH (int r = 0; r < rows; r++) {
    Floats result[VECTORS];
    EACH (int v = 0; v < vectors; v++) result[v] = number(sum[r][0][v], sum[r][1][v], sum[r][2][v]);
    add_values(result, keep[r], take[r], outputs + r * D, vectors);
  }
}

INLINE void add_codes(const char* values, int64_t count, int64_t D, const char (*weights)[4 * KEYS], const float* keep,
                      const float* take, float* outputs, int rows) {
  for (int64_t channel = 0; channel < D;) {
    const int wide = D - channel >= VECTORS * LANES;
    const char* from = values + 4 * channel;
    for (int r = 0; r < rows; r += 2) {
      float* to = outputs + r * D + channel;
#define DIGITS_OF(n, v) add_digits(from, count, D, weights + r, keep + r, take + r, to, n, v)
      if (rows - r >= 2) {
        if (wide)
          DIGITS_OF(2, VECTORS);
        else
          DIGITS_OF(2, 1);
      } else if (wide)
        DIGITS_OF(1, VECTORS);
      else
        DIGITS_OF(1, 1);
    }
    channel += wide ? VECTORS * LANES : LANES;
  }
}
#else
/* A query times the scales of keys; returns what is left to multiply by. */
static float take_query(const float* query, const float* scale, int64_t D, const Unit* unit, int64_t row) {
  float* to = (float*)unit->queries + row * D;
  for (int64_t i = 0; i < D; i += LANES) store(to + i, load(query + i) * load(scale + i));
  return 1;
}

/* As floats, [D, KEYS] and [count, D]. Keys are turned as words of four codes, which takes a quarter of the time. */
static void pack_codes(const Unit* unit, const char* keys, const char* values, int64_t count, int64_t D) {
  char* words = unit->values; /* not in use yet */
  pack_keys(keys, count, D / 4, 0, words);
  for (int64_t channel = 0; channel < D; channel += 4)
    for (int64_t key = 0; key < KEYS; key += LANES) {
      Words four = load_words(words + channel * KEYS + 4 * key);
      EACH (int i = 0; i < 4; i++)
        store(unit->keys + 4 * ((channel + i) * KEYS + key), to_floats(four << (24 - 8 * i) >> 24));
    }
  for (int64_t i = 0; i < count * D; i += LANES)
    store(unit->values + 4 * i, to_floats(widened(load_codes(values + i))));
}

#define multiply_codes multiply_rows
#define add_codes      add_rows
#endif

/* Queries of `unit`, one after the other for the heads of a group and then for the next token. */
static void take_queries(const Work* w, const Unit* unit, int64_t token, int64_t head) {
  const Kernel* k = w->kernel;
  int64_t D = w->D;
  float* turned = (float*)unit->keys; /* not in use yet */
  const float in_powers_of_two = k->scale * LOG2_E;
  for (int64_t r = 0; r < unit->rows; r++) {
    const float* from = w->query + (token + r / w->group) * w->query_stride + (head * w->group + r % w->group) * D;
    unit->steps[r] = in_powers_of_two;
    if (w->codes) {
      rotate(w, from, unit->first + r / w->group, turned);
      unit->steps[r] *= take_query(turned, w->key_scale + head * D, D, unit, r);
    } else {
      rotate(w, from, unit->first + r / w->group, (float*)unit->queries + r * D);
    }
    unit->largest[r] = HIDDEN;
  }
  memset(unit->sums, 0, unit->rows * LANES * sizeof(float));
  memset(unit->outputs, 0, unit->rows * D * sizeof(float));
}

/* The keys of a tile from `start` that a token at `position` sees, a bit each. */
static uint64_t visible(const Kernel* k, int64_t position, int64_t start) {
  int64_t end = position + 1 - start, begin = k->window ? end - k->window : 0;
  if (end <= 0 || begin >= KEYS) return 0;
  uint64_t seen = end >= KEYS ? ~0ull : (1ull << end) - 1;
  return begin > 0 ? seen & ~((1ull << begin) - 1) : seen;
}

/* cap · tanh(score / cap), as tanh(x) = 1 - 2 / (exp(2x) + 1); scores are in powers of two. */
INLINE Floats limited(Floats score, float cap) {
  Floats x = smaller(score * same(2 / cap), same(60));
  Floats above_one = power(x, 1) + same(1);
  return (same(1) - same(2) / above_one) * same(cap * LOG2_E);
}

/* For every four weights their high digits, the next, the low, and nothing. */
#define FOUR(i) i + 2, i + 6, i + 10, i + 14, i + 1, i + 5, i + 9, i + 13, i, i + 4, i + 8, i + 12, 64, 64, 64, 64
INLINE Words digits_of(Words x) {
  return (Words)__builtin_shufflevector((Codes)x, (Codes){0}, FOUR(0), FOUR(16), FOUR(32), FOUR(48));
}

/* From products to weights of a tile, for up to ROWS queries; what of their sums to keep, and what to take of this
   tile's. Weights are floats, or `digits`, which is a constant where this is inlined, as is
   `plain`: all keys of the tile are seen, by all queries, and there is no cap. */
INLINE void weigh(const Work* w, const Unit* unit, int64_t row, int rows, const uint64_t* seen, float (*scores)[KEYS],
                  char (*weights)[4 * KEYS], float* keep, float* take, const int plain, const int digits) {
  const float cap = plain ? 0 : w->kernel->softcap;
  float steps[ROWS], largest[LANES] = {0};
  for (int r = 0; r < rows; r++) {
    steps[r] = cap ? 1 : unit->steps[row + r];
    Floats top = same(HIDDEN);
    EACH (int v = 0; v < VECTORS; v++) {
      Floats score = load(scores[r] + v * LANES);
      if (cap) score = limited(score * same(unit->steps[row + r]), cap);
      if (!plain) {
        score = choose(lanes_of(seen[r] >> (v * LANES)), score, same(HIDDEN));
        store(scores[r] + v * LANES, score);
      }
      top = larger(top, score);
    }
    /* Just above the largest score: what a product that is not rounded on the way may come to. */
    largest[r] = largest_of(top) * steps[r];
    largest[r] += (largest[r] < 0 ? -largest[r] : largest[r]) * 2.4e-7f;
  }
  Floats before = load_first(unit->largest + row, rows), here = load(largest);
  Floats now = larger(before, here);
  store_first(unit->largest + row, now, rows);
  store(keep, power(before - now, 1));
  store(take, power(here - now, 1));
  for (int r = 0; r < rows; r++) {
    const Floats top = same(largest[r]), step = same(steps[r]);
    Floats sum = {0};
    Words whole_sum = {0};
    EACH (int v = 0; v < VECTORS; v++) {
      Floats x = multiply_add(load(scores[r] + v * LANES), step, -top);
      x = power(x, digits ? LARGEST_WEIGHT : 1);
      if (!plain) x = choose(lanes_of(seen[r] >> (v * LANES)), x, same(0));
      char* to = weights[r] + 4 * v * LANES;
      if (digits) {
        Words number = rounded(x);
        whole_sum += number;
        store_words(to, digits_of(number));
      } else {
        sum += x;
        store(to, x);
      }
    }
    if (digits) sum = to_floats(whole_sum);
    float* sums = unit->sums + (row + r) * LANES;
    Floats kept = load(sums) * same(keep[r]);
    store(sums, multiply_add(sum, same(take[r]), kept));
  }
}

/* A tile's `count` keys and values, for all queries of a unit. `codes` is a constant where this is inlined. */
INLINE void attend_tile(const Work* w, const Unit* unit, const char* keys, const char* values, int64_t start,
                        int64_t count, const int codes) {
  const int64_t D = w->D, groups = (unit->rows + ROWS - 1) / ROWS;
  if (codes) {
    pack_codes(unit, keys, values, count, D);
    values = unit->values;
  } else {
    pack_keys(keys, count, D, 0, unit->keys);
  }
  for (int64_t g = 0; g < groups; g++) {
    const int64_t row = unit->rows * g / groups;
    const int rows = (int)(unit->rows * (g + 1) / groups - row);
    float* outputs = unit->outputs + row * D;
    _Alignas(64) float scores[ROWS][KEYS];
    _Alignas(64) char weights[ROWS][4 * KEYS];
    _Alignas(64) float keep[LANES], take[LANES];
    if (codes)
      multiply_codes(unit, row, rows, D, scores);
    else
      multiply_rows(unit, row, rows, D, scores);
    uint64_t seen[ROWS];
    int plain = !w->kernel->softcap;
    for (int r = 0; r < rows; r++) {
      seen[r] = visible(w->kernel, unit->first + (row + r) / w->group, start);
      plain &= seen[r] == ~0ull;
    }
    if (plain)
      weigh(w, unit, row, rows, seen, scores, weights, keep, take, 1, codes && AVX512);
    else
      weigh(w, unit, row, rows, seen, scores, weights, keep, take, 0, codes && AVX512);
    if (codes)
      add_codes(values, count, D, weights, keep, take, outputs, rows);
    else
      add_rows(values, count, D, weights, keep, take, outputs, rows);
  }
}

/* Asks memory for keys and values of a unit to come, while there is a tile to compute. */
static void announce(const char* keys, const char* values, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    _mm_prefetch(keys + at, _MM_HINT_T1);
    _mm_prefetch(values + at, _MM_HINT_T1);
  }
}

/* The next `bytes` of `memory`, from a cache line's beginning to one. */
static void* take_from(char** memory, size_t bytes) {
  char* taken = *memory;
  *memory += (bytes + 63) / 64 * 64;
  return taken;
}

/* False where there is no memory. */
static int make_unit(const Work* w, int64_t rows, int64_t first, Unit* unit) {
  const size_t words = rows * w->D, parts = 8; /* each of which may fill up a line */
  const size_t bytes = 4 * (2 * words + rows * (DIGITS + 2 + LANES)) + 4 * KEYS * w->D * 2 + 64 * parts;
  char* memory = scratch(SCRATCH_ATTENTION, bytes);
  if (!memory) return 0;
  unit->rows = rows, unit->first = first;
  unit->queries = take_from(&memory, words * sizeof(float));
  unit->offsets = take_from(&memory, rows * DIGITS * sizeof(int32_t));
  unit->steps = take_from(&memory, rows * sizeof(float));
  unit->largest = take_from(&memory, rows * sizeof(float));
  unit->sums = take_from(&memory, rows * LANES * sizeof(float));
  unit->outputs = take_from(&memory, words * sizeof(float));
  unit->keys = take_from(&memory, KEYS * w->D * sizeof(float));
  unit->values = take_from(&memory, KEYS * w->D * sizeof(float));
  return 1;
}

static void attend(void* state, size_t index) {
  Work* w = state;
  const Kernel* k = w->kernel;
  const int64_t D = w->D, all = w->B * k->kv_heads;
  /* Of a prompt the last tokens first: they have most to do, and threads shall end together. */
  const int64_t of_row = index % all, block = w->blocks - 1 - index / all;
  const int64_t b = of_row / k->kv_heads, head = of_row % k->kv_heads;
  const int64_t begin = w->S * block / w->blocks, end = w->S * (block + 1) / w->blocks;
  if (w->blocks == 1) write(state, of_row);
  Unit unit;
  if (!make_unit(w, (end - begin) * w->group, w->last[b] + 1 - w->S + begin, &unit)) {
    w->out_of_memory = 1;
    return;
  }
  take_queries(w, &unit, b * w->S + begin, head);
  const int64_t size = w->codes ? D : D * (int64_t)sizeof(float), total = unit.first + end - begin;
  const char *keys = w->present_key + of_row * w->T * size, *values = w->present_value + of_row * w->T * size;
  int64_t from = k->window ? unit.first + 1 - k->window : 0;
  from = from > 0 ? from / KEYS * KEYS : 0;
  const int64_t tokens_later = w->blocks == 1 && of_row + AHEAD < all ? w->last[(of_row + AHEAD) / k->kv_heads] + 1 : 0;
  for (int64_t start = from; start < total; start += KEYS) {
    const int64_t count = total - start < KEYS ? total - start : KEYS;
    const int64_t later = tokens_later - start;
    if (later > 0) {
      const int64_t there = (AHEAD * w->T + start) * size;
      announce(keys + there, values + there, (later < KEYS ? later : KEYS) * size);
    }
    if (w->codes)
      attend_tile(w, &unit, keys + start * size, values + start * size, start, count, 1);
    else
      attend_tile(w, &unit, keys + start * size, values + start * size, start, count, 0);
  }
  for (int64_t r = 0; r < unit.rows; r++) {
    const int64_t token = b * w->S + begin + r / w->group;
    float* to = w->y + (token * k->heads + head * w->group + r % w->group) * D;
    Floats inverse = same(1 / sum_of(load(unit.sums + r * LANES)));
    for (int64_t i = 0; i < D; i += LANES) {
      Floats y = load(unit.outputs + r * D + i) * inverse;
      if (w->codes) y *= load(w->value_scale + head * D + i);
      store(to + i, y);
    }
  }
}

enum { QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LENGTHS, COSINES, SINES, KEY_SCALE, VALUE_SCALE, INPUTS };

/* That what is read without looking has the sizes of what was looked at, once: a graph's shapes hold together. */
static Status* check(Kernel* k, Context* context, const Work* w, int64_t width) {
  Api api = k->api;
  const int64_t row = k->kv_heads * w->D, tokens = w->B * w->S;
  const Value *key = input(api, context, KEY), *key_scale = input(api, context, KEY_SCALE),
              *value_scale = input(api, context, VALUE_SCALE);
  if (width != w->query_stride || !holds(api, input(api, context, PAST_VALUE), w->B * row * w->T) ||
      (key && (!holds(api, key, tokens * row) || !holds(api, input(api, context, VALUE), tokens * row))) ||
      (w->codes && (!holds(api, key_scale, row) || !holds(api, value_scale, row))))
    return failure(api, ERROR_ARGUMENT, "CachedAttention: inputs whose shapes do not fit each other");
  k->checked = 1;
  return NULL;
}

static Status* compute(void* self, Context* context) {
  Kernel* k = self;
  Api api = k->api;
  int64_t dims[8], cache[8], table[8];
  int type = 0;
  const Value *query = input(api, context, QUERY), *past = input(api, context, PAST_KEY);
  if (dimensions(api, query, dims, NULL) != 3 || dimensions(api, past, cache, &type) != 4)
    return failure(api, ERROR_ARGUMENT, "CachedAttention: queries have three axes, a cache four");
  Work w = {.kernel = k, .B = dims[0], .S = dims[1], .D = cache[3], .T = cache[2]};
  w.group = k->heads / k->kv_heads;
  w.codes = type == INT8;
  if (w.D % LANES || w.D > LARGEST_HEAD || cache[1] != k->kv_heads || cache[0] != w.B || (!w.codes && type != FLOAT))
    return failure(api, ERROR_ARGUMENT, "CachedAttention: a cache of a shape or type it was not built for");
  w.query = data_of(api, query);
  w.key = data_of(api, input(api, context, KEY));
  w.value = data_of(api, input(api, context, VALUE));
  w.query_stride = k->heads * w.D, w.key_stride = k->kv_heads * w.D;
  if (!w.key) {
    w.key = w.query + w.query_stride, w.value = w.key + w.key_stride;
    w.query_stride = w.key_stride = (k->heads + 2 * k->kv_heads) * w.D;
  }
  if (dims[2] != w.query_stride) return failure(api, ERROR_ARGUMENT, "CachedAttention: queries of another width");
  w.past_key = data_of(api, past);
  w.past_value = data_of(api, input(api, context, PAST_VALUE));
  const Value* lengths = input(api, context, LENGTHS);
  if (!holds(api, lengths, w.B)) return failure(api, ERROR_ARGUMENT, "CachedAttention: not one length a row");
  w.last = data_of(api, lengths);
  w.key_scale = data_of(api, input(api, context, KEY_SCALE));
  w.value_scale = data_of(api, input(api, context, VALUE_SCALE));
  if (w.codes && (!w.key_scale || !w.value_scale))
    return failure(api, ERROR_ARGUMENT, "CachedAttention: a cache of codes without scales");
  if (!k->checked) TRY(check(k, context, &w, dims[2]));
  int64_t positions = w.T;
  if (k->rotary) {
    const Value* cosines = input(api, context, COSINES);
    w.cosines = data_of(api, cosines);
    w.sines = data_of(api, input(api, context, SINES));
    if (!w.cosines || !w.sines || dimensions(api, cosines, table, NULL) != 2 || table[1] != w.D / 2)
      return failure(api, ERROR_ARGUMENT, "CachedAttention: rotary tables are missing or of another width");
    if (table[0] < positions) positions = table[0];
  }
  int64_t products = 0;
  for (int64_t b = 0; b < w.B; b++) {
    if (w.last[b] + 1 < w.S || w.last[b] >= positions)
      return failure(api, ERROR_ARGUMENT, "CachedAttention: a row is shorter than its tokens or longer than its cache");
    products += (w.last[b] + 1) * w.S * k->heads;
  }
  dims[2] = k->heads * w.D;
  TRY(output(api, context, 0, dims, 3, &w.y));
  TRY(output(api, context, 1, cache, 4, &w.present_key));
  TRY(output(api, context, 2, cache, 4, &w.present_value));
  if (!w.B || !w.S) return NULL;
  const int64_t tokens = w.group < UNIT_ROWS ? UNIT_ROWS / w.group : 1;
  w.blocks = (w.S + tokens - 1) / tokens;
  const int64_t caches = w.B * k->kv_heads;
  if (products <= FEW) {
    if (w.blocks > 1)
      for (int64_t i = 0; i < caches; i++) write(&w, i);
    for (int64_t i = 0; i < caches * w.blocks; i++) attend(&w, i);
  } else {
    if (w.blocks > 1) TRY(parallel(api, context, write, caches, &w));
    TRY(parallel(api, context, attend, caches * w.blocks, &w));
  }
  return w.out_of_memory ? failure(api, ERROR_FAIL, "CachedAttention: out of memory") : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  (void)op;
  Kernel* k = calloc(1, sizeof *k);
  if (!k) return failure(api, ERROR_FAIL, "CachedAttention: out of memory");
  k->api = api;
  k->heads = attribute_int(api, info, "num_heads", 0);
  k->kv_heads = attribute_int(api, info, "kv_num_heads", 0);
  k->rotary = attribute_int(api, info, "do_rotary", 0);
  k->interleaved = attribute_int(api, info, "rotary_interleaved", 0);
  k->window = attribute_int(api, info, "local_window_size", 0);
  k->scale = attribute_float(api, info, "scale", 0);
  k->softcap = attribute_float(api, info, "softcap", 0);
  if (k->kv_heads < 1 || k->heads < 1 || k->heads % k->kv_heads || k->window < 0 || k->scale <= 0) {
    free(k);
    return failure(api, ERROR_ARGUMENT, "CachedAttention: heads, scale or window it was not built for");
  }
  *self = k;
  return NULL;
}

static const char* name(const Op* op) {
  return (void)op, "CachedAttention";
}
static size_t inputs(const Op* op) {
  return (void)op, INPUTS;
}
static size_t outputs(const Op* op) {
  return (void)op, 3;
}
static int float_input(const Op* op, size_t i) {
  return (void)op, i == LENGTHS ? INT32 : FLOAT;
}
static int float_output(const Op* op, size_t i) {
  return (void)op, (void)i, FLOAT;
}
static int codes_input(const Op* op, size_t i) {
  return i == PAST_KEY || i == PAST_VALUE ? INT8 : float_input(op, i);
}
static int codes_output(const Op* op, size_t i) {
  return (void)op, i ? INT8 : FLOAT;
}
static int input_presence(const Op* op, size_t i) {
  return (void)op, i == QUERY || (i >= PAST_KEY && i <= LENGTHS) ? REQUIRED : OPTIONAL;
}

/* One operator to a graph; ONNX Runtime chooses by the type of the cache. */
Op cached_attention_floats_op =
    OPERATOR(name, inputs, float_input, input_presence, outputs, float_output, create, compute);
Op cached_attention_codes_op =
    OPERATOR(name, inputs, codes_input, input_presence, outputs, codes_output, create, compute);
