/* Attention over a paged KV cache: RoPE and the new entries, then scores and values of blocks of 64 keys on tensor cores.

   Rows of an mma are the query heads of one KV head, of one token or of several: keys and values are read once for all.
   A cache of codes is never dequantized in memory: the scales of keys are in the query, those of values are multiplied
   into the result, and codes are exact in half.

   The result of a row has one order, which fits both kernels. A block of keys is summed by itself, its weights relative
   to a power of two that is no less than the largest. The blocks of a part of 512 keys are added in order, then the parts.
   Sums are moved from one power of two to another without rounding. So a token that is decoded, where each warp has a
   block and each part its own thread block, has the same bits as in a prompt, where a warp passes all blocks of its rows,
   however the prompt is cut.

   Names: row  a query, of a token and head, in the order of tokens; group  query heads of a KV head, H / KV;
   lane 4 g + t of a warp has rows g and g + 8 of its 16, and of each 8 keys, numbers 2 t and 2 t + 1. */
#include "portable.h"
#include "parameters.h"

enum { ROWS = 16, BLOCK = ATTENTION_BLOCK, KEY_TILES = BLOCK / 8, PART_BLOCKS = ATTENTION_PART / BLOCK };
enum { ROTARY_THREADS = 256, PART_THREADS = PART_BLOCKS * WARP };
#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ == 1200
enum { PART_RESIDENT = 1 }; /* of heads of up to 128 channels, of a multiprocessor: shared memory has no room for two */
#else
enum { PART_RESIDENT = 2 };
#endif
constexpr float LOG2_E = 1.44269504f;

/* What rows have of some keys: their largest score in powers of two, rounded up, and the sum of their weights. Without a
   key that a row sees: minus infinity, and 0. */
struct RowSums {
  float max[2], sum[2];
};

/* What moves sums that are relative to 2^from to 2^to, which is no less: a power of two, exactly, or 0. */
__device__ __forceinline__ float moved(float from, float to) {
  const float exponent = fmaxf(from - to, -127.0f) + 127;              /* 0 if both are minus infinity */
  return __uint_as_float(__float_as_uint(exponent + 0x1.8p23f) << 23); /* the lowest bits are the integer */
}

/* a / b of small integers, a < 2^21: divisions of integers are long. */
__device__ __forceinline__ int quotient(int a, float reciprocal_of_b) {
  return (int)(((float)a + 0.5f) * reciprocal_of_b);
}

/* How a cache holds channels. `words`: of 32 bits, as they lie in memory. */
struct Int8 {
  enum { BYTES = 1, UNIT = 1 }; /* UNIT: what one is in half, as operands have it */
  /* Words of four codes plus 128, whose bytes are or'ed into 1,024. */
  static __device__ __forceinline__ uint32_t positive(uint32_t word) { return word ^ 0x80808080; }
  static __device__ __forceinline__ uint32_t centred(uint32_t pair) { return add_f16x2(pair, 0xe480e480); }
  /* Channels 2 i and 2 i + 1 of one key in half. */
  static __device__ __forceinline__ uint32_t channels(const uint32_t* words, int i) {
    return centred(__byte_perm(positive(words[i / 2]), 0x64646464, i % 2 ? 0x4342 : 0x4140));
  }
  /* Channel i of two keys in half. */
  static __device__ __forceinline__ uint32_t keys(const uint32_t* first, const uint32_t* second, int i) {
    const uint32_t two = __byte_perm(first[i / 4], second[i / 4], i % 4 / 2 ? 0x7362 : 0x5140); /* channels of both */
    return centred(__byte_perm(positive(two), 0x64646464, i % 2 ? 0x4342 : 0x4140));
  }
  static __device__ __forceinline__ void store_two(void* cache, int64_t at, const float2& x, const float2& scales) {
    const uint32_t first = code(x.x / scales.x), second = code(x.y / scales.y);
    reinterpret_cast<uint16_t*>(cache)[at / 2] = (uint16_t)(first | second << 8);
  }
  static __device__ __forceinline__ uint32_t code(float x) {
    const int nearest = __float2int_rn(x);
    return (uint32_t)(nearest < -128 ? -128 : smaller(nearest, 127)) & 255;
  }
};

/* E4M3. A code's bits in the places of half's are its value by 256, exactly, that of small ones too: half's bias is 15,
   E4M3's is 7. So scales are multiplied by 256, and codes are never. NaN is not kept, as in int8: it becomes the largest. */
struct Fp8 {
  enum { BYTES = 1, UNIT = 256 };
  /* Of the high byte of each half. */
  static __device__ __forceinline__ uint32_t widened(uint32_t pair) {
    return (pair & 0x80008000) | (pair >> 1 & 0x3f803f80);
  }
  static __device__ __forceinline__ uint32_t channels(const uint32_t* words, int i) {
    return widened(__byte_perm(words[i / 2], 0, i % 2 ? 0x3322 : 0x1100));
  }
  static __device__ __forceinline__ uint32_t keys(const uint32_t* first, const uint32_t* second, int i) {
    return widened(__byte_perm(first[i / 4], second[i / 4], 0x4400 + 0x1111 * (i % 4)));
  }
  static __device__ __forceinline__ void store_two(void* cache, int64_t at, const float2& x, const float2& scales) {
    const uint32_t first = e4m3_of(x.x / scales.x), second = e4m3_of(x.y / scales.y);
    reinterpret_cast<uint16_t*>(cache)[at / 2] = (uint16_t)(first | second << 8);
  }
};

struct Half {
  enum { BYTES = 2, UNIT = 1 };
  static __device__ __forceinline__ uint32_t channels(const uint32_t* words, int i) { return words[i]; }
  static __device__ __forceinline__ uint32_t keys(const uint32_t* first, const uint32_t* second, int i) {
    return __byte_perm(first[i / 2], second[i / 2], i % 2 ? 0x7632 : 0x5410);
  }
  static __device__ __forceinline__ void store_two(void* cache, int64_t at, const float2& x, const float2&) {
    static_cast<uint32_t*>(cache)[at / 2] = f16x2_of(x.x, x.y);
  }
};

/* COUNT words, 16 bytes at a time where there are as many. */
template <int COUNT>
__device__ __forceinline__ void load_words(const void* from, bool here, uint32_t (&words)[COUNT]) {
  if (COUNT == 1) {
    words[0] = here ? *static_cast<const uint32_t*>(from) : 0;
  } else if (COUNT == 2) {
    const uint2 two = here ? *static_cast<const uint2*>(from) : make_uint2(0, 0);
    words[0] = two.x, words[1 % COUNT] = two.y;
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      const uint4 four = here ? static_cast<const uint4*>(from)[i / 4] : zeros();
      words[i] = four.x, words[(i + 1) % COUNT] = four.y, words[(i + 2) % COUNT] = four.z,
      words[(i + 3) % COUNT] = four.w;
    }
  }
}

/* The same, 16 bytes at a time, at this place of the code. */
template <int COUNT>
__device__ __forceinline__ void load_words_now(const void* from, uint32_t (&words)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const uint4 four = load_now(static_cast<const uint4*>(from) + i / 4);
    words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
  }
}

/* A sequence, and the position of one of its tokens. */
struct Place {
  int sequence, position;
};

/* The sequence of a token: the last that begins at or before it. */
__device__ __forceinline__ Place place_of(const Attention& p, int token) {
  int first = 0, end = p.B;
  while (end - first > 1) {
    const int middle = (first + end) / 2;
    if (p.offsets[middle] <= token)
      first = middle;
    else
      end = middle;
  }
  return {first, p.starts[first] + token - p.offsets[first]};
}

/* The number of a token's first channel in a cache. */
__device__ __forceinline__ int64_t entry(const Attention& p, int sequence, int position, int head) {
  const int64_t block = p.table[(int64_t)sequence * p.columns + position / BLOCK];
  return ((block * p.KV + head) * BLOCK + position % BLOCK) * p.D;
}

/* By a warp: a head of a token, of queries, keys or values, which are KV head kv's. `keep_query` takes two channels from `channel` on in half. */
template <class Cache, class KeepQuery>
__device__ __forceinline__ void rotate_head(const Attention& p, const Place& place, int token, int head, int kv,
                                            const KeepQuery& keep_query) {
  const int half = p.D / 2;
  const bool is_query = head < p.H, is_value = head >= p.H + p.KV, rotates = p.cosines && !is_value;
  const float* x = p.qkv + ((int64_t)token * (p.H + 2 * p.KV) + head) * p.D;
  const float* scales = is_value ? p.value_scales : p.key_scales;
  const float* norm = is_value ? nullptr : is_query ? p.query_norm : p.key_norm;
  float inverse = 1; /* of the root of the mean square of a head that is normalized */
  if (norm) {
    float squares = 0;
    for (int i = threadIdx.x % WARP; i < p.D; i += WARP) squares = fmaf(x[i], x[i], squares);
    inverse = 1.0f / sqrtf(warp_sum(squares) / (float)p.D + p.epsilon);
  }
  const int64_t at = is_query ? 0 : entry(p, place.sequence, place.position, kv);
  for (int i = threadIdx.x % WARP * 2; i < half; i += 2 * WARP) { /* two pairs of channels at once */
    const int first = p.interleaved ? 2 * i : i, second = p.interleaved ? first + 2 : i + half;
    float2 a = *reinterpret_cast<const float2*>(x + first), b = *reinterpret_cast<const float2*>(x + second);
    if (norm) {
      const float2 u = *reinterpret_cast<const float2*>(norm + first),
                   w = *reinterpret_cast<const float2*>(norm + second);
      a = make_float2(a.x * inverse * u.x, a.y * inverse * u.y);
      b = make_float2(b.x * inverse * w.x, b.y * inverse * w.y);
    }
    if (rotates) {
      const int64_t angle = (int64_t)place.position * half + i;
      const float2 c = *reinterpret_cast<const float2*>(p.cosines + angle);
      const float2 s = *reinterpret_cast<const float2*>(p.sines + angle);
      if (p.interleaved) {
        a = make_float2(fmaf(a.x, c.x, -(a.y * s.x)), fmaf(a.y, c.x, a.x * s.x));
        b = make_float2(fmaf(b.x, c.y, -(b.y * s.y)), fmaf(b.y, c.y, b.x * s.y));
      } else {
        const float2 before = a;
        a = make_float2(fmaf(a.x, c.x, -(b.x * s.x)), fmaf(a.y, c.y, -(b.y * s.y)));
        b = make_float2(fmaf(b.x, c.x, before.x * s.x), fmaf(b.y, c.y, before.y * s.y));
      }
    }
    float2 one = make_float2(1, 1), two = make_float2(1, 1);
    if (scales) {
      one = *reinterpret_cast<const float2*>(scales + kv * p.D + first);
      two = *reinterpret_cast<const float2*>(scales + kv * p.D + second);
    }
    if (is_query) {
      const float scale = p.scale * Cache::UNIT;
      keep_query(first, f16x2_of(a.x * scale * one.x, a.y * scale * one.y));
      keep_query(second, f16x2_of(b.x * scale * two.x, b.y * scale * two.y));
    } else {
      void* cache = is_value ? p.value_cache : p.key_cache;
      Cache::store_two(cache, at + first, a, one);
      Cache::store_two(cache, at + second, b, two);
    }
  }
}

/* A warp for each head of a token of a prompt; what decodes is rotated where it attends. */
template <class Cache>
__device__ __forceinline__ void rotary_cache(const Attention& p) {
  const int token = blockIdx.x, head = (int)blockIdx.y * (ROTARY_THREADS / WARP) + (int)threadIdx.x / WARP;
  if (head >= p.H + 2 * p.KV || token >= p.offsets[p.B]) return;
  const Place place = place_of(p, token);
  if (p.offsets[place.sequence + 1] - p.offsets[place.sequence] <= p.few_tokens) return;
  uint32_t* query = static_cast<uint32_t*>(p.query) + ((int64_t)token * p.H + head) * p.D / 2;
  const int kv = head < p.H ? head / (p.H / p.KV) : (head - p.H) % p.KV;
  rotate_head<Cache>(p, place, token, head, kv, [&](int channel, uint32_t two) { query[channel / 2] = two; });
}

/* The rows of a warp: from row `first` on of a sequence and KV head. */
struct Rows {
  int group, first, count; /* count: of all rows of the sequence */
  int offset, start;       /* of the sequence: its first token, and its position */
  int position[2];         /* of rows g and g + 8; -1 where there is no row */

  __device__ __forceinline__ Rows(const Attention& p, int sequence, int first)
      : group(quotient(p.H, reciprocal_approx((float)p.KV))),
        first(first),
        offset(p.offsets[sequence]),
        start(p.starts[sequence]) {
    count = (p.offsets[sequence + 1] - offset) * group;
    const int g = threadIdx.x % WARP / 4;
    for (int i = 0; i < 2; i++) {
      const int row = first + g + 8 * i;
      position[i] = row < count ? start + token(row) : -1;
    }
  }
  __device__ __forceinline__ bool any() const { return first < count; }
  /* Of a row, among those of the sequence. */
  __device__ __forceinline__ int token(int row) const { return quotient(row, reciprocal_approx((float)group)); }
  /* The query head of a row, among those of all tokens. */
  __device__ __forceinline__ int64_t head(const Attention& p, int row, int kv) const {
    return (int64_t)(offset + token(row)) * p.H + (kv - token(row)) * group + row;
  }
  /* Positions of the first row, and of the last of the next `rows`. */
  __device__ __forceinline__ int first_position() const { return start + token(first); }
  __device__ __forceinline__ int last_position(int rows) const {
    return start + token(smaller(first + rows, count) - 1);
  }
};

/* The first key that a token sees. */
__device__ __forceinline__ int first_seen(const Attention& p, int position) {
  return p.window && position >= p.window ? position + 1 - p.window : 0;
}

/* Queries as operands: 16 rows, 64 channels from `first` on in four steps. Step s has channels 16 t + 4 s to 16 t + 4 s + 3
   of these in lane t. */
__device__ __forceinline__ void load_queries(const Attention& p, const Rows& rows, int kv, int first,
                                             uint4 (&queries)[4]) {
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  uint32_t words[2][8];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = rows.first + g + 8 * half;
    const bool here = row < rows.count;
    const int64_t at = here ? rows.head(p, row, kv) * p.D + first + 16 * t : 0;
    load_words(static_cast<const uint16_t*>(p.query) + at, here, words[half]);
  }
#pragma unroll
  for (int s = 0; s < 4; s++)
    queries[s] = make_uint4(words[0][2 * s], words[1][2 * s], words[0][2 * s + 1], words[1][2 * s + 1]);
}

/* Scores of a block become weights, in half as operands of 16 keys each; what the rows have of the block. position: of
   rows g and g + 8. */
__device__ __forceinline__ RowSums softmax_block(const Attention& p, const int (&position)[2], int first_key,
                                                 float4 (&scores)[KEY_TILES], uint4 (&weights)[KEY_TILES / 2]) {
  RowSums sums = {{-infinity(), -infinity()}, {0, 0}};
  if (p.softcap > 0) {
    const float softcap = computed_here(p.softcap);
    const float inverse = 2 * LOG2_E * reciprocal_approx(softcap), cap = softcap * LOG2_E;
    const auto capped = [&](float x) {
      return (1 - 2 * reciprocal_approx(exp2_approx(x * inverse) + 1)) * cap;
    }; /* cap · tanh(x / cap) */
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; tile++) {
      float4& s = scores[tile];
      s = make_float4(capped(s.x), capped(s.y), capped(s.z), capped(s.w));
    }
  } else {
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; tile++) {
      float4& s = scores[tile];
      s = make_float4(s.x * LOG2_E, s.y * LOG2_E, s.z * LOG2_E, s.w * LOG2_E);
    }
  }
  int first[2], end[2]; /* keys of the block that each row sees: most see all */
#pragma unroll
  for (int i = 0; i < 2; i++) first[i] = first_seen(p, position[i]) - first_key, end[i] = position[i] + 1 - first_key;
  if (first[0] > 0 || first[1] > 0 || end[0] < BLOCK || end[1] < BLOCK) {
    const int t = thread_here() % 4;
    const auto keep = [&](int i, int key, float& x) {
      if (key + 2 * t < first[i] || key + 2 * t >= end[i]) x = -infinity();
    };
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; tile++) {
      float4& s = scores[tile];
      keep(0, 8 * tile, s.x), keep(0, 8 * tile + 1, s.y), keep(1, 8 * tile, s.z), keep(1, 8 * tile + 1, s.w);
    }
  }
#pragma unroll
  for (int tile = 0; tile < KEY_TILES; tile++) {
    const float4& s = scores[tile];
    sums.max[0] = fmaxf(fmaxf(sums.max[0], s.x), s.y), sums.max[1] = fmaxf(fmaxf(sums.max[1], s.z), s.w);
  }
  float base[2]; /* a number also for a row that sees nothing */
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sums.max[i] = fmaxf(sums.max[i], __shfl_xor_sync(ALL_LANES, sums.max[i], 1));
    sums.max[i] = ceilf(fmaxf(sums.max[i], __shfl_xor_sync(ALL_LANES, sums.max[i], 2)));
    base[i] = sums.max[i] == -infinity() ? 0 : sums.max[i];
  }
#pragma unroll
  for (int tile = 0; tile < KEY_TILES; tile++) {
    const float4& s = scores[tile];
    const float x = exp2_approx(s.x - base[0]), y = exp2_approx(s.y - base[0]);
    const float z = exp2_approx(s.z - base[1]), w = exp2_approx(s.w - base[1]);
    sums.sum[0] += x + y;
    sums.sum[1] += z + w;
    uint4& to = weights[tile / 2];
    if (tile % 2)
      to.z = f16x2_of(x, y), to.w = f16x2_of(z, w);
    else
      to.x = f16x2_of(x, y), to.y = f16x2_of(z, w);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sums.sum[i] += __shfl_xor_sync(ALL_LANES, sums.sum[i], 1);
    sums.sum[i] += __shfl_xor_sync(ALL_LANES, sums.sum[i], 2);
  }
  return sums;
}

/* to = to * scale + more * factor, of which only the sum is rounded: both are powers of two. */
__device__ __forceinline__ void add_moved(float4& to, const float (&scale)[2], const float4& more,
                                          const float (&factor)[2]) {
  to.x = fmaf(more.x, factor[0], to.x * scale[0]), to.y = fmaf(more.y, factor[0], to.y * scale[0]);
  to.z = fmaf(more.z, factor[1], to.z * scale[1]), to.w = fmaf(more.w, factor[1], to.w * scale[1]);
}
/* The same for what rows have; what their sums are to be multiplied by. */
__device__ __forceinline__ void add_rows(RowSums& to, const RowSums& more, float (&scale)[2], float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float max = fmaxf(to.max[i], more.max[i]);
    scale[i] = moved(to.max[i], max), factor[i] = moved(more.max[i], max);
    to.sum[i] = fmaf(more.sum[i], factor[i], to.sum[i] * scale[i]);
    to.max[i] = max;
  }
}

/* Decode: thread blocks for each KV head and sequence, which have the parts of the keys in turn; a warp for each block of
   keys. Keys go straight into registers: a lane's loads are neighbouring bytes of a key, which channel is whose is free.
   Values go to shared memory meanwhile. Both are on the way before the queries are rotated.

   A thread block keeps its rotated queries, and writes the new entries of its parts: all that it reads of this step. Others
   may write the same bytes. The block of some rows that ends last adds their parts, in order. Nothing of a result depends
   on how many thread blocks there are. */
struct Span {
  int32_t rows, kv, first_part, end_part;
  int32_t first, last; /* keys that any of the rows sees */

  __device__ __forceinline__ bool any(int first_key) const { return first_key <= last && first_key + BLOCK > first; }
};

template <class Cache, int D>
struct PartMemory {
  enum {
    WIDTH = Cache::BYTES == 2 ? 64
    : D > 128                 ? 128
                              : D,     /* channels of results at once: registers hold no more */
    TILES = WIDTH / 8,                 /* a lane's, of which column g has channels from g (D / 8) on */
    LANE_BYTES = TILES * Cache::BYTES, /* what these are of a value */
    ROW = WIDTH * Cache::BYTES / 16,   /* of a value, in 16 bytes */
    STEP = 16 * ROW,                   /* of values of 16 keys */
    ON_THE_WAY = STEP > 128 ? 2 : 4,   /* of these, at most */
    SLOTS = TILES / 2,                 /* of a warp's sums: four of each lane, for rows g and as many for g + 8 */
    STAGED = ON_THE_WAY * STEP,
    SUMS = 2 * SLOTS * WARP,
    REGION = STAGED > SUMS ? STAGED : SUMS
  };
  uint4 warps[PART_BLOCKS][REGION];                     /* values, then sums */
  uint4 queries[D / 64][4][WARP];                       /* operands, as load_queries has them */
  float max[ROWS][PART_BLOCKS], sum[ROWS][PART_BLOCKS]; /* of blocks of keys */
  /* What registers have no room for: the query heads of rows, their numbers among all, and their positions. */
  int32_t heads[ROWS], positions[ROWS];
  const char* values[PART_BLOCKS]; /* of the cache, of blocks of keys */
  Span span;
  uint32_t before; /* thread blocks of the same rows that have ended before */
};

/* Where 16 bytes of a staged value lie, so that loads and stores are free of bank conflicts: four lanes t read those of
   four pairs of keys at once. pair: of the key, number % 4. */
template <class Memory>
__device__ __forceinline__ int staged(int key, int piece, int pair) {
  enum { KEYS = Memory::ROW < 8 ? 2 : 1 }; /* of 128 bytes or more */
  const int mask = Memory::LANE_BYTES > 16 ? (pair & 1) | (pair & 2) << 1 : pair << 1;
  return key / KEYS * (KEYS * Memory::ROW) + ((key % KEYS * Memory::ROW + piece) ^ mask);
}

/* Four channels of a row, of which sums are complete. at: of the first among all heads. */
__device__ __forceinline__ void store_result(const Attention& p, int64_t at, int kv, int channel, const float4& sums,
                                             float inverse) {
  float4 scales = make_float4(1, 1, 1, 1);
  if (p.value_scales) scales = *reinterpret_cast<const float4*>(p.value_scales + kv * p.D + channel);
  static_cast<uint2*>(p.y)[(at + channel) / 4] =
      make_uint2(f16x2_of(sums.x * inverse * scales.x, sums.y * inverse * scales.y),
                 f16x2_of(sums.z * inverse * scales.z, sums.w * inverse * scales.w));
}

/* Adds the parts of four channels of a row, which thread blocks have left. head: its number among all. */
template <class Cache>
__device__ __forceinline__ void combine_parts(const Attention& p, int64_t head, int kv, int channel, int first,
                                              int end) {
  enum { AT_ONCE = 4 };
  const float2* rows = reinterpret_cast<const float2*>(p.part_rows) + head * p.parts;
  const float* sums = p.part_sums + head * p.parts * p.D + channel;
  float max = -infinity(), sum = 0;
  float4 y = make_float4(0, 0, 0, 0);
#pragma unroll 1
  for (int part = first; part < end; part += AT_ONCE) {
    float2 row[AT_ONCE];
    float4 more[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      row[i] = make_float2(-infinity(), 0), more[i] = make_float4(0, 0, 0, 0);
      if (part + i >= end) continue;
      row[i] = load_of_others(rows + part + i);
      more[i] = load_of_others(reinterpret_cast<const float4*>(sums + (int64_t)(part + i) * p.D));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const float largest = fmaxf(max, row[i].x), scale = moved(max, largest), factor = moved(row[i].x, largest);
      add_moved(y, {scale, scale}, more[i], {factor, factor});
      sum = fmaf(row[i].y, factor, sum * scale), max = largest;
    }
  }
  store_result(p, head * p.D, kv, channel, y, Cache::UNIT / sum);
}

template <class Cache, int D>
__device__ __forceinline__ void attention_parts(const Attention& p) {
  typedef PartMemory<Cache, D> Memory;
  enum {
    KEY_WORDS = 4 * Cache::BYTES,     /* a lane's of 64 channels of a key */
    HELD = Cache::BYTES == 1 ? 8 : 2, /* of these, in registers on their way */
    TILES = Memory::TILES,
    ROW = Memory::ROW,
    STEP = Memory::STEP,
    SLOTS = Memory::SLOTS,
    ON_THE_WAY = Memory::ON_THE_WAY,
    PIECE = Memory::LANE_BYTES < 16 ? TILES : 16 / Cache::BYTES, /* channels of a value that a lane loads at once */
    PIECE_WORDS = PIECE * Cache::BYTES / 4
  };
  Memory& memory = shared_memory<Memory>();
  const int sequence = blockIdx.z, tile_of_rows = quotient((int)blockIdx.y, reciprocal_approx((float)p.KV)),
            kv = (int)blockIdx.y - tile_of_rows * p.KV, blocks = (int)gridDim.x;
  uint32_t keys[HELD][KEY_WORDS];
  const char* key = nullptr; /* of the warp's block of keys */
  const auto cache_block = [&](int part) {
    const int column = part * PART_BLOCKS + thread_here() / WARP;
    return column < p.columns ? p.table[(int64_t)sequence * p.columns + column] : 0;
  };
  const auto load_key = [&](int i) { /* 64 channels of 8 keys */
                                     load_words_now(key + (i % KEY_TILES * 8 * D + i / KEY_TILES * 64) * Cache::BYTES,
                                                    keys[i % HELD]);
  };
  /* Values of 16 keys of so many; in half those that are not there would be NaNs. */
  const auto stage_values = [&](int thread, const char* values, int step, int begin, int count) {
    const int lane = thread % WARP;
    uint4* region = memory.warps[thread / WARP];
#pragma unroll
    for (int i = 0; i < STEP / WARP; i++) {
      const int row = i * (WARP / ROW) + lane / ROW, piece = lane % ROW, byte = 16 * piece;
      const int from = D > Memory::WIDTH ? byte / Memory::LANE_BYTES * (D / 8 * Cache::BYTES) +
                                               byte % Memory::LANE_BYTES + begin * Cache::BYTES
                                         : byte;
      copy_async<16>(region + step % ON_THE_WAY * STEP + staged<Memory>(row, piece, row / 2 % 4),
                     values + (16 * step + row) * D * Cache::BYTES + from,
                     Cache::BYTES == 1 || 16 * step + row < count);
    }
    end_of_copies();
  };
  const auto begin_block = [&](int number, int kv, int count) {
    const int thread = thread_here(), lane = thread % WARP, g = lane / 4, t = lane % 4;
    const int64_t at = ((int64_t)number * p.KV + kv) * (BLOCK * D * Cache::BYTES);
    const char* near = static_cast<const char*>(p.key_cache) + at;
    const char* values = static_cast<const char*>(p.value_cache) + at;
    key = near + (g * D + 16 * t) * Cache::BYTES;
    memory.values[thread / WARP] = values;
#pragma unroll
    for (int i = 0; i < HELD; i++) load_key(i);
#pragma unroll 4
    for (int i = 32 * lane; i < BLOCK * D * Cache::BYTES; i += 32 * WARP) {
      bring_near(near + i);
      if (Memory::WIDTH < D) bring_near(values + i);
    }
#pragma unroll
    for (int step = 0; step < ON_THE_WAY; step++) stage_values(thread, values, step, 0, count);
  };

  int part = (int)blockIdx.x;
  int32_t number = cache_block(part); /* does not wait for the sequence's length */
  {
    const Rows rows(p, sequence, tile_of_rows * ROWS);
    if (!rows.any() || rows.count > p.few_tokens * rows.group) return;
    const int last = rows.last_position(ROWS), first = first_seen(p, rows.first_position());
    const Span span = {
        smaller(ROWS, rows.count - rows.first), kv, first / ATTENTION_PART, last / ATTENTION_PART + 1, first, last};
    if (part < span.first_part) {
      part += parts_of(span.first_part - part, blocks) * blocks;
      number = cache_block(part);
    }
    if (part >= span.end_part) return;
    /* Keys of earlier steps are on their way at once, new ones after they are there. */
    const int warp = thread_here() / WARP;
    const int first_key = (part * PART_BLOCKS + warp) * BLOCK, turn_of_keys = first_key + BLOCK > rows.start;
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
      if (turn == turn_of_keys && span.any(first_key)) begin_block(number, kv, last + 1 - first_key);
      if (turn) break;
      const int items = span.rows + 2 * (last + 1 - rows.start);
#pragma unroll 1
      for (int i = warp; i < items; i += PART_BLOCKS) {
        const int row = rows.first + i, token = i < span.rows ? rows.token(row) : (i - span.rows) / 2;
        const int position = rows.start + token;
        const int head = i < span.rows ? (kv - token) * rows.group + row : p.H + kv + (i - span.rows) % 2 * p.KV;
        if (i < span.rows)
          memory.heads[i] = (rows.offset + token) * p.H + head, memory.positions[i] = position;
        else if (position / ATTENTION_PART % blocks != (int)blockIdx.x)
          continue;
        rotate_head<Cache>(p, {sequence, position}, rows.offset + token, head, kv, [&](int channel, uint32_t two) {
          uint4* to = &memory.queries[channel / 64][channel % 16 / 4][i % 8 * 4 + channel % 64 / 16];
          reinterpret_cast<uint32_t*>(to)[channel % 4 + i / 8] = two;
        });
      }
      if (threadIdx.x == 0) memory.span = span;
      if ((int)threadIdx.x >= span.rows && threadIdx.x < ROWS) memory.positions[threadIdx.x] = last;
      __syncthreads();
    }
  }

#pragma unroll 1
  for (;;) {
    const int thread = thread_here(), lane = thread % WARP, warp = thread / WARP, g = lane / 4, t = lane % 4;
    const int first_key = (part * PART_BLOCKS + warp) * BLOCK;
    uint4* region = memory.warps[warp];
    const bool any_seen = memory.span.any(first_key); /* of a warp */

    RowSums sums = {{-infinity(), -infinity()}, {0, 0}};
    uint4 weights[KEY_TILES / 2];
    if (any_seen) {
      float4 scores[KEY_TILES];
#pragma unroll
      for (int i = 0; i < KEY_TILES; i++) scores[i] = make_float4(0, 0, 0, 0);
#pragma unroll(D > 128 ? 1 : D / 64)
      for (int channel = 0; channel < D / 64; channel++) {
        uint4 queries[4];
#pragma unroll
        for (int s = 0; s < 4; s++) queries[s] = memory.queries[channel][s][lane];
#pragma unroll
        for (int tile = 0; tile < KEY_TILES; tile++) {
          const int i = channel * KEY_TILES + tile;
          const uint32_t (&words)[KEY_WORDS] = keys[i % HELD];
#pragma unroll
          for (int s = 0; s < 4; s++)
            mma_f16(scores[tile], queries[s],
                    make_uint2(Cache::channels(words, 2 * s), Cache::channels(words, 2 * s + 1)));
          if (i + HELD < D / 64 * KEY_TILES) load_key(i + HELD);
        }
      }
      const int position[2] = {memory.positions[g], memory.positions[g + 8]};
      sums = softmax_block(p, position, first_key, scores, weights);
    }
    if (t == 0) {
#pragma unroll
      for (int i = 0; i < 2; i++) memory.max[g + 8 * i][warp] = sums.max[i], memory.sum[g + 8 * i][warp] = sums.sum[i];
    }

#pragma unroll 1
    for (int begin = 0; begin < D / 8; begin += TILES) {
      float4 outputs[TILES];
#pragma unroll
      for (int i = 0; i < TILES; i++) outputs[i] = make_float4(0, 0, 0, 0);
      if (any_seen) {
#pragma unroll
        for (int step = 0; step < ON_THE_WAY && begin; step++)
          stage_values(thread_here(), memory.values[warp], step, begin, memory.span.last + 1 - first_key);
#pragma unroll
        for (int step = 0; step < KEY_TILES / 2; step++) {
          wait_for_copies<ON_THE_WAY - 1>();
          __syncwarp();
#pragma unroll
          for (int piece = 0; piece < TILES; piece += PIECE) {
            uint32_t words[4][PIECE_WORDS];
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const int byte = g * Memory::LANE_BYTES + piece * Cache::BYTES;
              const uint4* from =
                  region + (step % ON_THE_WAY * 16 + i / 2 * 8) * ROW + staged<Memory>(2 * t + i % 2, byte / 16, t);
              load_words(reinterpret_cast<const char*>(from) + byte % 16, true, words[i]);
            }
#pragma unroll
            for (int i = 0; i < PIECE; i++)
              mma_f16(outputs[piece + i], weights[step],
                      make_uint2(Cache::keys(words[0], words[1], i), Cache::keys(words[2], words[3], i)));
          }
          if (step + ON_THE_WAY < KEY_TILES / 2) {
            __syncwarp();
            stage_values(thread_here(), memory.values[warp], step + ON_THE_WAY, begin,
                         memory.span.last + 1 - first_key);
          } else {
            end_of_copies();
          }
        }
        __syncwarp();
      }
      number = cache_block(part + blocks); /* of the next part, if there is one */
      /* Slot 2 k + c of a lane: four channels from (2 t + c) (D / 8) + begin + 4 k on. */
      const int thread = thread_here(), lane = thread % WARP, warp = thread / WARP, g = lane / 4, t = lane % 4;
      float4* slots = reinterpret_cast<float4*>(memory.warps[warp]) + lane;
#pragma unroll
      for (int i = 0; i < TILES; i += 4) {
        const float4 &a = outputs[i], &b = outputs[i + 1], &c = outputs[i + 2], &d = outputs[i + 3];
        slots[(i / 2) * WARP] = make_float4(a.x, b.x, c.x, d.x),
                        slots[(i / 2 + 1) * WARP] = make_float4(a.y, b.y, c.y, d.y);
        if (memory.span.rows <= 8) continue;
        slots[(SLOTS + i / 2) * WARP] = make_float4(a.z, b.z, c.z, d.z);
        slots[(SLOTS + i / 2 + 1) * WARP] = make_float4(a.w, b.w, c.w, d.w);
      }
      __syncthreads();
#pragma unroll 1
      for (int slot = warp; slot < (memory.span.rows > 8 ? 2 : 1) * SLOTS; slot += PART_BLOCKS) {
        const int row = g + slot / SLOTS * 8;
        float max = -infinity(), sum = 0;
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < PART_BLOCKS; i++) max = fmaxf(max, memory.max[row][i]);
#pragma unroll
        for (int i = 0; i < PART_BLOCKS; i++) {
          const float factor = moved(memory.max[row][i], max);
          const float4 more = reinterpret_cast<const float4*>(memory.warps[i])[slot * WARP + lane];
          total.x = fmaf(more.x, factor, total.x), total.y = fmaf(more.y, factor, total.y);
          total.z = fmaf(more.z, factor, total.z), total.w = fmaf(more.w, factor, total.w);
          sum = fmaf(memory.sum[row][i], factor, sum);
        }
        if (row >= memory.span.rows) continue;
        const int64_t head = memory.heads[row];
        const int channel = (2 * t + slot % 2) * (D / 8) + begin + slot % SLOTS / 2 * 4;
        if (memory.span.end_part - memory.span.first_part == 1) {
          store_result(p, head * D, memory.span.kv, channel, total, Cache::UNIT / sum);
          continue;
        }
        *reinterpret_cast<float4*>(p.part_sums + (head * p.parts + part) * D + channel) = total;
        if (channel == 0) reinterpret_cast<float2*>(p.part_rows)[head * p.parts + part] = make_float2(max, sum);
      }
      __syncthreads();
    }
    part += blocks;
    if (part >= memory.span.end_part) break;
    const int next_key = (part * PART_BLOCKS + thread_here() / WARP) * BLOCK;
#pragma unroll
    for (int i = 0; i < HELD * KEY_WORDS; i++) keys[i / KEY_WORDS][i % KEY_WORDS] = 0; /* old ones need no registers */
    if (memory.span.any(next_key)) begin_block(number, memory.span.kv, memory.span.last + 1 - next_key);
  }

  const int first_part = memory.span.first_part, end = memory.span.end_part;
  if (end - first_part == 1) return;

  const int of_rows = smaller(end - first_part, blocks); /* thread blocks that have parts */
  if (of_rows > 1) {
    if (thread_here() == 0) {
      uint32_t* ended = p.ended + memory.heads[0];
      __threadfence(); /* what this block has left is seen before it counts */
      const uint32_t before = atomicAdd(ended, 1u);
      if (before + 1 == (uint32_t)of_rows) *ended = 0; /* for the next step */
      memory.before = before;
    }
    __syncthreads();
    if (memory.before + 1 < (uint32_t)of_rows) return;
    __threadfence();
  }
#pragma unroll 1
  for (int i = thread_here(); i < memory.span.rows * (D / 4); i += PART_THREADS) {
    combine_parts<Cache>(p, memory.heads[i / (D / 4)], memory.span.kv, i % (D / 4) * 4, first_part, end);
  }
}

/* Prefill: a warp for each 16 rows, which passes the blocks of keys in order. Of heads of more than 128 channels SPLIT warps
   have the same rows, and a part of the results' channels each, whose sums then fit registers. All warps of a thread block use a block of
   keys and values that lies in shared memory in half: values as pairs of keys, as mma wants them. Distances between
   rows of both keep loads of 16 bytes free of bank conflicts. */
template <int D>
struct PromptMemory {
  enum { WARPS = 4, SPLIT = D > 128 ? 2 : 1, TILES = D / 8 / SPLIT, THREADS = WARPS * WARP };
  uint32_t keys[BLOCK][D / 2 + 4];
  uint32_t values[BLOCK / 2][D + 8];
  float4 total[WARPS][TILES][WARP]; /* of earlier parts */
};

template <class Cache, int D>
__device__ __forceinline__ void stage_block(const Attention& p, int sequence, int kv, int first_key, int last,
                                            PromptMemory<D>& memory) {
  const int64_t at = entry(p, sequence, first_key, kv) * Cache::BYTES;
  const char *keys = static_cast<const char*>(p.key_cache) + at, *values = static_cast<const char*>(p.value_cache) + at;
#pragma unroll 2
  for (int i = threadIdx.x; i < BLOCK * D / 8; i += PromptMemory<D>::THREADS) { /* eight channels of a key */
    const int key = i / (D / 8), channel = i % (D / 8) * 8;
    uint32_t words[2 * Cache::BYTES];
    load_words(keys + (key * D + channel) * Cache::BYTES, first_key + key <= last, words);
    *reinterpret_cast<uint4*>(&memory.keys[key][channel / 2]) = make_uint4(
        Cache::channels(words, 0), Cache::channels(words, 1), Cache::channels(words, 2), Cache::channels(words, 3));
  }
#pragma unroll 2
  for (int i = threadIdx.x; i < BLOCK / 2 * D / 4; i += PromptMemory<D>::THREADS) { /* four channels of two keys */
    const int pair = i / (D / 4), channel = i % (D / 4) * 4;
    uint32_t first[Cache::BYTES], second[Cache::BYTES];
    load_words(values + (2 * pair * D + channel) * Cache::BYTES, first_key + 2 * pair <= last, first);
    load_words(values + ((2 * pair + 1) * D + channel) * Cache::BYTES, first_key + 2 * pair + 1 <= last, second);
    *reinterpret_cast<uint4*>(&memory.values[pair][channel]) =
        make_uint4(Cache::keys(first, second, 0), Cache::keys(first, second, 1), Cache::keys(first, second, 2),
                   Cache::keys(first, second, 3));
  }
}

template <class Cache, int D>
__device__ __forceinline__ void attention_prompt(const Attention& p) {
  PromptMemory<D>& memory = shared_memory<PromptMemory<D>>();
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  enum {
    SPLIT = PromptMemory<D>::SPLIT,
    TILES = PromptMemory<D>::TILES,
    BLOCK_ROWS = PromptMemory<D>::WARPS / SPLIT * ROWS
  };
  const int kv = blockIdx.y, sequence = blockIdx.z, first_row = (int)(gridDim.x - 1 - blockIdx.x) * BLOCK_ROWS;
  const int first_channel = warp % SPLIT * (D / SPLIT);
  const Rows all(p, sequence, first_row), rows(p, sequence, first_row + warp / SPLIT * ROWS);
  if (!all.any() || all.count <= p.few_tokens * all.group) return;
  const int last = all.last_position(BLOCK_ROWS), first_block = first_seen(p, all.first_position()) / BLOCK;

  enum { STAY = D <= 128 }; /* queries fit registers beside the sums */
  uint4 queries[D / 64][4];
#pragma unroll
  for (int i = 0; i < D / 64 && STAY; i++) load_queries(p, rows, kv, 64 * i, queries[i]);
  float4 outputs[TILES]; /* of this part */
  RowSums sums = {{-infinity(), -infinity()}, {0, 0}}, total = sums;
#pragma unroll
  for (int i = 0; i < TILES; i++) memory.total[warp][i][lane] = outputs[i] = make_float4(0, 0, 0, 0);

  for (int block = first_block; block * BLOCK <= last; block++) {
    __syncthreads();
    stage_block<Cache>(p, sequence, kv, block * BLOCK, last, memory);
    __syncthreads();
    float4 scores[KEY_TILES];
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++) scores[i] = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
      if (!STAY) load_queries(p, rows, kv, 64 * i, queries[i]);
#pragma unroll
      for (int tile = 0; tile < KEY_TILES; tile++) {
        uint32_t words[8];
        load_words(&memory.keys[8 * tile + g][32 * i + 8 * t], true, words);
#pragma unroll
        for (int s = 0; s < 4; s++) mma_f16(scores[tile], queries[i][s], make_uint2(words[2 * s], words[2 * s + 1]));
      }
    }
    uint4 weights[KEY_TILES / 2];
    const RowSums here = softmax_block(p, rows.position, block * BLOCK, scores, weights);
    float scale[2], factor[2];
    add_rows(sums, here, scale, factor);
#pragma unroll
    for (int i = 0; i < TILES / 4; i++) {
      float4 added[4]; /* channels 32 i + 4 n + j of column n */
      const int channel = first_channel + 32 * i + 4 * g;
#pragma unroll
      for (int j = 0; j < 4; j++) added[j] = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int step = 0; step < KEY_TILES / 2; step++) {
        uint32_t first[4], second[4];
        load_words(&memory.values[8 * step + t][channel], true, first);
        load_words(&memory.values[8 * step + t + 4][channel], true, second);
#pragma unroll
        for (int j = 0; j < 4; j++) mma_f16(added[j], weights[step], make_uint2(first[j], second[j]));
      }
#pragma unroll
      for (int j = 0; j < 4; j++) add_moved(outputs[4 * i + j], scale, added[j], factor);
    }
    if ((block + 1) % PART_BLOCKS && (block + 1) * BLOCK <= last) continue; /* the part goes on */
    add_rows(total, sums, scale, factor);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      add_moved(memory.total[warp][i][lane], scale, outputs[i], factor);
      outputs[i] = make_float4(0, 0, 0, 0);
    }
    sums = {{-infinity(), -infinity()}, {0, 0}};
  }

  /* Once more: registers had no room for these. */
  const int thread = thread_here(), of_warp = thread / WARP;
  const Rows ended(p, sequence, first_row + of_warp / SPLIT * ROWS);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int lane = thread % WARP, warp = of_warp, g = lane / 4, t = lane % 4;
    const int row = ended.first + g + 8 * half;
    if (row >= ended.count) continue;
    const int64_t to = ended.head(p, row, kv) * D;
    const float inverse = Cache::UNIT / total.sum[half];
#pragma unroll
    for (int i = 0; i < TILES / 2; i++) {
      const int channel = first_channel + i / 2 * 32 + 8 * t + i % 2 * 4; /* of the mma's column 2 t + i % 2 */
      const float4* x = &memory.total[warp][i / 2 * 4][lane];
      float4 scales = make_float4(1, 1, 1, 1);
      if (p.value_scales) scales = *reinterpret_cast<const float4*>(p.value_scales + kv * D + channel);
      const auto value = [&](int j, float scale) {
        const float4& four = x[j * WARP];
        return (half ? i % 2 ? four.w : four.z : i % 2 ? four.y : four.x) * inverse * scale;
      };
      static_cast<uint2*>(p.y)[(to + channel) / 4] = make_uint2(f16x2_of(value(0, scales.x), value(1, scales.y)),
                                                                f16x2_of(value(2, scales.z), value(3, scales.w)));
    }
  }
}

#define ATTENTION(Cache, D)                                                                     \
  KERNEL(attention_parts_##Cache##_##D, Attention, PART_THREADS, D > 128 ? 1 : PART_RESIDENT) { \
    attention_parts<Cache, D>(p);                                                               \
  }                                                                                             \
  KERNEL(attention_prompt_##Cache##_##D, Attention, PromptMemory<D>::THREADS, 1) {              \
    attention_prompt<Cache, D>(p);                                                              \
  }
#define ROTARY_CACHE(Cache)                                    \
  KERNEL(rotary_cache_##Cache, Attention, ROTARY_THREADS, 4) { \
    rotary_cache<Cache>(p);                                    \
  }
#if SELECTED(CACHE_Int8)
ROTARY_CACHE(Int8)
#endif
#if SELECTED(ATTENTION_Int8_64)
ATTENTION(Int8, 64)
#endif
#if SELECTED(ATTENTION_Int8_128)
ATTENTION(Int8, 128)
#endif
#if SELECTED(ATTENTION_Int8_256)
ATTENTION(Int8, 256)
#endif
#if SELECTED(CACHE_Fp8)
ROTARY_CACHE(Fp8)
#endif
#if SELECTED(ATTENTION_Fp8_64)
ATTENTION(Fp8, 64)
#endif
#if SELECTED(ATTENTION_Fp8_128)
ATTENTION(Fp8, 128)
#endif
#if SELECTED(ATTENTION_Fp8_256)
ATTENTION(Fp8, 256)
#endif
#if SELECTED(CACHE_Half)
ROTARY_CACHE(Half)
#endif
#if SELECTED(ATTENTION_Half_64)
ATTENTION(Half, 64)
#endif
#if SELECTED(ATTENTION_Half_128)
ATTENTION(Half, 128)
#endif
#if SELECTED(ATTENTION_Half_256)
ATTENTION(Half, 256)
#endif
