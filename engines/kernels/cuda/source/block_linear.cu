/* y = x · Wᵀ + bias for a weight in groups of 4-, 5-, 6- or 8-bit codes and activations in 16-bit floats.

   Weights are the 16-row operand of mma, tokens its 8 columns, so one token costs what eight do and every weight is
   decoded once for all tokens of a block. The warps of a block share its outputs and split the channels: warp w takes
   chunks w, w + 8, ... of 64, which are 512 neighbouring bytes or more of codes, straight into registers. Chunks are
   loaded DEPTH ahead.

   Codes less zero points are exact in 16 bits. An mma sums 16 channels in float; the sum of 32 is multiplied by the scale
   and added to the warp's. Warps are added in their order, then the bias. None of this depends on the number of tokens,
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

/* The mma operands of a span. */
template <class T, int BITS, int span>
__device__ __forceinline__ void decode_span(const WeightChunk<BITS>& w, uint4 (&operands)[2]) {
  using D = Decoder<T, BITS>;
  const uint32_t zero_points = w.rows[span].zero_points;
  const uint2 offsets = make_uint2(D::offset((float)(zero_points & 255), 0), D::offset((float)(zero_points >> 8), 1));
  operands[0] = decode<T, BITS, 2 * span>(w.codes, offsets);
  operands[1] = decode<T, BITS, 2 * span + 1>(w.codes, offsets);
}

/* Adds a span's part of the results of all tokens. x: this lane's activations of its token in each group. */
template <class T, int BITS, int TILES, int GROUPS, int span>
__device__ __forceinline__ void add_span(const WeightChunk<BITS> (&weights)[TILES], const uint16_t* x, int64_t stride,
                                         int tokens, float4 (&sums)[TILES][GROUPS]) {
  uint4 operands[TILES][2];
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) decode_span<T, BITS, span>(weights[tile], operands[tile]);
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const uint4 here =
        group * TOKENS < tokens ? *reinterpret_cast<const uint4*>(x + group * TOKENS * stride + span * SPAN) : zeros();
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

/* Results of the warps are added in shared memory, ADDED tiles at a time, a lane's four as one. */
template <int TILES, int GROUPS>
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
    const int row = (first_tile + i / GROUPS) * TILE + lane / 4;
    const int token = first_token + i % GROUPS * TOKENS + lane % 4 * 2;
    const int64_t N = p.weight.N;
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
}

template <class T, int BITS, int TILES, int GROUPS, int DEPTH>
__device__ __forceinline__ void block_linear(const BlockLinear& p) {
  const Weight& w = p.weight;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int first_tile = (int)blockIdx.x * TILES, first_token = (int)blockIdx.y * GROUPS * TOKENS;
  const int chunks = parts_of(w.K, CHUNK), tokens = p.M - first_token - g; /* from this lane's on */
  const uint16_t* x = static_cast<const uint16_t*>(p.x) + (int64_t)(first_token + g) * w.K + 8 * t;

  WeightChunk<BITS> ahead[DEPTH][TILES];
  auto load = [&](int chunk, WeightChunk<BITS>(&to)[TILES]) {
    if (chunk >= chunks) return;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const int tile = first_tile + i;
      to[i].codes.load(w.codes + ((int64_t)tile * chunks + chunk) * (TILE * CHUNK / 8 * BITS), lane);
      to[i].rows[0] = load_rows<BITS>(w, tile, chunk * CHUNK, g);
      to[i].rows[1] = load_rows<BITS>(w, tile, chunk * CHUNK + SPAN, g);
    }
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
  add_warps(p, first_tile, first_token, sums);
}

/* Tiles of 16 outputs, groups of 8 tokens, chunks ahead: launch.cpp chooses by the number of tokens. */
#define BLOCK_LINEAR(T, bits, tiles, groups, depth)                                            \
  KERNEL(block_linear_##T##_##bits##_##groups, BlockLinear, WARPS* WARP, groups > 4 ? 1 : 2) { \
    block_linear<T, bits, tiles, groups, depth>(p);                                            \
  }
#define BLOCK_LINEARS(T, bits)   \
  BLOCK_LINEAR(T, bits, 1, 1, 4) \
  BLOCK_LINEAR(T, bits, 1, 2, 2) \
  BLOCK_LINEAR(T, bits, 2, 4, 1) \
  BLOCK_LINEAR(T, bits, 2, 8, 1)
BLOCK_LINEARS(F16, 4)
BLOCK_LINEARS(F16, 5)
BLOCK_LINEARS(F16, 6)
BLOCK_LINEARS(F16, 8)
BLOCK_LINEARS(BF16, 4)
BLOCK_LINEARS(BF16, 5)
BLOCK_LINEARS(BF16, 6)
BLOCK_LINEARS(BF16, 8)
