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
enum { ROTARY_THREADS = 256, PART_THREADS = PART_BLOCKS * WARP, SUMMED = 4 };
constexpr float LOG2_E = 1.44269504f;

/* What rows have of some keys: their largest score in powers of two, rounded up, and the sum of their weights. Without a
   key that a row sees: minus infinity, and 0. */
struct RowSums {
  float max[2], sum[2];
};

/* What moves sums that are relative to 2^from to 2^to: a power of two, exactly, or 0. */
__device__ __forceinline__ float moved(float from, float to) {
  if (from == -infinity()) return 0;
  if (from == to) return 1;
  const float difference = from - to;
  return difference > -127 ? __uint_as_float((uint32_t)(127 + (int)difference) << 23) : 0;
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
    const uint32_t selector = 0x0400 + 0x0101 * (i % 4);
    const uint32_t both = __byte_perm(positive(first[i / 4]), positive(second[i / 4]), selector);
    return centred((both & 0x00ff00ff) | 0x64006400);
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

/* By a warp: a head of a token, of queries, keys or values. */
template <class Cache>
__device__ __forceinline__ void rotate_head(const Attention& p, const Place& place, int token, int head) {
  const int half = p.D / 2, kv = head < p.H ? head / (p.H / p.KV) : (head - p.H) % p.KV;
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
  const int64_t at = is_query ? ((int64_t)token * p.H + head) * p.D : entry(p, place.sequence, place.position, kv);
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
      uint32_t* to = static_cast<uint32_t*>(p.query);
      const float scale = p.scale * Cache::UNIT;
      to[(at + first) / 2] = f16x2_of(a.x * scale * one.x, a.y * scale * one.y);
      to[(at + second) / 2] = f16x2_of(b.x * scale * two.x, b.y * scale * two.y);
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
  if (p.offsets[place.sequence + 1] - p.offsets[place.sequence] > p.few_tokens)
    rotate_head<Cache>(p, place, token, head);
}

/* The rows of a warp: from row `first` on of a sequence and KV head. */
struct Rows {
  int group, first, count; /* count: of all rows of the sequence */
  int offset, start;       /* of the sequence: its first token, and its position */
  int position[2];         /* of rows g and g + 8; -1 where there is no row */

  __device__ __forceinline__ Rows(const Attention& p, int sequence, int first)
      : group(p.H / p.KV), first(first), offset(p.offsets[sequence]), start(p.starts[sequence]) {
    count = (p.offsets[sequence + 1] - offset) * group;
    const int g = threadIdx.x % WARP / 4;
    for (int i = 0; i < 2; i++) {
      const int row = first + g + 8 * i;
      position[i] = row < count ? start + row / group : -1;
    }
  }
  __device__ __forceinline__ bool any() const { return first < count; }
  /* The query head of a row, among those of all tokens. */
  __device__ __forceinline__ int64_t head(const Attention& p, int row, int kv) const {
    return (int64_t)(offset + row / group) * p.H + kv * group + row % group;
  }
  /* Positions of the first row, and of the last of the next `rows`. */
  __device__ __forceinline__ int first_position() const { return start + first / group; }
  __device__ __forceinline__ int last_position(int rows) const {
    return start + (smaller(first + rows, count) - 1) / group;
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

/* Scores of a block become weights, in half as operands of 16 keys each; what the rows have of the block. */
__device__ __forceinline__ RowSums softmax_block(const Attention& p, const Rows& rows, int first_key,
                                                 float4 (&scores)[KEY_TILES], uint4 (&weights)[KEY_TILES / 2]) {
  const int t = threadIdx.x % 4;
  RowSums sums;
  int first[2], end[2]; /* keys that each row sees, counted from this lane's first */
#pragma unroll
  for (int i = 0; i < 2; i++) {
    first[i] = first_seen(p, rows.position[i]) - first_key - 2 * t;
    end[i] = rows.position[i] + 1 - first_key - 2 * t;
    sums.max[i] = -infinity(), sums.sum[i] = 0;
  }
  const auto seen = [&](int i, int key) { return key >= first[i] && key < end[i]; };
  if (p.softcap > 0) {
    const float inverse = 2 * LOG2_E / p.softcap, cap = p.softcap * LOG2_E;
    const auto capped = [&](float x) {
      return (1 - 2 / (exp2_approx(x * inverse) + 1)) * cap;
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
#pragma unroll
  for (int tile = 0; tile < KEY_TILES; tile++) {
    const float4& s = scores[tile];
    if (seen(0, 8 * tile)) sums.max[0] = fmaxf(sums.max[0], s.x);
    if (seen(0, 8 * tile + 1)) sums.max[0] = fmaxf(sums.max[0], s.y);
    if (seen(1, 8 * tile)) sums.max[1] = fmaxf(sums.max[1], s.z);
    if (seen(1, 8 * tile + 1)) sums.max[1] = fmaxf(sums.max[1], s.w);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sums.max[i] = fmaxf(sums.max[i], __shfl_xor_sync(ALL_LANES, sums.max[i], 1));
    sums.max[i] = ceilf(fmaxf(sums.max[i], __shfl_xor_sync(ALL_LANES, sums.max[i], 2)));
  }
#pragma unroll
  for (int tile = 0; tile < KEY_TILES; tile++) {
    const float4& s = scores[tile];
    const float x = seen(0, 8 * tile) ? exp2_approx(s.x - sums.max[0]) : 0;
    const float y = seen(0, 8 * tile + 1) ? exp2_approx(s.y - sums.max[0]) : 0;
    const float z = seen(1, 8 * tile) ? exp2_approx(s.z - sums.max[1]) : 0;
    const float w = seen(1, 8 * tile + 1) ? exp2_approx(s.w - sums.max[1]) : 0;
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

/* By a warp: adds the parts of a query head of a token, which blocks have left. at: the number of the head among all. */
__device__ __forceinline__ void combine_parts(const Attention& p, int64_t at, int position, int kv) {
  const int first = first_seen(p, position) / ATTENTION_PART, end = position / ATTENTION_PART + 1;
  const float2* rows = reinterpret_cast<const float2*>(p.part_rows) + at * p.parts;
  float max = -infinity(), sum = 0;
  for (int part = first; part < end; part++) max = fmaxf(max, load_of_others(rows + part).x);
  for (int part = first; part < end; part++) {
    const float2 row = load_of_others(rows + part);
    sum = fmaf(row.y, moved(row.x, max), sum);
  }
  const float inverse = (p.fp8 ? (float)Fp8::UNIT : 1) / sum;
  for (int channel = threadIdx.x % WARP * 2; channel < p.D; channel += 2 * WARP) {
    float2 y = make_float2(0, 0);
    for (int part = first; part < end; part++) {
      const float2 x =
          load_of_others(reinterpret_cast<const float2*>(p.part_sums + (at * p.parts + part) * p.D + channel));
      const float factor = moved(load_of_others(rows + part).x, max);
      y = make_float2(fmaf(x.x, factor, y.x), fmaf(x.y, factor, y.y));
    }
    float2 scales = make_float2(1, 1);
    if (p.value_scales) scales = *reinterpret_cast<const float2*>(p.value_scales + kv * p.D + channel);
    static_cast<uint32_t*>(p.y)[(at * p.D + channel) / 2] =
        pair_of(y.x * inverse * scales.x, y.y * inverse * scales.y, p.bfloat16);
  }
}

/* Decode: a thread block for each part of the keys, KV head and sequence, a warp for each block of keys. Keys and values
   go straight into registers: a lane's loads are neighbouring bytes of a key, which channel is whose is free.

   Before that a block rotates its queries, and writes the new entries of its part: all that it reads of this step. Other
   blocks may write the same bytes. The block of some rows that ends last adds their parts, in order. */
template <int D>
struct PartMemory {
  float4 sums[SUMMED][PART_BLOCKS][WARP];
  float rows[2][PART_BLOCKS][ROWS]; /* largest scores, and sums of weights */
  float total[ROWS][D];
  uint32_t parts, before; /* blocks of the same rows: all, and those that have ended before */
  int32_t rows_here;      /* registers have no room for these */
};

template <class Cache, int D>
__device__ __forceinline__ void attention_parts(const Attention& p) {
  /* Channels of a value that a lane loads at once, and tiles of results at once: registers hold no more. */
  enum { PIECE = D == 128 ? 16 : 8, TILES = D > 128 ? D / 16 : D / 8 };
  PartMemory<D>& memory = shared_memory<PartMemory<D>>();
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int part = (int)blockIdx.x % p.parts, kv = blockIdx.y, sequence = blockIdx.z;
  const Rows rows(p, sequence, (int)blockIdx.x / p.parts * ROWS);
  if (!rows.any() || rows.count > p.few_tokens * rows.group) return;
  const int last = rows.last_position(ROWS), block = part * PART_BLOCKS + warp, first_key = block * BLOCK;
  const int first_part = first_seen(p, rows.first_position()) / ATTENTION_PART,
            parts = last / ATTENTION_PART + 1 - first_part;
  if (part < first_part || part >= first_part + parts) return;

  const int here = smaller(ROWS, rows.count - rows.first),
            first_new = part * ATTENTION_PART > rows.start ? part * ATTENTION_PART : rows.start;
  const int fresh = smaller(last + 1, (part + 1) * ATTENTION_PART) - first_new; /* entries of this part */
  for (int i = warp; i < here + (fresh > 0 ? 2 * fresh : 0); i += PART_BLOCKS) {
    const int row = rows.first + i, entry = i - here;
    const int position = i < here ? rows.start + row / rows.group : first_new + entry / 2;
    const int head = i < here ? kv * rows.group + row % rows.group : p.H + kv + entry % 2 * p.KV;
    rotate_head<Cache>(p, {sequence, position}, rows.offset + position - rows.start, head);
  }
  if (threadIdx.x == 0) memory.parts = (uint32_t)parts, memory.rows_here = here;
  __syncthreads();

  RowSums sums = {{-infinity(), -infinity()}, {0, 0}};
  uint4 weights[KEY_TILES / 2];
  const char* values = static_cast<const char*>(p.value_cache);
  const bool any_seen = first_key <= last && first_key + BLOCK > first_seen(p, rows.first_position()); /* of a warp */
  if (any_seen) {
    const int64_t at = entry(p, sequence, first_key, kv) * Cache::BYTES;
    const char* keys = static_cast<const char*>(p.key_cache) + at;
    values += at;
    float4 scores[KEY_TILES];
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++) scores[i] = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int channel = 0; channel < D; channel += 64) {
      uint4 queries[4];
      load_queries(p, rows, kv, channel, queries);
#pragma unroll
      for (int tile = 0; tile < KEY_TILES; tile++) {
        const int key = 8 * tile + g;
        uint32_t words[4 * Cache::BYTES];
        load_words(keys + (key * D + channel + 16 * t) * Cache::BYTES, first_key + key <= last, words);
#pragma unroll
        for (int s = 0; s < 4; s++)
          mma_f16(scores[tile], queries[s],
                  make_uint2(Cache::channels(words, 2 * s), Cache::channels(words, 2 * s + 1)));
      }
    }
    sums = softmax_block(p, rows, first_key, scores, weights);
  }

  if (t == 0) {
    for (int i = 0; i < 2; i++)
      memory.rows[0][warp][g + 8 * i] = sums.max[i], memory.rows[1][warp][g + 8 * i] = sums.sum[i];
  }
  __syncthreads();
  float max[2] = {-infinity(), -infinity()}, factors[2][PART_BLOCKS];
#pragma unroll
  for (int i = 0; i < 2 * PART_BLOCKS; i++) max[i % 2] = fmaxf(max[i % 2], memory.rows[0][i / 2][g + i % 2 * 8]);
#pragma unroll
  for (int i = 0; i < 2 * PART_BLOCKS; i++)
    factors[i % 2][i / 2] = moved(memory.rows[0][i / 2][g + i % 2 * 8], max[i % 2]);
#pragma unroll
  for (int begin = 0; begin < D / 8; begin += TILES) {
    float4 outputs[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++) outputs[i] = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int piece = 0; piece < TILES && any_seen; piece += PIECE) {
#pragma unroll
      for (int step = 0; step < KEY_TILES / 2; step++) {
        uint32_t words[4][PIECE * Cache::BYTES / 4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int key = 16 * step + 2 * t + i % 2 + i / 2 * 8;
          load_words(values + (key * D + g * (D / 8) + begin + piece) * Cache::BYTES, first_key + key <= last,
                     words[i]);
        }
#pragma unroll
        for (int i = 0; i < PIECE; i++)
          mma_f16(outputs[piece + i], weights[step],
                  make_uint2(Cache::keys(words[0], words[1], i), Cache::keys(words[2], words[3], i)));
      }
    }
#pragma unroll
    for (int done = 0; done < TILES; done += SUMMED) {
#pragma unroll
      for (int i = 0; i < SUMMED; i++) memory.sums[i][warp][lane] = outputs[done + i];
      __syncthreads();
      if (warp < SUMMED) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int other = 0; other < PART_BLOCKS; other++) {
          const float4 more = memory.sums[warp][other][lane];
          sum.x = fmaf(more.x, factors[0][other], sum.x), sum.y = fmaf(more.y, factors[0][other], sum.y);
          sum.z = fmaf(more.z, factors[1][other], sum.z), sum.w = fmaf(more.w, factors[1][other], sum.w);
        }
        const int channel = 2 * t * (D / 8) + begin + done + warp; /* of the mma's column 2 t */
        memory.total[g][channel] = sum.x, memory.total[g][channel + D / 8] = sum.y;
        memory.total[g + 8][channel] = sum.z, memory.total[g + 8][channel + D / 8] = sum.w;
      }
      __syncthreads();
    }
  }
  for (int i = threadIdx.x; i < ROWS * D; i += PART_THREADS) {
    const int row = rows.first + i / D;
    if (row < rows.count)
      p.part_sums[(rows.head(p, row, kv) * p.parts + part) * D + i % D] = memory.total[i / D][i % D];
  }
  for (int i = 0; i < 2 && warp == 0 && t == 0; i++) {
    const int row = rows.first + g + 8 * i;
    if (row >= rows.count) continue;
    float sum = 0;
    for (int other = 0; other < PART_BLOCKS; other++)
      sum = fmaf(memory.rows[1][other][g + 8 * i], factors[i][other], sum);
    reinterpret_cast<float2*>(p.part_rows)[rows.head(p, row, kv) * p.parts + part] = make_float2(max[i], sum);
  }

  __threadfence(); /* what this block has left is seen before it counts */
  __syncthreads();
  uint32_t* ended = p.ended + rows.head(p, rows.first, kv);
  if (threadIdx.x == 0) memory.before = atomicAdd(ended, 1u);
  __syncthreads();
  if (memory.before + 1 < memory.parts) return;
  __threadfence();
  if (threadIdx.x == 0) *ended = 0; /* for the next step */
  for (int i = warp; i < memory.rows_here; i += PART_BLOCKS) {
    const int row = rows.first + i;
    combine_parts(p, rows.head(p, row, kv), rows.start + row / rows.group, kv);
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
    const RowSums here = softmax_block(p, rows, block * BLOCK, scores, weights);
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

#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = rows.first + g + 8 * half;
    if (row >= rows.count) continue;
    const int64_t to = rows.head(p, row, kv) * D;
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
      static_cast<uint2*>(p.y)[(to + channel) / 4] =
          make_uint2(pair_of(value(0, scales.x), value(1, scales.y), p.bfloat16),
                     pair_of(value(2, scales.z), value(3, scales.w), p.bfloat16));
    }
  }
}

#define ATTENTION(Cache, D)                                                        \
  KERNEL(attention_parts_##Cache##_##D, Attention, PART_THREADS, 1) {              \
    attention_parts<Cache, D>(p);                                                  \
  }                                                                                \
  KERNEL(attention_prompt_##Cache##_##D, Attention, PromptMemory<D>::THREADS, 1) { \
    attention_prompt<Cache, D>(p);                                                 \
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
