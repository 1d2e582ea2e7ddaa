/* CachedAttention: RoPE, the new entries of the KV cache, and attention over the cache, in one operator.

     query [.., .., H*P] float, key [.., .., KV*D] and value [.., .., KV*E] float; or all in one, [.., .., H*P + KV*(D + E)].
       A head's query is the first D of `query_period` P columns, which are D unless they are given: what follows it, such as
       a gate, is no concern of this operator
     caches of keys [blocks, KV, T, D] and of values [blocks, KV, T, E]: inputs that are written in place. Float, or with
       scales [KV, D] and [KV, E] int8, or int4: uint8 of half as many columns, channel 2i in the low half of byte i, 2i + 1 in
       the high half, each + 8
     offsets [B + 1] int32, starts [B] int32, block table [B, M] int32; cosines and sines [.., R / 2] of RoPE, which turns
       the first R channels of a head
     weights [D] of an RMSNorm of each head of queries and of keys, before RoPE; or none
     sinks [H]: in each softmax of a head one more score, without a value; or none
     y [.., .., H*E] float

   The tokens of all sequences are packed one after the other: those of sequence b are offsets[b] to offsets[b + 1] - 1,
   at positions from starts[b]. Position p of sequence b is token p % T of block table[b][p / T]. A token sees the keys of
   its sequence up to itself, the last `local_window_size` of them where there is a window. Blocks that are only read may
   be in many tables; a block that is written may be in one.

   Work is cut into units: the queries of one KV head, of a few adjacent tokens of a sequence. A unit passes its keys in
   tiles of 64 from the first, with an online softmax. What a query computes depends on its own keys alone, not on the
   batch, nor on how a prompt is cut into chunks.

   A cache of codes is never dequantized in memory: the scales of keys are multiplied into the query, those of values into
   the result. With AVX-512 queries and weights of the softmax are quantized to 16 bits, by their largest, in two
   digits of 8: matmuls sum integers, four products to an instruction. The codes of keys and values have 8 or 4 bits, so
   their own rounding is at least 256 times as coarse; docs/native-kernels.md says what it adds. With AMX tile registers sum
   the same integers where a unit has several queries, as of a prompt, so the bits are the same. Without AVX-512 codes are
   converted to floats, a tile at a time: digits took twice as long for prompts.

   Names: H query heads, KV key heads, D channels of a query and a key, E of a value, T tokens of a block, M columns of the
   block table. A query of a unit is one token of one query head, in the order of tokens. */
#include "amx.h"
#include "memory.h"
#include "ort.h"
#include "vector.h"

#include <float.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A unit has about UNIT_QUERIES queries, which pass a tile in groups of up to GROUP; a group has PHASES of prefetches. */
enum { VECTORS = 4, KEYS = LANES * VECTORS, GROUP = 6, DIGITS = 2, DIGIT_QUERIES = 3, UNIT_QUERIES = 48, PHASES = 4 };
/* Of a unit, whose next one is prefetched; of more its next tile is: 1.03, 1.06 and 1.07 times as fast at 400, 600 and 900
   keys (eight streams of the default model), 1.18 at 8,064 (one of 1.24 billion parameters). */
enum { FEW_KEYS = 256 };
enum { LARGEST_HEAD = 512, MOST_HEADS = 1 << 16, MOST_PERIOD = 1 << 16 };
/* Fewer scores, one for each query and key, than this are computed before another thread has woken up. */
enum { PARALLEL_SCORES = 4096 };

enum {
  QUERY,
  KEY,
  VALUE,
  KEY_CACHE,
  VALUE_CACHE,
  OFFSETS,
  STARTS,
  TABLE,
  COSINES,
  SINES,
  KEY_SCALE,
  VALUE_SCALE,
  QUERY_NORM,
  KEY_NORM,
  SINKS,
  INPUTS
};

static const float MASKED = -1e30f, LOG2_E = 1.44269504f;
static const float LARGEST_WEIGHT = (1 << 16) - 1;

typedef struct {
  Base base;
  int64_t heads, kv_heads, period, rotary, interleaved, window;
  float scale, softcap, epsilon;
  Tensor constants[INPUTS]; /* of RoPE, the scales, the norms and the sinks, where they are */
} Kernel;

typedef struct {
  const Kernel* kernel;
  int64_t B, D, E, T, M, blocks, group;
  int64_t half;                                   /* of the channels that RoPE turns */
  int bits;                                       /* of a channel in the cache: 32 (float), 8 or 4 */
  const float *query, *key, *value;               /* of the first token */
  int64_t query_stride, key_stride, value_stride; /* from a token to the next */
  int64_t period;                                 /* of queries, from a head to the next */
  char *key_cache, *value_cache;
  const int32_t *offsets, *starts, *table;
  const float *cosines, *sines, *key_scale, *value_scale, *query_norm, *key_norm, *sinks;
  float* y;
  int64_t unit_tokens;    /* most tokens of a unit */
  int64_t pairs;          /* of a sequence and a part of its new tokens */
  const int32_t* part_of; /* [pairs, 2] sequence, and which of its units; NULL: sequence i has the one unit i */
  _Atomic int out_of_memory;
} Work;

typedef struct {
  int64_t count, first; /* queries; position of the first token */
  char* queries;        /* [count, D] float, or [count, DIGITS, D] int8 */
  int32_t* offsets;     /* [count, DIGITS] corrects the sums for what is added to the codes of keys */
  float* scales;        /* [count] from a dot product to a score in powers of two */
  float* max;           /* [count] largest score so far */
  float* sums;          /* [count, LANES] of weights */
  float* outputs;       /* [count, E] sums of values times weights */
  char* keys;           /* [D, KEYS] float or [D / 4, KEYS] words of four codes: a transposed tile */
  char* values;         /* [KEYS, E] float or [KEYS / 4, E] words of four keys' codes: a tile of a cache of codes */
  int in_tiles;         /* whether matmuls of codes are those of AMX */
  Ahead next_keys, next_values; /* prefetched while a tile is computed */
} Unit;

/* unit * 2^x, exact where x is an integer, 0 where x is far below. The minimax polynomial for 2^f, f from 0 to 1, has a
   first coefficient of 1 and an error of at most 2e-7. */
INLINE F32x16 vexp2(F32x16 x, const float unit) {
  F32x16 f = fraction(x), y = splat(0.0018671304f * unit);
  y = vfma(y, f, splat(0.0090170300f * unit));
  y = vfma(y, f, splat(0.055799913f * unit));
  y = vfma(y, f, splat(0.24016444f * unit));
  y = vfma(y, f, splat(0.69315130f * unit));
  y = vfma(y, f, splat(unit));
  return vscalef(y, x);
}

/* RMSNorm of a head's channels. */
static void normalize(const float* from, const float* weight, int64_t D, float epsilon, float* to) {
  F32x16 squares = {0};
  for (int64_t i = 0; i < D; i += LANES) squares = vfma(load(from + i), load(from + i), squares);
  const F32x16 inverse = splat(1.0f / __builtin_sqrtf(reduce_add(squares) / (float)D + epsilon));
  for (int64_t i = 0; i < D; i += LANES) store(to + i, load(from + i) * inverse * load(weight + i));
}

/* The norm, if there is a weight, and RoPE of a query or key at a position. `to` may not be `from`. */
static void rotate(const Work* w, const float* from, const float* norm, int64_t position, float* to) {
  const int64_t half = w->half;
  float normed[LARGEST_HEAD];
  if (norm) {
    normalize(from, norm, w->D, w->kernel->epsilon, normed);
    from = normed;
  }
  memcpy(to + 2 * half, from + 2 * half, (w->D - 2 * half) * sizeof(float));
  if (!half) return;
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
    F32x16 c = load(cosines + i), s = load(sines + i), a = load(from + i), b = load(from + half + i);
    F32x16 b_sin = b * s, a_sin = a * s;
    store(to + i, vfma(a, c, -b_sin));
    store(to + half + i, vfma(b, c, a_sin));
  }
  if (i < half) {
    const int64_t left = half - i;
    F32x16 c = load_first(cosines + i, left), s = load_first(sines + i, left);
    F32x16 a = load_first(from + i, left), b = load_first(from + half + i, left);
    F32x16 b_sin = b * s, a_sin = a * s;
    store_first(to + i, vfma(a, c, -b_sin), left);
    store_first(to + half + i, vfma(b, c, a_sin), left);
  }
}

/* Whether the cache has codes and scales. */
static int has_codes(const Work* w) {
  return w->bits < 32;
}

/* The bytes of one token's key of one head, and of its value. */
static int64_t key_bytes(const Work* w) {
  return w->D * w->bits / 8;
}
static int64_t value_bytes(const Work* w) {
  return w->E * w->bits / 8;
}

/* The new tokens of a sequence. */
static int64_t count_of(const Work* w, int64_t b) {
  return w->offsets[b + 1] - (int64_t)w->offsets[b];
}

/* The units of a sequence and KV head. */
static int64_t units_of(const Work* w, int64_t b) {
  return (count_of(w, b) + w->unit_tokens - 1) / w->unit_tokens;
}

/* The entries of a cache before that of one KV head at a position of a sequence. */
static int64_t entry(const Work* w, int64_t b, int64_t head, int64_t position) {
  const int64_t block = w->table[b * w->M + position / w->T];
  return (block * w->kernel->kv_heads + head) * w->T + position % w->T;
}

/* Keys and values that this process wrote to caches of codes, and how many of them lay beyond what the scale reaches. */
static _Atomic uint64_t stored_values, clipped_values;

__attribute__((visibility("default"))) void tapeout_kv_values(uint64_t* stored, uint64_t* clipped) {
  *stored = atomic_load_explicit(&stored_values, memory_order_relaxed);
  *clipped = atomic_load_explicit(&clipped_values, memory_order_relaxed);
}

/* Returns how many values were clipped. */
static int64_t quantize(const float* from, const float* scale, int64_t count, int bits, char* to) {
  I32x16 clipped = splat_int(0);
  for (int64_t i = 0; i < count; i += LANES) {
    const I32x16 x = round_to_int(load(from + i) / load(scale + i));
    clipped += beyond(x, bits);
    if (bits == 4)
      store_int4(to + i / 2, x);
    else
      store_int8(to + i, saturate_int8(x));
  }
  return reduce_add_int(clipped);
}

/* Writes the new tokens of a sequence to the cache of one KV head. */
static void update_cache(const Work* w, int64_t b, int64_t head) {
  const int64_t D = w->D, E = w->E, count = count_of(w, b), first = w->starts[b];
  float rotated[LARGEST_HEAD];
  int64_t clipped = 0;
  for (int64_t s = 0; s < count; s++) {
    const int64_t token = w->offsets[b] + s, at = entry(w, b, head, first + s);
    const float* key = w->key + token * w->key_stride + head * D;
    const float* value = w->value + token * w->value_stride + head * E;
    char *to_key = w->key_cache + at * key_bytes(w), *to_value = w->value_cache + at * value_bytes(w);
    if (has_codes(w)) {
      rotate(w, key, w->key_norm, first + s, rotated);
      clipped += quantize(rotated, w->key_scale + head * D, D, w->bits, to_key);
      clipped += quantize(value, w->value_scale + head * E, E, w->bits, to_value);
    } else {
      rotate(w, key, w->key_norm, first + s, (float*)to_key);
      memcpy(to_value, value, E * sizeof(float));
    }
  }
  if (has_codes(w)) {
    atomic_fetch_add_explicit(&stored_values, (D + E) * count, memory_order_relaxed);
    if (clipped) atomic_fetch_add_explicit(&clipped_values, clipped, memory_order_relaxed);
  }
}

/* The same for `index` of all sequences and heads, where a sequence has several units: all of them read what it writes.
   A unit that is alone writes for itself. */
static void update_long(void* state, size_t index) {
  const Work* w = state;
  const int64_t b = (int64_t)index / w->kernel->kv_heads;
  if (units_of(w, b) > 1) update_cache(w, b, (int64_t)index % w->kernel->kv_heads);
}

/* SQUARE keys' SQUARE words, or the `count` and `left` there are, transposed; `flip` changes bits of each word. The
   addresses of keys beyond `count`, of which nothing is read, are integers: such pointers would be undefined. */
INLINE void pack_square(const char* from, int64_t words, int64_t count, int64_t left, int32_t flip, char* to) {
  SquareRow x[SQUARE];
  EACH (int i = 0; i < SQUARE; i++) {
    const uintptr_t address = (uintptr_t)from + 4 * i * words;
    x[i] = load_square_row((const void*)address, i < count ? left : 0) ^ flip;
  }
  transpose(x);
  EACH (int i = 0; i < SQUARE; i++)
    if (i < left) memcpy(to + 4 * i * KEYS, &x[i], sizeof x[i]);
}

/* `count` keys of `words` words each, transposed to [words, KEYS], with the bits of `flip` inverted in each. */
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

#define FOR_QUERIES(call)   \
  switch (queries) {        \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 5: call(5); break; \
    case 6: call(6); break; \
  }

/* The number of vectors of sums of `queries` queries that registers hold at once, beside other vectors. */
INLINE int vectors_of(const int queries) {
  return AVX512 || queries == 1 ? VECTORS : queries <= 3 ? 2 : 1;
}

/* Dot products of `queries` queries with all keys of a tile; `queries` is a constant where these are inlined. */
INLINE void dot_floats(const Unit* unit, int64_t first, int64_t D, float (*scores)[KEYS], const int queries) {
  const char* query = unit->queries + first * D * (int64_t)sizeof(float);
  const int vectors = vectors_of(queries);
  for (int64_t key = 0; key < KEYS; key += vectors * LANES) {
    F32x16 sum[GROUP][VECTORS];
    EACH (int q = 0; q < queries; q++)
      EACH (int v = 0; v < vectors; v++) sum[q][v] = (F32x16){0};
    for (int64_t i = 0; i < D; i++) {
      F32x16 keys[VECTORS];
      EACH (int v = 0; v < vectors; v++) keys[v] = load(unit->keys + 4 * (i * KEYS + key + v * LANES));
      EACH (int q = 0; q < queries; q++) {
        F32x16 channel = splat_from(query + 4 * (q * D + i));
        EACH (int v = 0; v < vectors; v++) sum[q][v] = vfma(keys[v], channel, sum[q][v]);
      }
    }
    EACH (int q = 0; q < queries; q++)
      EACH (int v = 0; v < vectors; v++) store(scores[q] + key + v * LANES, sum[q][v]);
  }
}

/* outputs = outputs * old + sums * new, for `vectors` of a query's channels. */
INLINE void accumulate(const F32x16* sums, float old_scale, float new_scale, float* outputs, const int vectors) {
  EACH (int v = 0; v < vectors; v++) {
    F32x16 scaled = load(outputs + v * LANES) * splat(old_scale);
    store(outputs + v * LANES, vfma(sums[v], splat(new_scale), scaled));
  }
}

/* Adds `count` values times weights to the outputs of `queries` queries, for `vectors` of their channels, which are
   constants where these are inlined. */
INLINE void add_floats(const char* values, int64_t count, int64_t E, const char (*weights)[4 * KEYS],
                       const float* old_scale, const float* new_scale, float* outputs, const int queries,
                       const int vectors) {
  F32x16 sum[GROUP][VECTORS];
  EACH (int q = 0; q < queries; q++)
    EACH (int v = 0; v < vectors; v++) sum[q][v] = (F32x16){0};
  for (int64_t key = 0; key < count; key++) {
    F32x16 value[VECTORS];
    EACH (int v = 0; v < vectors; v++) value[v] = load(values + 4 * (key * E + v * LANES));
    EACH (int q = 0; q < queries; q++) {
      F32x16 weight = splat_from(weights[q] + 4 * key);
      EACH (int v = 0; v < vectors; v++) sum[q][v] = vfma(weight, value[v], sum[q][v]);
    }
  }
  EACH (int q = 0; q < queries; q++) accumulate(sum[q], old_scale[q], new_scale[q], outputs + q * E, vectors);
}

/* The same for any number of queries up to GROUP, and all channels. */
static void dot_float_group(const Unit* unit, int64_t first, int queries, int64_t D, float (*scores)[KEYS]) {
#define DOT_FLOATS(n) dot_floats(unit, first, D, scores, n)
  FOR_QUERIES(DOT_FLOATS)
}

static void add_float_group(const char* values, int64_t count, int64_t E, const char (*weights)[4 * KEYS],
                            const float* old_scale, const float* new_scale, float* outputs, int queries) {
  for (int64_t channel = 0; channel < E;) {
    const int wide = E - channel >= vectors_of(queries) * LANES;
    const char* from = values + 4 * channel;
    float* to = outputs + channel;
#define ADD_FLOATS(n)                                                                \
  if (wide)                                                                          \
    add_floats(from, count, E, weights, old_scale, new_scale, to, n, vectors_of(n)); \
  else                                                                               \
    add_floats(from, count, E, weights, old_scale, new_scale, to, n, 1)
    FOR_QUERIES(ADD_FLOATS)
    channel += wide ? vectors_of(queries) * LANES : LANES;
  }
}

/* A cache of codes: a query is prepared, the keys and values of a tile are packed, and both matmuls. */
#if AVX512
/* Of each eight channels those with an even number first, as words of eight 4-bit codes are unpacked. */
INLINE I8x16 even_first(I8x16 x) {
  return __builtin_shufflevector(x, x, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
}
/* The other lanes are zeros. */
INLINE I8x16 load_half_int8(const void* from) {
  I8x16 x = {0};
  memcpy(&x, from, sizeof x / 2);
  return x;
}
/* Of words of eight 4-bit codes the four of even channels, or of odd ones. */
INLINE I32x16 even_int4(I32x16 words) {
  return words & splat_int(0x0f0f0f0f);
}
INLINE I32x16 odd_int4(I32x16 words) {
  return even_int4(words >> 4);
}

/* A query times the scales of keys, in digits; returns the value of one in the last digit. */
static float prepare_query(const float* query, const float* scale, int64_t D, int bits, const Unit* unit,
                           int64_t index) {
  int8_t* digits = (int8_t*)unit->queries + index * DIGITS * D;
  F32x16 max = {0};
  for (int64_t i = 0; i < D; i += LANES) max = vmax(max, vabs(load(query + i) * load(scale + i)));
  const float largest = reduce_max(max), LARGEST_QUERY = 127 * 256;
  F32x16 inverse = splat(largest > 0 ? LARGEST_QUERY / largest : 0.0f);
  I32x16 sums[DIGITS];
  EACH (int d = 0; d < DIGITS; d++) sums[d] = (I32x16){0};
  for (int64_t i = 0; i < D; i += LANES) {
    I32x16 rest = round_to_int(load(query + i) * load(scale + i) * inverse);
    EACH (int d = DIGITS - 1; d >= 0; d--) {
      I8x16 digit = truncate_int8(rest);
      store_int8(digits + d * D + i, bits == 4 ? even_first(digit) : digit);
      sums[d] += widen(digit);
      rest = wrapping_add(rest, splat_int(128)) >> 8;
    }
  }
  EACH (int d = 0; d < DIGITS; d++) unit->offsets[index * DIGITS + d] = -(1 << (bits - 1)) * reduce_add_int(sums[d]);
  return largest / LARGEST_QUERY;
}

/* 16 bytes, or 8 where `whole` is 0, of each of up to four values in rows of `row` bytes, as words of four keys' codes. */
INLINE void pack_part(const char* from, int64_t row, const int whole, const int bits, const int64_t count, char* to) {
  I8x16 keys[4];
  EACH (int key = 0; key < 4; key++) {
    const char* at = from + (key < count ? key * row : 0);
    keys[key] = key >= count ? (I8x16){0} : whole ? load_int8(at) : load_half_int8(at);
  }
  const I32x16 packed = interleave_int8x4(keys[0], keys[1], keys[2], keys[3]);
  if (bits == 8) {
    store_int(to, packed);
    return;
  }
  const I32x16 even = (I32x16)((I8x64)even_int4(packed) - 8), odd = (I32x16)((I8x64)odd_int4(packed) - 8);
#define INTERLEAVED(i)                                                                                             \
  __builtin_shufflevector(even, odd, i, i + 16, i + 1, i + 17, i + 2, i + 18, i + 3, i + 19, i + 4, i + 20, i + 5, \
                          i + 21, i + 6, i + 22, i + 7, i + 23)
  store_int(to, INTERLEAVED(0));
  if (whole) store_int(to + 4 * LANES, INTERLEAVED(8));
}

/* Codes of up to four values, to `to` as [E] words of four keys' codes. */
INLINE void pack_four(const char* from, int64_t E, const int bits, const int64_t count, char* to) {
  const int64_t row = E * bits / 8, codes = 8 / bits;
  int64_t i = 0;
  for (; i + LANES <= row; i += LANES) pack_part(from + i, row, 1, bits, count, to + 4 * codes * i);
  if (i < row) pack_part(from + i, row, 0, bits, count, to + 4 * codes * i);
}

/* Keys as [D / 4, KEYS] words of four codes plus 128 or 8, since one side of the instruction is unsigned; values as
   [count / 4, E] words of four keys' codes. */
INLINE void pack_bits(const Unit* unit, const char* keys, const char* values, int64_t count, int64_t D, int64_t E,
                      const int bits) {
  if (bits == 8) {
    pack_keys(keys, count, D / 4, (int32_t)0x80808080, unit->keys);
  } else {
    char* words = unit->values; /* not in use yet */
    pack_keys(keys, count, D / 8, 0, words);
    for (int64_t channel = 0; channel < D; channel += 8)
      for (int64_t key = 0; key < KEYS; key += LANES) {
        const I32x16 eight = load_int(words + channel / 2 * KEYS + 4 * key);
        char* to = unit->keys + channel * KEYS + 4 * key;
        store_int(to, even_int4(eight)), store_int(to + 4 * KEYS, odd_int4(eight));
      }
  }
  const int64_t bytes = E * bits / 8;
  int64_t key = 0;
  for (; key + 4 <= count; key += 4) pack_four(values + key * bytes, E, bits, 4, unit->values + key * E);
  if (key < count) pack_four(values + key * bytes, E, bits, count - key, unit->values + key * E);
}

/* The sum of both digits' sums, which fits 32 bits for up to LARGEST_HEAD products. */
INLINE F32x16 combine_digits(const I32x16 (*digits)[VECTORS], int v) {
  return to_float(wrapping_add(shift_left(digits[0][v], 8), digits[1][v]));
}

INLINE void dot_digits(const Unit* unit, int64_t first, int64_t D, float (*scores)[KEYS], const int queries) {
  const char* query = unit->queries + first * DIGITS * D;
  I32x16 sum[DIGIT_QUERIES][DIGITS][VECTORS];
  EACH (int q = 0; q < queries; q++)
    EACH (int d = 0; d < DIGITS; d++) {
      I32x16 offset = splat_int(unit->offsets[(first + q) * DIGITS + d]);
      EACH (int v = 0; v < VECTORS; v++) sum[q][d][v] = offset;
    }
  for (int64_t i = 0; i < D; i += 4) {
    I32x16 keys[VECTORS];
    EACH (int v = 0; v < VECTORS; v++) keys[v] = load_int(unit->keys + i * KEYS + 4 * v * LANES);
    EACH (int q = 0; q < queries; q++)
      EACH (int d = 0; d < DIGITS; d++) {
        I32x16 digits = splat_int8x4(query + (q * DIGITS + d) * D + i);
        EACH (int v = 0; v < VECTORS; v++) sum[q][d][v] = dot_int8x4(sum[q][d][v], keys[v], digits);
      }
  }
  EACH (int q = 0; q < queries; q++)
    EACH (int v = 0; v < VECTORS; v++) store(scores[q] + v * LANES, combine_digits(sum[q], v));
}

static void dot_code_group(const Unit* unit, int64_t first, int queries, int64_t D, float (*scores)[KEYS]) {
  for (int q = 0; q < queries; q += DIGIT_QUERIES) switch (queries - q) {
      case 1: dot_digits(unit, first + q, D, scores + q, 1); break;
      case 2: dot_digits(unit, first + q, D, scores + q, 2); break;
      default: dot_digits(unit, first + q, D, scores + q, DIGIT_QUERIES); break;
    }
}

INLINE void add_digits(const char* values, int64_t count, int64_t E, const char (*weights)[4 * KEYS],
                       const float* old_scale, const float* new_scale, float* outputs, const int queries,
                       const int vectors) {
  I32x16 sum[DIGIT_QUERIES][DIGITS][VECTORS];
  EACH (int q = 0; q < queries; q++)
    EACH (int d = 0; d < DIGITS; d++)
      EACH (int v = 0; v < vectors; v++) sum[q][d][v] = (I32x16){0};
  for (int64_t key = 0; key < count; key += 4) {
    I32x16 value[VECTORS];
    EACH (int v = 0; v < vectors; v++) value[v] = load_int(values + key * E + 4 * v * LANES);
    EACH (int q = 0; q < queries; q++)
      EACH (int d = 0; d < DIGITS; d++) {
        I32x16 digits = splat_int8x4(weights[q] + 4 * (key + d));
        EACH (int v = 0; v < vectors; v++) sum[q][d][v] = dot_int8x4(sum[q][d][v], digits, value[v]);
      }
  }
  EACH (int q = 0; q < queries; q++) {
    F32x16 result[VECTORS];
    EACH (int v = 0; v < vectors; v++) result[v] = combine_digits(sum[q], v);
    accumulate(result, old_scale[q], new_scale[q], outputs + q * E, vectors);
  }
}

static void add_code_group(const char* values, int64_t count, int64_t E, const char (*weights)[4 * KEYS],
                           const float* old_scale, const float* new_scale, float* outputs, int queries) {
  for (int64_t channel = 0; channel < E;) {
    const int wide = E - channel >= VECTORS * LANES;
    const char* from = values + 4 * channel;
    for (int q = 0; q < queries; q += DIGIT_QUERIES) {
      float* to = outputs + q * E + channel;
#define ADD_DIGITS(n)                                                                      \
  if (wide)                                                                                \
    add_digits(from, count, E, weights + q, old_scale + q, new_scale + q, to, n, VECTORS); \
  else                                                                                     \
    add_digits(from, count, E, weights + q, old_scale + q, new_scale + q, to, n, 1)
      switch (queries - q) {
        case 1: ADD_DIGITS(1); break;
        case 2: ADD_DIGITS(2); break;
        default: ADD_DIGITS(DIGIT_QUERIES); break;
      }
    }
    channel += wide ? VECTORS * LANES : LANES;
  }
}

#if AMX
/* The same matmuls of up to LANES queries with AMX. A row of a tile register is a digit of a query's channels or weights, 16
   words of four codes, or 16 sums. Codes are packed as for the instructions on vectors, so the integers are the same. */
enum { HIGH_SUMS = 0, LOW_SUMS = 2, HIGH_DIGITS = 4, LOW_DIGITS = 5, FIRST_CODES = 6, NEXT_CODES = 7 };
/* Units of fewer queries are computed by vectors, such as a decode of few heads. */
enum { LEAST_TILED = 8 };

/* Of a group of queries the sums of both digits, for two vectors. */
typedef int32_t TileSums[DIGITS][2][LANES][LANES];

/* A unit is cut into groups of as many queries, or one less, as registers then have rows; the last group has all of them. */
static void configure_tiles(int64_t queries) {
  const int64_t groups = (queries + LANES - 1) / LANES, rows = (queries + groups - 1) / groups;
  TileShapes shapes = {0};
  shape_tiles(&shapes, HIGH_SUMS, FIRST_CODES, (int)rows, TILE_ROW_BYTES);
  shape_tiles(&shapes, FIRST_CODES, TILE_REGISTERS, TILE_ROWS, TILE_ROW_BYTES);
  _tile_loadconfig(&shapes);
}

INLINE void zero_sums(void) {
  _tile_zero(HIGH_SUMS), _tile_zero(HIGH_SUMS + 1), _tile_zero(LOW_SUMS), _tile_zero(LOW_SUMS + 1);
}
INLINE void store_sums(TileSums sums) {
  _tile_stored(HIGH_SUMS, sums[0][0], TILE_ROW_BYTES), _tile_stored(HIGH_SUMS + 1, sums[0][1], TILE_ROW_BYTES);
  _tile_stored(LOW_SUMS, sums[1][0], TILE_ROW_BYTES), _tile_stored(LOW_SUMS + 1, sums[1][1], TILE_ROW_BYTES);
}
/* The sum of both digits' sums, and an integer. */
INLINE F32x16 combine_sums(TileSums sums, int v, int q, I32x16 offset) {
  const I32x16 high = load_int(sums[0][v][q]), low = load_int(sums[1][v][q]);
  return to_float(wrapping_add(wrapping_add(shift_left(high, 8), low), offset));
}

static void dot_tiles(const Unit* unit, int64_t first, int queries, int64_t D, float (*scores)[KEYS]) {
  const char* query = unit->queries + first * DIGITS * D;
  _Alignas(64) TileSums sums;
  for (int64_t key = 0; key < KEYS; key += 2 * LANES) {
    zero_sums();
    for (int64_t i = 0; i < D; i += TILE_ROW_BYTES) {
      const char* codes = unit->keys + i * KEYS + 4 * key;
      _tile_loadd(HIGH_DIGITS, query + i, DIGITS * D), _tile_loadd(LOW_DIGITS, query + D + i, DIGITS * D);
      _tile_loadd(FIRST_CODES, codes, 4 * KEYS), _tile_loadd(NEXT_CODES, codes + 4 * LANES, 4 * KEYS);
      _tile_dpbsud(HIGH_SUMS, HIGH_DIGITS, FIRST_CODES), _tile_dpbsud(HIGH_SUMS + 1, HIGH_DIGITS, NEXT_CODES);
      _tile_dpbsud(LOW_SUMS, LOW_DIGITS, FIRST_CODES), _tile_dpbsud(LOW_SUMS + 1, LOW_DIGITS, NEXT_CODES);
    }
    store_sums(sums);
    for (int q = 0; q < queries; q++) {
      const int32_t* offsets = unit->offsets + (first + q) * DIGITS;
      const I32x16 offset = wrapping_add(shift_left(splat_int(offsets[0]), 8), splat_int(offsets[1]));
      EACH (int v = 0; v < 2; v++) store(scores[q] + key + v * LANES, combine_sums(sums, v, q, offset));
    }
  }
}

/* outputs = outputs * old + sums * new, of a group of queries, for `vectors` of their channels. */
INLINE void accumulate_sums(TileSums sums, const float* old_scale, const float* new_scale, int64_t E, float* outputs,
                            int queries, const int vectors) {
  for (int q = 0; q < queries; q++) {
    F32x16 result[2];
    EACH (int v = 0; v < vectors; v++) result[v] = combine_sums(sums, v, q, splat_int(0));
    accumulate(result, old_scale[q], new_scale[q], outputs + q * E, vectors);
  }
}

/* Weights of keys that are not there are zeros. */
static void add_tiles(const char* values, int64_t E, const char (*weights)[4 * KEYS], const float* old_scale,
                      const float* new_scale, float* outputs, int queries) {
  _Alignas(64) TileSums sums;
  _tile_loadd(HIGH_DIGITS, weights, sizeof *weights), _tile_loadd(LOW_DIGITS, *weights + KEYS, sizeof *weights);
  for (int64_t channel = 0; channel < E; channel += 2 * LANES) {
    const int whole = E - channel > LANES; /* else there is one vector of channels left */
    const char *codes = values + 4 * channel, *next = whole ? codes + 4 * LANES : codes;
    zero_sums();
    _tile_loadd(FIRST_CODES, codes, 4 * E), _tile_loadd(NEXT_CODES, next, 4 * E);
    _tile_dpbusd(HIGH_SUMS, HIGH_DIGITS, FIRST_CODES), _tile_dpbusd(HIGH_SUMS + 1, HIGH_DIGITS, NEXT_CODES);
    _tile_dpbusd(LOW_SUMS, LOW_DIGITS, FIRST_CODES), _tile_dpbusd(LOW_SUMS + 1, LOW_DIGITS, NEXT_CODES);
    store_sums(sums);
    if (whole)
      accumulate_sums(sums, old_scale, new_scale, E, outputs + channel, queries, 2);
    else
      accumulate_sums(sums, old_scale, new_scale, E, outputs + channel, queries, 1);
  }
}
#endif
#else
/* A query times the scales of keys; returns the scale that is left. */
static float prepare_query(const float* query, const float* scale, int64_t D, int bits, const Unit* unit,
                           int64_t index) {
  (void)bits;
  char* to = unit->queries + index * D * (int64_t)sizeof(float);
  for (int64_t i = 0; i < D; i += LANES) store(to + 4 * i, load(query + i) * load(scale + i));
  return 1;
}

/* As floats, [D, KEYS] and [count, E]. Keys are transposed as words of codes, which takes a quarter of the time or less.
   Flipping the high bit of a 4-bit code takes the 8 away that is added to it. */
INLINE void pack_bits(const Unit* unit, const char* keys, const char* values, int64_t count, int64_t D, int64_t E,
                      const int bits) {
  const int codes = 32 / bits;
  char* words = unit->values; /* not in use yet */
  pack_keys(keys, count, D / codes, bits == 4 ? (int32_t)0x88888888 : 0, words);
  for (int64_t channel = 0; channel < D; channel += codes)
    for (int64_t key = 0; key < KEYS; key += LANES) {
      I32x16 word = load_int(words + 4 * (channel / codes * KEYS + key));
      EACH (int i = 0; i < codes; i++)
        store(unit->keys + 4 * ((channel + i) * KEYS + key),
              to_float(shift_left(word, 32 - bits - bits * i) >> (32 - bits)));
    }
  for (int64_t i = 0; i < count * E; i += LANES)
    store(unit->values + 4 * i, to_float(widen(bits == 4 ? load_int4(values + i / 2) : load_int8(values + i))));
}

#define dot_code_group dot_float_group
#define add_code_group add_float_group
#endif

static void pack_codes(const Work* w, const Unit* unit, const char* keys, const char* values, int64_t count) {
  if (w->bits == 4)
    pack_bits(unit, keys, values, count, w->D, w->E, 4);
  else
    pack_bits(unit, keys, values, count, w->D, w->E, 8);
}

/* The softmax of a query begins with the sink of its head: its largest score so far, with the weight of one. */
static void begin_with_sink(const Work* w, const Unit* unit, int64_t q, int64_t head) {
  const float score = w->sinks[head * w->group + q % w->group] * LOG2_E;
  unit->max[q] = score < MASKED ? MASKED : score;
  unit->sums[q * LANES] = has_codes(w) && AVX512 ? LARGEST_WEIGHT : 1;
}

/* The queries of `unit`, for the heads of a group and then for the next token. */
static void prepare_unit(const Work* w, const Unit* unit, int64_t token, int64_t head) {
  const Kernel* k = w->kernel;
  const int64_t D = w->D;
  float* rotated = (float*)unit->keys; /* not in use yet */
  const float to_powers_of_two = k->scale * LOG2_E;
  for (int64_t q = 0; q < unit->count; q++) {
    const int64_t query_head = head * w->group + q % w->group;
    const float* from = w->query + (token + q / w->group) * w->query_stride + query_head * w->period;
    unit->scales[q] = to_powers_of_two;
    if (has_codes(w)) {
      rotate(w, from, w->query_norm, unit->first + q / w->group, rotated);
      unit->scales[q] *= prepare_query(rotated, w->key_scale + head * D, D, w->bits, unit, q);
    } else {
      rotate(w, from, w->query_norm, unit->first + q / w->group, (float*)unit->queries + q * D);
    }
    unit->max[q] = MASKED;
  }
  memset(unit->sums, 0, unit->count * LANES * sizeof(float));
  for (int64_t q = 0; w->sinks && q < unit->count; q++) begin_with_sink(w, unit, q, head);
  memset(unit->outputs, 0, unit->count * w->E * sizeof(float));
}

/* The keys of a tile from `start` that a query sees, a bit each. */
static uint64_t visible_keys(const Work* w, const Unit* unit, int64_t query, int64_t start) {
  const int64_t position = unit->first + query / w->group, end = position + 1 - start;
  if (end <= 0) return 0;
  const int64_t window = w->kernel->window, begin = window ? end - window : 0;
  if (begin >= KEYS) return 0;
  uint64_t visible = end >= KEYS ? ~0ull : (1ull << end) - 1;
  return begin > 0 ? visible & ~((1ull << begin) - 1) : visible;
}

/* cap * tanh(score / cap), as tanh(x) = 1 - 2 / (exp(2x) + 1); scores are in powers of two. */
INLINE F32x16 soft_capped(F32x16 score, float cap) {
  F32x16 x = vmin(score * splat(2 / cap), splat(60));
  F32x16 denominator = vexp2(x, 1) + splat(1);
  return (splat(1) - splat(2) / denominator) * splat(cap * LOG2_E);
}

/* Of every four weights the high digits, the low ones, and zeros. */
#define FOUR(i) i + 1, i + 5, i + 9, i + 13, i, i + 4, i + 8, i + 12, 64, 64, 64, 64, 64, 64, 64, 64
INLINE I32x16 digits_of(I32x16 x) {
  return (I32x16)__builtin_shufflevector((I8x64)x, (I8x64){0}, FOUR(0), FOUR(16), FOUR(32), FOUR(48));
}

/* What becomes of the weights of a query: floats, words of digits as `digits_of` gives them, or KEYS high digits and KEYS
   low ones. */
enum { AS_FLOATS, AS_WORDS, AS_ROWS };

#if AMX
/* Weights of 16 bits as a row of high digits and a row of low ones. */
INLINE void store_rows(const I32x16 weights[VECTORS], char* to) {
  __m512i bits = _mm512_set1_epi32(0xffff), low = _mm512_set1_epi16(255), pairs[VECTORS / 2];
  __asm__("" : "+v"(bits)); /* without this the compiler makes slower shuffles of what packs */
  EACH (int v = 0; v < VECTORS; v += 2) {
    const __m512i a = _mm512_and_si512((__m512i)weights[v], bits);
    const __m512i b = _mm512_and_si512((__m512i)weights[v + 1], bits);
    pairs[v / 2] = _mm512_packus_epi32(a, b);
  }
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i high_row = _mm512_packus_epi16(_mm512_srli_epi16(pairs[0], 8), _mm512_srli_epi16(pairs[1], 8));
  const __m512i low_row = _mm512_packus_epi16(_mm512_and_si512(pairs[0], low), _mm512_and_si512(pairs[1], low));
  store_int(to, (I32x16)_mm512_permutexvar_epi32(order, high_row));
  store_int(to + KEYS, (I32x16)_mm512_permutexvar_epi32(order, low_row));
}
#endif

/* The step of an online softmax: from dot products to weights of a tile, for up to LANES queries; by what to multiply the
   sums so far, and this tile's. `kind` of the weights is a constant where this is inlined, as is `plain`: all queries see
   all keys of the tile, and there is no cap. */
INLINE void softmax_tile(const Work* w, const Unit* unit, int64_t first, int queries, int64_t start,
                         float (*scores)[KEYS], char (*weights)[4 * KEYS], float* old_scale, float* new_scale,
                         const int plain, const int kind) {
  const float cap = plain ? 0 : w->kernel->softcap;
  float scales[LANES], max_scores[LANES] = {0};
  uint64_t visible[LANES];
  for (int q = 0; q < queries; q++) {
    visible[q] = plain ? ~0ull : visible_keys(w, unit, first + q, start);
    scales[q] = cap ? 1 : unit->scales[first + q];
    F32x16 max = splat(MASKED);
    EACH (int v = 0; v < VECTORS; v++) {
      F32x16 score = load(scores[q] + v * LANES);
      if (cap) score = soft_capped(score * splat(unit->scales[first + q]), cap);
      if (!plain) {
        score = blend(mask_of(visible[q] >> (v * LANES)), score, splat(MASKED));
        store(scores[q] + v * LANES, score);
      }
      max = vmax(max, score);
    }
    max_scores[q] = reduce_max(max);
  }
  /* Just above the largest score: a product that is not rounded before its sum may be so much larger. */
  F32x16 before = load_first(unit->max + first, queries), here = load(max_scores) * load_first(scales, queries);
  here = vfma(vabs(here), splat(2.4e-7f), here);
  float largest[LANES];
  store(largest, here);
  F32x16 now = vmax(before, here);
  store_first(unit->max + first, now, queries);
  store(old_scale, vexp2(before - now, 1));
  store(new_scale, vexp2(here - now, 1));
  for (int q = 0; q < queries; q++) {
    const F32x16 max = splat(largest[q]), scale = splat(scales[q]);
    F32x16 sum = {0};
    I32x16 int_sum = {0}, ints[VECTORS];
    EACH (int v = 0; v < VECTORS; v++) {
      F32x16 x = vfma(load(scores[q] + v * LANES), scale, -max);
      x = vexp2(x, kind != AS_FLOATS ? LARGEST_WEIGHT : 1);
      if (!plain) x = blend(mask_of(visible[q] >> (v * LANES)), x, splat(0));
      char* to = weights[q] + 4 * v * LANES;
      if (kind != AS_FLOATS) {
        ints[v] = round_to_int(x);
        int_sum = wrapping_add(int_sum, ints[v]);
        if (kind == AS_WORDS) store_int(to, digits_of(ints[v]));
      } else {
        sum += x;
        store(to, x);
      }
    }
#if AMX
    if (kind == AS_ROWS) store_rows(ints, weights[q]);
#endif
    if (kind != AS_FLOATS) sum = to_float(int_sum);
    float* sums = unit->sums + (first + q) * LANES;
    F32x16 scaled = load(sums) * splat(old_scale[q]);
    store(sums, vfma(sum, splat(new_scale[q]), scaled));
  }
}

static void prefetch_next(Unit* unit) {
  prefetch_some(&unit->next_keys);
  prefetch_some(&unit->next_values);
}

/* The `count` keys and values of a tile, for all queries of a unit. Constants where this is inlined: whether the cache has
   `codes`, and whether their matmuls are those of AMX. */
INLINE void attend_tile(const Work* w, Unit* unit, const char* keys, const char* values, int64_t start, int64_t count,
                        const int codes, const int in_tiles) {
  const int64_t D = w->D, E = w->E, most = in_tiles ? LANES : GROUP, groups = (unit->count + most - 1) / most;
  const int kind = in_tiles ? AS_ROWS : codes && AVX512 ? AS_WORDS : AS_FLOATS;
  prefetch_next(unit);
  if (codes) {
    pack_codes(w, unit, keys, values, count);
    values = unit->values;
  } else {
    pack_keys(keys, count, D, 0, unit->keys);
  }
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = unit->count * g / groups;
    const int queries = (int)(unit->count * (g + 1) / groups - first);
    float* outputs = unit->outputs + first * E;
    _Alignas(64) float scores[LANES][KEYS];
    _Alignas(64) char weights[LANES][4 * KEYS];
    _Alignas(64) float old_scale[LANES], new_scale[LANES];
    prefetch_next(unit);
    if (!codes)
      dot_float_group(unit, first, queries, D, scores);
    else if (!in_tiles)
      dot_code_group(unit, first, queries, D, scores);
#if AMX
    else
      dot_tiles(unit, first, queries, D, scores);
#endif
    prefetch_next(unit);
    /* The first query sees the fewest keys at the end of the tile, the last the fewest at the beginning. */
    if (!w->kernel->softcap && visible_keys(w, unit, first, start) == ~0ull &&
        visible_keys(w, unit, first + queries - 1, start) == ~0ull)
      softmax_tile(w, unit, first, queries, start, scores, weights, old_scale, new_scale, 1, kind);
    else
      softmax_tile(w, unit, first, queries, start, scores, weights, old_scale, new_scale, 0, kind);
    prefetch_next(unit);
    if (!codes)
      add_float_group(values, count, E, weights, old_scale, new_scale, outputs, queries);
    else if (!in_tiles)
      add_code_group(values, count, E, weights, old_scale, new_scale, outputs, queries);
#if AMX
    else
      add_tiles(values, E, weights, old_scale, new_scale, outputs, queries);
#endif
  }
}

/* The next `bytes` of `memory`, in whole cache lines. */
static void* carve(char** memory, size_t bytes) {
  char* carved = *memory;
  *memory += (bytes + 63) / 64 * 64;
  return carved;
}

/* False if there is no memory. */
static int create_unit(const Work* w, int64_t count, int64_t first, Unit* unit) {
  /* Keys pass the room of values on the way to their own. */
  const size_t channels = w->D + w->E, packed = w->D > w->E ? w->D : w->E;
  const size_t arrays = 8; /* each may end with a partial cache line */
  const size_t bytes = 4 * count * (channels + DIGITS + 2 + LANES) + 4 * KEYS * (w->D + packed) + 64 * arrays;
  char* memory = scratch(SCRATCH_ATTENTION, bytes);
  if (!memory) return 0;
  unit->count = count, unit->first = first;
  unit->queries = carve(&memory, count * w->D * sizeof(float));
  unit->offsets = carve(&memory, count * DIGITS * sizeof(int32_t));
  unit->scales = carve(&memory, count * sizeof(float));
  unit->max = carve(&memory, count * sizeof(float));
  unit->sums = carve(&memory, count * LANES * sizeof(float));
  unit->outputs = carve(&memory, count * w->E * sizeof(float));
  unit->keys = carve(&memory, KEYS * w->D * sizeof(float));
  unit->values = carve(&memory, KEYS * packed * sizeof(float));
  return 1;
}

static int64_t sequence_of(const Work* w, int64_t pair) {
  return w->part_of ? w->part_of[2 * pair] : pair;
}

/* The keys that the last query of a unit's sequence sees; 0 if the sequence has no new tokens. */
static int64_t last_key(const Work* w, int64_t pair) {
  const int64_t b = sequence_of(w, pair), count = count_of(w, b);
  return count ? w->starts[b] + count : 0;
}

static void attend(void* state, size_t index) {
  Work* w = state;
  const Kernel* k = w->kernel;
  const int64_t E = w->E, pair = (int64_t)index / k->kv_heads, head = (int64_t)index % k->kv_heads;
  const int64_t b = sequence_of(w, pair), part = w->part_of ? w->part_of[2 * pair + 1] : 0;
  const int64_t count = count_of(w, b), units = units_of(w, b);
  if (!count) return;
  const int64_t begin = count * part / units, end = count * (part + 1) / units;
  if (units == 1) update_cache(w, b, head);
  Unit unit = {0};
  if (!create_unit(w, (end - begin) * w->group, w->starts[b] + begin, &unit)) {
    w->out_of_memory = 1;
    return;
  }
  prepare_unit(w, &unit, w->offsets[b] + begin, head);
#if AMX
  unit.in_tiles = has_codes(w) && unit.count >= LEAST_TILED && has_tiles();
  /* Tile registers have 64 channels: those beyond D are multiplied by zeros. */
  if (unit.in_tiles)
    configure_tiles(unit.count), memset(unit.keys + w->D * KEYS, 0, (-w->D & (TILE_ROW_BYTES - 1)) * KEYS);
#endif
  const int64_t key_size = key_bytes(w), value_size = value_bytes(w), total = unit.first + end - begin;
  /* What is prefetched while a tile is computed: the next tile, or, of a unit of few keys, the tile of the next unit, which
     is there sooner. Of many keys a cache would not keep those of the next unit. A thread is given a run of adjacent
     indexes as a rule. */
  const int64_t next_pair = head + 1 < k->kv_heads ? pair : pair + 1, next_head = (head + 1) % k->kv_heads;
  const int64_t next = next_pair < w->pairs ? sequence_of(w, next_pair) : 0;
  const int64_t next_total = next_pair < w->pairs ? last_key(w, next_pair) : 0;
  int64_t from = k->window ? unit.first + 1 - k->window : 0;
  from = from > 0 ? from / KEYS * KEYS : 0;
  const int few = total - from <= FEW_KEYS;
  for (int64_t start = from; start < total; start += KEYS) {
    const int64_t keys = total - start < KEYS ? total - start : KEYS;
    const int64_t coming = few ? start : start + KEYS, left = (few ? next_total : total) - coming;
    if (left > 0) {
      const int64_t at = few ? entry(w, next, next_head, coming) : entry(w, b, head, coming);
      const int64_t entries = left < KEYS ? left : KEYS;
      const char *next_keys = w->key_cache + at * key_size, *next_values = w->value_cache + at * value_size;
      unit.next_keys = (Ahead){next_keys, next_keys + entries * key_size, KEYS * key_size / 64 / PHASES};
      unit.next_values = (Ahead){next_values, next_values + entries * value_size, KEYS * value_size / 64 / PHASES};
    }
    const int64_t at = entry(w, b, head, start);
    const char *of_keys = w->key_cache + at * key_size, *of_values = w->value_cache + at * value_size;
    if (AMX && unit.in_tiles)
      attend_tile(w, &unit, of_keys, of_values, start, keys, 1, 1);
    else if (has_codes(w))
      attend_tile(w, &unit, of_keys, of_values, start, keys, 1, 0);
    else
      attend_tile(w, &unit, of_keys, of_values, start, keys, 0, 0);
  }
#if AMX
  if (unit.in_tiles) _tile_release();
#endif
  for (int64_t q = 0; q < unit.count; q++) {
    const int64_t token = w->offsets[b] + begin + q / w->group;
    float* to = w->y + (token * k->heads + head * w->group + q % w->group) * E;
    F32x16 inverse = splat(1 / reduce_add(load(unit.sums + q * LANES)));
    for (int64_t i = 0; i < E; i += LANES) {
      F32x16 y = load(unit.outputs + q * E + i) * inverse;
      if (has_codes(w)) y *= load(w->value_scale + head * E + i);
      store(to + i, y);
    }
  }
  release_scratch(SCRATCH_ATTENTION);
}

/* Of a channel in a cache whose elements have this type; 0: there is no such cache. */
static int bits_of(int type) {
  return type == FLOAT ? 32 : type == INT8 ? 8 : type == UINT8 ? 4 : 0;
}

/* The channels of a head in a cache [blocks, KV, T, columns]; 0: no kernel takes them. */
static int64_t channels_of(const Tensor* cache, int bits) {
  const int64_t columns = cache->dims[3];
  if (columns < 1 || columns > LARGEST_HEAD) return 0;
  const int64_t channels = bits == 4 ? 2 * columns : columns;
  return channels % LANES || channels > LARGEST_HEAD ? 0 : channels;
}

/* Fills `w` from the inputs of a run, whose shapes and types must fit each other. */
static Status* check_inputs(const Kernel* k, const Tensor* in, Work* w) {
  Api api = k->base.api;
  const Tensor *query = &in[QUERY], *cache = &in[KEY_CACHE], *cosines = &in[COSINES], *sines = &in[SINES];
  const Tensor* values = &in[VALUE_CACHE];
  if (!query->present || query->type != FLOAT || query->rank != 3 || !cache->present || cache->rank != 4 ||
      !values->present || values->rank != 4)
    return failure(api, ERROR_ARGUMENT, "CachedAttention: queries are [B, S, columns], a cache is [B, KV, T, columns]");
  const Tensor* table = &in[TABLE];
  if (!table->present || table->type != INT32 || table->rank != 2 || table->dims[1] < 1 ||
      !holds(&in[STARTS], INT32, table->dims[0]) || !holds(&in[OFFSETS], INT32, table->dims[0] + 1))
    return failure(api, ERROR_ARGUMENT,
                   "CachedAttention: offsets [B + 1], starts [B] and a block table [B, M] are int32");
  w->B = table->dims[0], w->M = table->dims[1];
  w->blocks = cache->dims[0], w->T = cache->dims[2];
  w->group = k->heads / k->kv_heads;
  w->bits = bits_of(cache->type);
  w->D = channels_of(cache, w->bits), w->E = channels_of(values, w->bits);
  if (!w->bits || !w->D || !w->E || cache->dims[1] != k->kv_heads || w->T < 1 || (w->M > 1 && w->T % KEYS) ||
      values->type != cache->type || memcmp(values->dims, cache->dims, 3 * sizeof *cache->dims))
    return failure(api, ERROR_ARGUMENT, "CachedAttention: a cache of an unsupported shape or type");
  w->period = k->period ? k->period : w->D;
  if (w->period < w->D)
    return failure(api, ERROR_ARGUMENT, "CachedAttention: a query has more channels than there are up to the next one");
  const int64_t key_columns = k->kv_heads * w->D, value_columns = k->kv_heads * w->E;
  w->query_stride = k->heads * w->period, w->key_stride = key_columns, w->value_stride = value_columns;
  w->query = query->data, w->key = in[KEY].data, w->value = in[VALUE].data;
  const int packed = !in[KEY].present;
  const int64_t tokens = query->dims[0] * query->dims[1];
  if (packed) w->key_stride = w->value_stride = w->query_stride += key_columns + value_columns;
  if (query->dims[2] != w->query_stride || in[VALUE].present == packed ||
      (!packed && (!holds(&in[KEY], FLOAT, tokens * key_columns) || !holds(&in[VALUE], FLOAT, tokens * value_columns))))
    return failure(api, ERROR_ARGUMENT, "CachedAttention: queries, keys or values of another shape");
  if (packed && tokens) w->key = w->query + k->heads * w->period, w->value = w->key + key_columns;
  if (has_codes(w) && (!holds(&in[KEY_SCALE], FLOAT, key_columns) || !holds(&in[VALUE_SCALE], FLOAT, value_columns)))
    return failure(api, ERROR_ARGUMENT, "CachedAttention: a cache of codes without a scale for each channel of a head");
  w->key_scale = in[KEY_SCALE].data, w->value_scale = in[VALUE_SCALE].data;
  w->key_cache = cache->data, w->value_cache = values->data;
  w->offsets = in[OFFSETS].data, w->starts = in[STARTS].data, w->table = table->data;
  for (size_t i = QUERY_NORM; i <= KEY_NORM; i++)
    if (in[i].present && !holds(&in[i], FLOAT, w->D))
      return failure(api, ERROR_ARGUMENT, "CachedAttention: the weight of a norm is not [D] float");
  w->query_norm = in[QUERY_NORM].data, w->key_norm = in[KEY_NORM].data;
  if (in[SINKS].present && !holds(&in[SINKS], FLOAT, k->heads))
    return failure(api, ERROR_ARGUMENT, "CachedAttention: sinks are not [H] float");
  w->sinks = in[SINKS].data;
  int64_t positions = w->T * w->M;
  if (k->rotary) {
    if (!cosines->present || cosines->type != FLOAT || cosines->rank != 2 || cosines->dims[1] < 1 ||
        cosines->dims[1] > w->D / 2 || !holds(sines, FLOAT, cosines->elements))
      return failure(api, ERROR_ARGUMENT, "CachedAttention: cosines and sines are not [positions, R / 2]");
    w->cosines = cosines->data, w->sines = sines->data, w->half = cosines->dims[1];
    if (cosines->dims[0] < positions) positions = cosines->dims[0];
  }
  if (w->offsets[0] != 0 || w->offsets[w->B] != tokens)
    return failure(api, ERROR_ARGUMENT, "CachedAttention: offsets do not begin with 0, or end with the tokens");
  for (int64_t b = 0; b < w->B; b++) {
    const int64_t count = count_of(w, b), total = w->starts[b] + count;
    if (count < 0 || w->starts[b] < 0 || total > positions)
      return failure(api, ERROR_ARGUMENT,
                     "CachedAttention: a sequence is longer than its blocks, or ends before it begins");
    for (int64_t i = 0; count && i * w->T < total; i++)
      if (w->table[b * w->M + i] < 0 || w->table[b * w->M + i] >= w->blocks)
        return failure(api, ERROR_ARGUMENT, "CachedAttention: a block table names a block that is not there");
  }
  return NULL;
}

/* Pairs of a new token of a sequence and a key. */
static int64_t scores_of(const Work* w, int64_t b) {
  return (w->starts[b] + count_of(w, b)) * count_of(w, b);
}

/* The units of a sequence have more than twice as much to do as the mean of all units, which have `scores` together. */
static int is_long(const Work* w, int64_t b, int64_t scores) {
  return scores_of(w, b) * w->pairs > 2 * scores * units_of(w, b);
}

/* The units of all sequences, for `part_of`: long ones first, as threads should end together; the others as their
   sequences, so that what is prefetched is what the same thread reads next. Of a prompt the last tokens come first: they
   have most to do. NULL if there is no memory. */
static int32_t* list_parts(const Work* w, int64_t most, int64_t scores) {
  int32_t *list = malloc((w->pairs ? w->pairs : 1) * 2 * sizeof *list), *to = list;
  for (int now = 1; list && now >= 0; now--)
    for (int64_t part = most - 1; part >= 0; part--)
      for (int64_t b = 0; b < w->B; b++)
        if (part < units_of(w, b) && is_long(w, b, scores) == now) *to++ = (int32_t)b, *to++ = (int32_t)part;
  return list;
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  Tensor in[INPUTS];
  for (size_t i = 0; i < INPUTS; i++) TRY(input(api, context, i, &k->constants[i], &in[i]));
  Work w = {.kernel = k};
  TRY(check_inputs(k, in, &w));
  int64_t y_dims[3] = {in[QUERY].dims[0], in[QUERY].dims[1], k->heads * w.E};
  TRY(output(api, context, 0, y_dims, 3, &w.y));
  w.unit_tokens = w.group < UNIT_QUERIES ? UNIT_QUERIES / w.group : 1;
  int64_t most_units = 0, scores = 0;
  for (int64_t b = 0; b < w.B; b++) {
    const int64_t units = units_of(&w, b);
    if (units > most_units) most_units = units;
    w.pairs += units;
    scores += scores_of(&w, b);
  }
  int listed = most_units > 1;
  for (int64_t b = 0; !listed && b < w.B; b++) listed = is_long(&w, b, scores);
  int32_t* list = NULL;
  if (listed) {
    list = list_parts(&w, most_units, scores);
    if (!list) return failure(api, ERROR_FAIL, "CachedAttention: out of memory");
    w.part_of = list;
  } else {
    w.pairs = w.B;
  }
  Status* status = NULL;
  const int64_t updates = most_units > 1 ? w.B * k->kv_heads : 0, units = w.pairs * k->kv_heads;
  if (scores * k->heads <= PARALLEL_SCORES) {
    for (int64_t i = 0; i < updates; i++) update_long(&w, i);
    for (int64_t i = 0; i < units; i++) attend(&w, i);
  } else {
    if (updates) status = parallel(api, context, k->base.threads, update_long, updates, &w, NULL);
    if (!status) status = parallel(api, context, k->base.threads, attend, units, &w, NULL);
  }
  free(list);
  if (status) return status;
  return w.out_of_memory ? failure(api, ERROR_FAIL, "CachedAttention: out of memory") : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  Kernel found = {.base = {api, threads_of(op)}};
  TRY(attribute_int(api, info, "num_heads", &found.heads));
  TRY(attribute_int(api, info, "kv_num_heads", &found.kv_heads));
  TRY(attribute_float(api, info, "scale", &found.scale));
  found.period = optional_int(api, info, "query_period", 0);
  found.rotary = optional_int(api, info, "do_rotary", 0);
  found.interleaved = optional_int(api, info, "rotary_interleaved", 0);
  found.window = optional_int(api, info, "local_window_size", 0);
  found.softcap = optional_float(api, info, "softcap", 0);
  found.epsilon = optional_float(api, info, "epsilon", 0);
  if (found.kv_heads < 1 || found.heads < 1 || found.heads > MOST_HEADS || found.heads % found.kv_heads ||
      found.window < 0 || found.period < 0 || found.period > MOST_PERIOD || !(found.scale > 0) ||
      !(found.scale <= FLT_MAX) || !(found.softcap >= 0) || !(found.softcap <= FLT_MAX) || !(found.epsilon >= 0))
    return failure(api, ERROR_ARGUMENT, "CachedAttention: unsupported heads, scale, window or softcap");
  for (size_t i = COSINES; i < INPUTS; i++) TRY(constant_input(api, info, i, &found.constants[i]));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation cached_attention = {create, compute};
