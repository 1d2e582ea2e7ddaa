/* y = x · Wᵀ + bias for a weight in groups of 4-, 5-, 6- or 8-bit codes, or in half, and activations in 16-bit floats; and for
   weights and activations in E4M3.

   Weights are the 16-row operand of mma, tokens its 8 columns, so one token costs what eight do and every weight is
   decoded once for all tokens of a block. The warps of a block share its outputs and split the channels: warp w takes
   chunks w, w + 8, ... of 64, which are 512 neighbouring bytes or more of codes, straight into registers. Chunks are
   loaded DEPTH ahead.

   Codes less zero points are exact in 16 bits. An mma sums 16 channels in float; the sum of 32 is multiplied by the scale
   and added to the warp's. Of E4M3 an mma sums 32 channels, and the scales of rows and tokens are multiplied at the end.
   Warps are added in their order, then the bias. None of this depends on the number of tokens,
   so a token has the same bits alone and in any batch. */
#include "weights.cuh"

enum { WARPS = 8, TOKENS = 8, ADDED = 8 }; /* TOKENS: columns of an mma; ADDED: results that are added up at once */

struct LinearMemory {
  float4 sums[ADDED][WARPS][WARP]; /* fewer where there are fewer results */
};

template <int BITS>
struct WeightChunk {
  Codes<BITS> codes;
  RowPair rows[2]; /* for each span */
};

template <class T, int BITS>
__device__ __forceinline__ void load_chunk(const Weight& w, int tile, int chunks, int chunk, WeightChunk<BITS>& to) {
  const int lane = threadIdx.x % WARP;
  const uint32_t sixteens = (uint32_t)(tile * chunks + chunk) * (8 * BITS); /* bytes before it, by 16: fits 32 bits */
  to.codes.load(w.codes + (uint64_t)sixteens * 16, lane);
  if constexpr (!SAME<T, E4M3>) {
    to.rows[0] = load_rows<BITS>(w, tile, chunk * CHUNK, lane / 4);
    to.rows[1] = load_rows<BITS>(w, tile, chunk * CHUNK + SPAN, lane / 4);
  }
}

/* The mma operands of a span. */
template <class T, int BITS, int span>
__device__ __forceinline__ void decode_span(const WeightChunk<BITS>& w, uint4 (&operands)[2]) {
  using D = Decoder<T, BITS>;
  const uint32_t zero_points = w.rows[span].zero_points;
  const uint2 offsets = make_uint2(D::offset((float)(zero_points & 255), 0), D::offset((float)(zero_points >> 8), 1));
  operands[0] = decode<T, BITS, 2 * span>(w.codes, offsets);
  operands[1] = decode<T, BITS, 2 * span + 1>(w.codes, offsets);
}

/* The same of E4M3: both steps of a span are one mma. A word of low halves and one of high halves have the codes of a step in
   row g at every other place, and between them those of row g + 8: channels 0, 2, 1, 3. */
template <int step>
__device__ __forceinline__ uint2 bytes_of(const Codes<8>& codes) {
  const uint32_t low = codes.low_word<step>(), high = codes.high_word<step>();
  return make_uint2((low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4, (low >> 4 & 0x0f0f0f0f) | (high & 0xf0f0f0f0));
}
template <int TILES, int GROUPS, int span>
__device__ __forceinline__ void add_span_e4m3(const WeightChunk<8> (&weights)[TILES], const uint8_t* x, int64_t stride,
                                              int tokens, float4 (&sums)[TILES][GROUPS]) {
  uint4 operands[TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const uint2 first = bytes_of<2 * span>(weights[tile].codes), second = bytes_of<2 * span + 1>(weights[tile].codes);
    operands[tile] = make_uint4(first.x, first.y, second.x, second.y);
  }
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    uint2 here = make_uint2(0, 0);
    if (group * TOKENS < tokens) here = *reinterpret_cast<const uint2*>(x + group * TOKENS * stride + span * SPAN);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float4 dot = make_float4(0, 0, 0, 0), &sum = sums[tile][group];
      E4M3::mma(dot, operands[tile], here);
      sum.x += dot.x, sum.y += dot.y, sum.z += dot.z, sum.w += dot.w;
    }
  }
}

/* Adds a span's part of the results of all tokens. x: this lane's activations of its token in each group. */
template <class T, int BITS, int TILES, int GROUPS, int span>
__device__ __forceinline__ void add_span(const WeightChunk<BITS> (&weights)[TILES], const typename T::Element* x,
                                         int64_t stride, int tokens, float4 (&sums)[TILES][GROUPS]) {
  if constexpr (SAME<T, E4M3>) {
    add_span_e4m3<TILES, GROUPS, span>(weights, x, stride, tokens, sums);
    return;
  } else {
    uint4 operands[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) decode_span<T, BITS, span>(weights[tile], operands[tile]);
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const uint4 here = group * TOKENS < tokens
                             ? *reinterpret_cast<const uint4*>(x + group * TOKENS * stride + span * SPAN)
                             : zeros();
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        float4 dot = make_float4(0, 0, 0, 0), &sum = sums[tile][group];
        T::mma(dot, operands[tile][0], make_uint2(here.x, here.y));
        T::mma(dot, operands[tile][1], make_uint2(here.z, here.w));
        const float2 scales = weights[tile].rows[span].scales;
        sum.x = fmaf(dot.x, scales.x, sum.x);
        sum.y = fmaf(dot.y, scales.x, sum.y);
        sum.z = fmaf(dot.z, scales.y, sum.z);
        sum.w = fmaf(dot.w, scales.y, sum.w);
      }
    }
  }
}

/* Writes a tile's results of eight tokens: a lane has two tokens of rows g and g + 8. */
template <class T>
__device__ __forceinline__ void store_results(const BlockLinear& p, int tile, int first_token, float4 sum) {
  const int lane = threadIdx.x % WARP, row = tile * TILE + lane / 4, token = first_token + lane % 4 * 2;
  const int64_t N = p.weight.N;
  if constexpr (SAME<T, E4M3>) {
    const float2 scales = row < N ? scales_at(p.weight, tile * (TILE / 2) + lane / 4) : make_float2(1, 1);
    const float first = token < p.M ? p.x_scales[token] : 1, second = token + 1 < p.M ? p.x_scales[token + 1] : 1;
    sum = make_float4(sum.x * scales.x * first, sum.y * scales.x * second, sum.z * scales.y * first,
                      sum.w * scales.y * second);
  }
  if (row < p.weight.N) {
    const float bias = p.bias ? p.bias[row] : 0;
    if (token < p.M) p.y[token * N + row] = sum.x + bias;
    if (token + 1 < p.M) p.y[(token + 1) * N + row] = sum.y + bias;
  }
  if (row + 8 < p.weight.N) {
    const float bias = p.bias ? p.bias[row + 8] : 0;
    if (token < p.M) p.y[token * N + row + 8] = sum.z + bias;
    if (token + 1 < p.M) p.y[(token + 1) * N + row + 8] = sum.w + bias;
  }
}

/* Results of the warps are added in shared memory, ADDED tiles at a time, a lane's four as one. */
template <class T, int TILES, int GROUPS>
__device__ __forceinline__ void add_warps(const BlockLinear& p, int first_tile, int first_token,
                                          const float4 (&sums)[TILES][GROUPS]) {
  LinearMemory& memory = shared_memory<LinearMemory>();
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
  for (int done = 0; done < TILES * GROUPS; done += ADDED) {
    if (done) __syncthreads();
#pragma unroll
    for (int i = done; i < TILES * GROUPS && i < done + ADDED; i++)
      memory.sums[i - done][warp][lane] = sums[i / GROUPS][i % GROUPS];
    __syncthreads();
    const int i = done + warp;
    if (warp >= ADDED || i >= TILES * GROUPS) continue;
    float4 sum = memory.sums[warp][0][lane];
#pragma unroll
    for (int other = 1; other < WARPS; other++) {
      const float4 more = memory.sums[warp][other][lane];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    store_results<T>(p, first_tile + i / GROUPS, first_token + i % GROUPS * TOKENS, sum);
  }
}

template <class T, int BITS, int TILES, int GROUPS, int DEPTH>
__device__ __forceinline__ void block_linear(const BlockLinear& p) {
  const Weight& w = p.weight;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int first_tile = (int)blockIdx.x * TILES, first_token = (int)blockIdx.y * GROUPS * TOKENS;
  const int chunks = parts_of(w.K, CHUNK), tokens = p.M - first_token - g; /* from this lane's on */
  const auto* x = static_cast<const typename T::Element*>(p.x) + (int64_t)(first_token + g) * w.K + 8 * t;

  WeightChunk<BITS> ahead[DEPTH][TILES];
  const auto load = [&](int chunk, WeightChunk<BITS>(&to)[TILES]) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
      if (chunk < chunks) load_chunk<T>(w, first_tile + i, chunks, chunk, to[i]);
  };

  float4 sums[TILES][GROUPS];
#pragma unroll
  for (int i = 0; i < TILES * GROUPS; i++) sums[i / GROUPS][i % GROUPS] = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < DEPTH; i++) load(warp + i * WARPS, ahead[i]);
  for (int first = warp; first < chunks; first += DEPTH * WARPS) {
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const int chunk = first + i * WARPS;
      if (chunk >= chunks) break;
      add_span<T, BITS, TILES, GROUPS, 0>(ahead[i], x + chunk * CHUNK, w.K, tokens, sums);
      if (chunk * CHUNK + SPAN < w.K)
        add_span<T, BITS, TILES, GROUPS, 1>(ahead[i], x + chunk * CHUNK, w.K, tokens, sums);
      load(chunk + DEPTH * WARPS, ahead[i]);
    }
  }
  add_warps<T>(p, first_tile, first_token, sums);
}

/* Many tokens: a block has 128 outputs of 128 tokens. A warp has 32 of these outputs and 64 of the tokens, and passes all
   channels in the order in which the kernel above adds them up: the chunks of its first warp, then those of its second. So
   the bits are the same. A chunk's activations are staged in shared memory, while registers take the next one's. */
enum { MANY_TILES = 8, MANY_TOKENS = 128, WARP_TILES = 2, WARP_GROUPS = 8 };

template <class T>
struct ManyMemory {
  /* Of 16 bytes: of a row of a chunk, and of those that a thread stages. */
  enum { PIECES = CHUNK * sizeof(typename T::Element) / 16, STAGED = MANY_TOKENS * PIECES / (WARPS * WARP) };
  uint4 x[MANY_TOKENS][PIECES + PIECES / 2];           /* rows at a distance that avoids bank conflicts */
  float4 total[WARPS][WARP_TILES * WARP_GROUPS][WARP]; /* of the channels of earlier warps above */
};

template <class T, int BITS>
__device__ __forceinline__ void block_linear_many(const BlockLinear& p) {
  using Element = typename T::Element;
  enum { PIECES = ManyMemory<T>::PIECES, STAGED = ManyMemory<T>::STAGED };
  ManyMemory<T>& memory = shared_memory<ManyMemory<T>>();
  const Weight& w = p.weight;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int first_tile = (int)blockIdx.x * MANY_TILES + warp / 2 * WARP_TILES,
            first_token = (int)blockIdx.y * MANY_TOKENS;
  const int chunks = parts_of(w.K, CHUNK), token = warp % 2 * WARP_GROUPS * TOKENS + g; /* this lane's, in the block */
  const bool here = first_tile * TILE < w.N;
  const Element* x = reinterpret_cast<const Element*>(memory.x[token]) + 8 * t;
  const int row_pieces = w.K * (int)sizeof(Element) / 16;

  WeightChunk<BITS> weights[WARP_TILES];
  uint4 staged[STAGED];
  const auto load = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < WARP_TILES; i++)
      if (here) load_chunk<T>(w, first_tile + i, chunks, chunk, weights[i]);
#pragma unroll
    for (int i = 0; i < STAGED; i++) {
      const int at = i * WARPS * WARP + threadIdx.x, row = first_token + at / PIECES,
                piece = chunk * PIECES + at % PIECES;
      const uint32_t from = (uint32_t)row * (uint32_t)row_pieces + (uint32_t)piece; /* in 16 bytes: fits 32 bits */
      staged[i] = row < p.M && piece < row_pieces ? static_cast<const uint4*>(p.x)[from] : zeros();
    }
  };

  float4 sums[WARP_TILES][WARP_GROUPS];
#pragma unroll
  for (int i = 0; i < WARP_TILES * WARP_GROUPS; i++)
    memory.total[warp][i][lane] = sums[i / WARP_GROUPS][i % WARP_GROUPS] = make_float4(0, 0, 0, 0);
  load(0);
  for (int first = 0, chunk = 0; first < WARPS && first < chunks;) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STAGED; i++) {
      const int at = i * WARPS * WARP + threadIdx.x;
      memory.x[at / PIECES][at % PIECES] = staged[i];
    }
    __syncthreads();
    WeightChunk<BITS> now[WARP_TILES];
#pragma unroll
    for (int i = 0; i < WARP_TILES; i++) now[i] = weights[i];
    const bool both = chunk * CHUNK + SPAN < w.K, last = chunk + WARPS >= chunks; /* last: of a warp above */
    if (last) first++;
    chunk = last ? first : chunk + WARPS;
    if (first < WARPS && chunk < chunks) load(chunk);
    if (!here) continue;
    const int64_t stride = sizeof(memory.x[0]) / (sizeof(Element));
    add_span<T, BITS, WARP_TILES, WARP_GROUPS, 0>(now, x, stride, MANY_TOKENS, sums);
    if (both) add_span<T, BITS, WARP_TILES, WARP_GROUPS, 1>(now, x, stride, MANY_TOKENS, sums);
    if (!last) continue;
#pragma unroll
    for (int i = 0; i < WARP_TILES * WARP_GROUPS; i++) {
      float4 &total = memory.total[warp][i][lane], &sum = sums[i / WARP_GROUPS][i % WARP_GROUPS];
      total = make_float4(total.x + sum.x, total.y + sum.y, total.z + sum.z, total.w + sum.w);
      sum = make_float4(0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int i = 0; i < WARP_TILES * WARP_GROUPS; i++)
    store_results<T>(p, first_tile + i / WARP_GROUPS, first_token + token - g + i % WARP_GROUPS * TOKENS,
                     memory.total[warp][i][lane]);
}

/* Tiles of 16 outputs, groups of 8 tokens, chunks ahead: launch.cpp chooses by the number of tokens. */
#define BLOCK_LINEAR(T, bits, tiles, groups, depth)                                            \
  KERNEL(block_linear_##T##_##bits##_##groups, BlockLinear, WARPS* WARP, groups > 4 ? 1 : 2) { \
    block_linear<T, bits, tiles, groups, depth>(p);                                            \
  }
#define BLOCK_LINEARS(T, bits, depth)                                     \
  BLOCK_LINEAR(T, bits, 1, 1, depth)                                      \
  BLOCK_LINEAR(T, bits, 1, 2, depth / 2)                                  \
  BLOCK_LINEAR(T, bits, 2, 4, 1)                                          \
  BLOCK_LINEAR(T, bits, 2, 8, 1)                                          \
  KERNEL(block_linear_##T##_##bits##_many, BlockLinear, WARPS* WARP, 1) { \
    block_linear_many<T, bits>(p);                                        \
  }
#if SELECTED(LINEAR_F16_4)
BLOCK_LINEARS(F16, 4, 4)
#endif
#if SELECTED(LINEAR_F16_5)
BLOCK_LINEARS(F16, 5, 4)
#endif
#if SELECTED(LINEAR_F16_6)
BLOCK_LINEARS(F16, 6, 4)
#endif
#if SELECTED(LINEAR_F16_8)
BLOCK_LINEARS(F16, 8, 4)
#endif
#if SELECTED(LINEAR_F16_16)
BLOCK_LINEARS(F16, 16, 2)
#endif
#if SELECTED(LINEAR_E4M3_8)
BLOCK_LINEARS(E4M3, 8, 4)
#endif
#if SELECTED(LINEAR_BF16_4)
BLOCK_LINEARS(BF16, 4, 4)
#endif
#if SELECTED(LINEAR_BF16_5)
BLOCK_LINEARS(BF16, 5, 4)
#endif
#if SELECTED(LINEAR_BF16_6)
BLOCK_LINEARS(BF16, 6, 4)
#endif
#if SELECTED(LINEAR_BF16_8)
BLOCK_LINEARS(BF16, 8, 4)
#endif
