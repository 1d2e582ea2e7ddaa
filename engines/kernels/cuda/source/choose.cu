/* From logits to tokens: the first of the largest, or one that is drawn; and the likeliest ones, with the sum of all weights.

   A draw is that of runtime/engine/draw.py, to the bit: a token's weight is its probability over that of the likeliest one,
   times 2^30, as an integer. So sums do not depend on the order of their terms, and neither do tokens. */
#include "portable.h"
#include "parameters.h"

enum { ARGMAX_THREADS = 256, CHOOSE_THREADS = 512, CHOOSE_WARPS = CHOOSE_THREADS / WARP };
enum { BINS = 256, SUMS = CHOOSE_THREADS, SUMS_OF_LANE = SUMS / WARP };

struct ArgmaxMemory {
  float max[ARGMAX_THREADS / WARP];
  int index[ARGMAX_THREADS / WARP];
};

struct ChooseMemory {
  uint64_t sums[SUMS], lanes[WARP], above;
  uint32_t low[BINS], high[BINS]; /* of sums, that many threads add to */
  uint32_t keys[MOST_TOP];
  int32_t tokens[MOST_TOP];
  uint32_t count;
  int found, index;
  float max;
};

/* The larger, a NaN above all, and of equals the one further left. */
__device__ __forceinline__ void keep_larger(float& max, int& index, float other, int at) {
  const bool is_none = other != other, had_none = max != max;
  if (had_none ? is_none && at < index : is_none || other > max || (other == max && at < index)) {
    max = other;
    index = at;
  }
}
__device__ __forceinline__ void warp_argmax(float& max, int& index) {
  for (int distance = WARP / 2; distance; distance /= 2) {
    const float other = __shfl_xor_sync(ALL_LANES, max, distance);
    const int at = __shfl_xor_sync(ALL_LANES, index, distance);
    keep_larger(max, index, other, at);
  }
}

/* Of a row, part blockIdx.x of its columns. An infinite logit times 0 is no number either. */
KERNEL(argmax_parts, Choose, ARGMAX_THREADS, 4) {
  ArgmaxMemory& memory = shared_memory<ArgmaxMemory>();
  const int size = parts_of(p.N, ARGMAX_PARTS), first = (int)blockIdx.x * size, end = smaller(first + size, p.N);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const float* logits = p.logits + (int64_t)blockIdx.y * p.N;
  float max = -infinity();
  int index = p.N;
#pragma unroll 4
  for (int i = first + (int)threadIdx.x; i < end; i += ARGMAX_THREADS)
    keep_larger(max, index, fmaf(logits[i], 0, logits[i]), i);
  warp_argmax(max, index);
  if (lane == 0) memory.max[warp] = max, memory.index[warp] = index;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < ARGMAX_THREADS / WARP; i++) keep_larger(max, index, memory.max[i], memory.index[i]);
  const int64_t at = (int64_t)blockIdx.y * ARGMAX_PARTS + blockIdx.x;
  p.part_max[at] = max, p.part_index[at] = index;
}

/* 2^((score - max) * scale) in fixed point, 2^30 for the largest score. Multiplies and adds round separately. */
__device__ __forceinline__ uint32_t weight_of(float score, float max, float scale) {
  const float one = 1 << 30;
  const float exponent = fmaxf((score - max) * scale, -40.0f), whole = rintf(exponent), f = exponent - whole;
  float power = 0.0013264727f * one * f + 0.009671513f * one;
  power = power * f + 0.055507336f * one;
  power = power * f + 0.24022242f * one;
  power = power * f + 0.693147f * one;
  power = power * f + one;
  return (uint32_t)__float2int_rn(power * __uint_as_float((uint32_t)(127 + (int)whole) << 23));
}

/* Larger for larger scores, and the same for 0 and -0. */
__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ uint64_t warp_sum_of(uint64_t x) {
  for (int distance = WARP / 2; distance; distance /= 2) {
    const uint32_t low = (uint32_t)__shfl_xor_sync(ALL_LANES, (int)(uint32_t)x, distance);
    const uint32_t high = (uint32_t)__shfl_xor_sync(ALL_LANES, (int)(uint32_t)(x >> 32), distance);
    x += (uint64_t)high << 32 | low;
  }
  return x;
}

/* Tokens with larger keys than `key`, and with this one up to `token`: the most likely ones, of equals those with lower ids. */
struct Kept {
  uint32_t key;
  int token;
  __device__ __forceinline__ bool has(uint32_t other, int at) const {
    return other > key || (other == key && at <= token);
  }
};

/* The logits of a row. All threads of a block call its functions, and get the same. */
struct ChooseRow {
  ChooseMemory& memory;
  const float* logits;
  int N;
  float max;

  /* The first of the sums with which all up to it have `needed` or more together; those before it have `above`. */
  __device__ __forceinline__ int first_with(uint64_t needed, uint64_t& above) {
    if (threadIdx.x < WARP) {
      uint64_t own = 0;
      for (int i = 0; i < SUMS_OF_LANE; i++) own += memory.sums[threadIdx.x * SUMS_OF_LANE + i];
      memory.lanes[threadIdx.x] = own;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      uint64_t before = 0;
      int lane = 0, i;
      for (; lane < WARP - 1 && before + memory.lanes[lane] < needed; lane++) before += memory.lanes[lane];
      for (i = lane * SUMS_OF_LANE; i < SUMS - 1 && before + memory.sums[i] < needed; i++) before += memory.sums[i];
      memory.found = i, memory.above = before;
    }
    __syncthreads();
    above = memory.above;
    const int found = memory.found;
    __syncthreads();
    return found;
  }

  __device__ __forceinline__ uint64_t total() {
    if (threadIdx.x < WARP) {
      uint64_t own = 0;
      for (int i = 0; i < SUMS_OF_LANE; i++) own += memory.sums[threadIdx.x * SUMS_OF_LANE + i];
      own = warp_sum_of(own);
      if (threadIdx.x == 0) memory.above = own;
    }
    __syncthreads();
    const uint64_t found = memory.above;
    __syncthreads();
    return found;
  }

  /* Sums of amounts, each of `size` tokens from `first` on. */
  template <class Amount>
  __device__ __forceinline__ void sum_parts(int first, int end, int size, const Amount& amount_of) {
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < SUMS; i += CHOOSE_WARPS) {
      const int64_t begin = first + (int64_t)i * size;
      if (begin >= end) { /* of the whole warp */
        if (lane == 0) memory.sums[i] = 0;
        continue;
      }
      const int last = (int)(begin + size < end ? begin + size : end);
      uint64_t own = 0;
      for (int64_t at = begin + lane; at < last; at += WARP) own += amount_of(logits[at], (int)at);
      own = warp_sum_of(own);
      if (lane == 0) memory.sums[i] = own;
    }
    __syncthreads();
  }

  /* The first token with which all up to it have amounts of `needed` or more together. Needs the sums of parts of the row. */
  template <class Amount>
  __device__ __forceinline__ int token_with(uint64_t needed, const Amount& amount_of) {
    int first = 0, end = N;
    for (;;) {
      const int size = parts_of(end - first, SUMS);
      uint64_t above;
      first += first_with(needed, above) * size;
      end = smaller(end, first + size);
      if (size == 1) return first;
      needed -= above;
      sum_parts(first, end, parts_of(end - first, SUMS), amount_of);
    }
  }

  template <class Amount>
  __device__ __forceinline__ void sum_row(const Amount& amount_of) {
    sum_parts(0, N, parts_of(N, SUMS), amount_of);
  }

  /* Sums of amounts by bin; `bin_of`: -1 is none. */
  template <class Amount, class Bin>
  __device__ __forceinline__ void sum_bins(const Amount& amount_of, const Bin& bin_of) {
    if (threadIdx.x < BINS) memory.low[threadIdx.x] = memory.high[threadIdx.x] = 0;
    __syncthreads();
    for (int at = threadIdx.x; at < N; at += CHOOSE_THREADS) {
      const float score = logits[at];
      const int bin = bin_of(score);
      const uint32_t amount = bin < 0 ? 0 : (uint32_t)amount_of(score, at);
      if (!amount) continue;
      const uint32_t before = atomicAdd(&memory.low[bin], amount);
      if (before + amount < before) atomicAdd(&memory.high[bin], 1);
    }
    __syncthreads();
    memory.sums[threadIdx.x] =
        threadIdx.x < BINS ? (uint64_t)memory.high[threadIdx.x] << 32 | memory.low[threadIdx.x] : 0;
    __syncthreads();
  }

  /* The most likely tokens that have amounts of `needed` or more together. Scores are first told apart by how far they are
     below the largest, so that few threads add to one bin; then by their keys, eight bits at a time. */
  template <class Amount>
  __device__ __forceinline__ Kept likeliest_with(uint64_t needed, const Amount& amount_of) {
    const float largest = max;
    const auto distance_of = [largest](float score) { return (int)fminf((largest - score) * 8, BINS - 1); };
    uint64_t above;
    sum_bins(amount_of, distance_of);
    const int distance = first_with(needed, above);
    needed -= above;
    uint32_t key = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
      sum_bins(amount_of, [&](float score) {
        const uint32_t own = key_of(score);
        const bool same = shift == 24 || own >> shift >> 8 == key >> shift >> 8;
        return same && distance_of(score) == distance ? (int)(255 - (own >> shift & 255)) : -1;
      });
      key |= (uint32_t)(255 - first_with(needed, above)) << shift;
      needed -= above;
    }
    const auto equal = [&](float score, int at) { return key_of(score) == key ? amount_of(score, at) : 0; };
    sum_row(equal);
    return {key, token_with(needed, equal)};
  }
};

/* The tokens that top-k, top-p and min-p leave, and one of them: the one that holds the point which `random` chooses of the
   sum of their weights, by ascending ids. */
__device__ __forceinline__ int drawn(ChooseRow row, const Draw& draw) {
  Kept kept = {0, row.N - 1};
  if (draw.top_k > 0 && draw.top_k < row.N)
    kept = row.likeliest_with((uint64_t)draw.top_k, [](float, int) { return (uint64_t)1; });
  const float max = row.max, scale = draw.scale;
  if (draw.top_p < 1) {
    const Kept before = kept;
    const auto weight = [&](float score, int at) {
      return before.has(key_of(score), at) ? (uint64_t)weight_of(score, max, scale) : 0;
    };
    row.sum_row(weight);
    const double needed = ceil(draw.top_p * (double)row.total());
    kept = row.likeliest_with(needed > 1 ? (uint64_t)needed : 1, weight);
  }
  const uint32_t least = (uint32_t)draw.least;
  const auto weight = [&](float score, int at) {
    const uint32_t found = weight_of(score, max, scale);
    return found >= least && kept.has(key_of(score), at) ? (uint64_t)found : 0;
  };
  row.sum_row(weight);
  return row.token_with(__umul64hi(draw.random, row.total()) + 1, weight);
}

/* The likeliest tokens, from the likeliest on, with their logits; and what log-probabilities need: the largest logit, and the
   sum of all weights, which is that of all exponentials over the largest. */
__device__ __forceinline__ void rank(ChooseRow row, int token, int top, Ranking& to) {
  ChooseMemory& memory = row.memory;
  const float max = row.max;
  row.sum_row([max](float score, int) { return (uint64_t)weight_of(score, max, 1.44269504f); });
  const uint64_t total = row.total();
  if (threadIdx.x == 0) {
    to.total = (int64_t)total, to.max = max, to.logit = row.logits[token];
    memory.count = 0;
  }
  top = smaller(smaller(top, MOST_TOP), row.N);
  if (!top) return; /* of the whole block */
  const Kept kept = row.likeliest_with((uint64_t)top, [](float, int) { return (uint64_t)1; });
  for (int at = threadIdx.x; at < row.N; at += CHOOSE_THREADS) {
    const uint32_t key = key_of(row.logits[at]);
    if (!kept.has(key, at)) continue;
    const uint32_t place = atomicAdd(&memory.count, 1);
    memory.keys[place] = key, memory.tokens[place] = at;
  }
  __syncthreads();
  if ((int)threadIdx.x >= top) return;
  const uint32_t key = memory.keys[threadIdx.x];
  const int own = memory.tokens[threadIdx.x];
  int before = 0;
  for (int i = 0; i < top; i++) before += memory.keys[i] > key || (memory.keys[i] == key && memory.tokens[i] < own);
  to.tokens[before] = own, to.logits[before] = row.logits[own];
}

/* A block for each row. */
KERNEL(choose_rows, Choose, CHOOSE_THREADS, 2) {
  ChooseMemory& memory = shared_memory<ChooseMemory>();
  const int64_t row = blockIdx.x;
  if (threadIdx.x < WARP) {
    const int64_t at = row * ARGMAX_PARTS + threadIdx.x;
    float max = p.part_max[at];
    int index = p.part_index[at];
    warp_argmax(max, index);
    if (threadIdx.x == 0) {
      memory.max = max, memory.index = index;
      if (p.ranking) p.ranking[row].total = 0;
    }
  }
  __syncthreads();
  const float max = memory.max;
  int token = max == max ? memory.index : -1;
  if (token >= 0 && p.draws) {
    const ChooseRow of = {memory, p.logits + row * p.N, p.N, max};
    const Draw draw = p.draws[row];
    if (draw.scale > 0) token = drawn(of, draw);
    if (draw.top >= 0) rank(of, token, draw.top, p.ranking[row]);
  }
  if (threadIdx.x == 0) p.y[row] = token;
}
