/* What is done row by row: norms with the residual sum, silu(gate) * up, embeddings. */
#include "weights.cuh"

enum { ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / WARP, GATHER_THREADS = 128 };
enum {
  NORM_THREADS = 512,
  NORM_WARPS = NORM_THREADS / WARP,
  NORM_HELD = 2
}; /* HELD: times four channels of a thread */

struct NormMemory {
  float squares[NORM_WARPS], largest[NORM_WARPS];
};

struct QuantizeMemory {
  float largest[ROW_WARPS];
};

__device__ __forceinline__ void store_four(void* to, int64_t fourth, const float4& x) {
  static_cast<uint2*>(to)[fourth] = make_uint2(f16x2_of(x.x, x.y), f16x2_of(x.z, x.w));
}

/* The larger magnitude; NaN stays. */
__device__ __forceinline__ float larger(float largest, float x) {
  return fabsf(x) > largest || x != x ? fabsf(x) : largest;
}

/* A row in E4M3: `value_at` gives four of its values at once. By all threads of a block. Of a row with NaN or infinity the
   scale is NaN or infinity, and so are its results in a linear. */
template <int THREADS, class Values>
__device__ __forceinline__ void quantize_row(const Values& value_at, int fourths, float (&warps)[THREADS / WARP],
                                             void* y, float* scales, int64_t row) {
  float largest = 0;
#pragma unroll 1 /* unrolled, norm_rows has too few registers on sm100 */
  for (int i = threadIdx.x; i < fourths; i += THREADS) {
    const float4 x = value_at(i);
    largest = larger(larger(larger(larger(largest, x.x), x.y), x.z), x.w);
  }
  for (int distance = WARP / 2; distance; distance /= 2)
    largest = larger(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = largest;
  __syncthreads();
  for (int i = 0; i < THREADS / WARP; i++) largest = larger(largest, warps[i]);
  const float inverse = largest > 0 ? LARGEST_E4M3 / largest : 0;
  if (threadIdx.x == 0) scales[row] = largest / LARGEST_E4M3;
  for (int i = threadIdx.x; i < fourths; i += THREADS) {
    const float4 x = value_at(i);
    const uint32_t codes = e4m3_of(x.x * inverse) | e4m3_of(x.z * inverse) << 8 | e4m3_of(x.y * inverse) << 16 |
                           e4m3_of(x.w * inverse) << 24;
    static_cast<uint32_t*>(y)[row * fourths + i] = codes;
  }
}

/* A block for each row, whose first channels stay in registers; the others are summed again for the second pass. */
KERNEL(norm_rows, Norm, NORM_THREADS, 2) {
  NormMemory& memory = shared_memory<NormMemory>();
  const int fourths = p.K / 4, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const float4* weight = reinterpret_cast<const float4*>(p.weight);
  float4 weights[NORM_HELD], sums[NORM_HELD];
  const int64_t row = blockIdx.x, token = p.rows ? p.rows[row] : row;
  if (token < 0 || token >= p.M) return; /* of the whole block */
  const float4* a = reinterpret_cast<const float4*>(p.a) + token * fourths;
  const float4* b = p.b ? reinterpret_cast<const float4*>(p.b) + token * fourths : nullptr;
  const auto sum_at = [&](int i) {
    float4 x = a[i];
    if (b) {
      const float4 y = b[i];
      x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
    }
    return x;
  };
  float squares = 0;
  const auto add_squares = [&](const float4& x) {
    squares = fmaf(x.x, x.x, squares), squares = fmaf(x.y, x.y, squares);
    squares = fmaf(x.z, x.z, squares), squares = fmaf(x.w, x.w, squares);
  };
#pragma unroll
  for (int j = 0; j < NORM_HELD; j++) {
    const int i = j * NORM_THREADS + (int)threadIdx.x;
    if (i < fourths) sums[j] = sum_at(i), weights[j] = weight[i];
  }
#pragma unroll
  for (int j = 0; j < NORM_HELD; j++)
    if (j * NORM_THREADS + (int)threadIdx.x < fourths) add_squares(sums[j]);
  for (int i = NORM_HELD * NORM_THREADS + (int)threadIdx.x; i < fourths; i += NORM_THREADS) add_squares(sum_at(i));
  squares = warp_sum(squares);
  if (lane == 0) memory.squares[warp] = squares;
  __syncthreads();
  float all = 0;
#pragma unroll
  for (int i = 0; i < NORM_WARPS; i++) all += memory.squares[i];
  const float inverse = 1.0f / sqrtf(all / (float)p.K + p.epsilon);
  const auto normed = [&](const float4& x, const float4& w) {
    return make_float4(x.x * inverse * w.x, x.y * inverse * w.y, x.z * inverse * w.z, x.w * inverse * w.w);
  };
  float4* sum = p.sum ? reinterpret_cast<float4*>(p.sum) + row * fourths : nullptr;
  if (p.scales) {
    for (int i = threadIdx.x; i < fourths && sum; i += NORM_THREADS) sum[i] = sum_at(i);
    const auto value_at = [&](int i) { return normed(sum_at(i), weight[i]); };
    quantize_row<NORM_THREADS>(value_at, fourths, memory.largest, p.y, p.scales, row);
    return;
  }
#pragma unroll
  for (int j = 0; j < NORM_HELD; j++) {
    const int i = j * NORM_THREADS + (int)threadIdx.x;
    if (i >= fourths) break;
    if (sum) sum[i] = sums[j];
    store_four(p.y, row * fourths + i, normed(sums[j], weights[j]));
  }
  for (int i = NORM_HELD * NORM_THREADS + (int)threadIdx.x; i < fourths; i += NORM_THREADS) {
    const float4 x = sum_at(i);
    if (sum) sum[i] = x;
    store_four(p.y, row * fourths + i, normed(x, weight[i]));
  }
}

/* A warp for each token. */
KERNEL(finite_rows, Finite, ROW_THREADS, 4) {
  const int fourths = p.K / 4, lane = threadIdx.x % WARP;
  const int64_t token = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
  if (token >= p.M) return; /* of the whole warp */
  const float4* a = reinterpret_cast<const float4*>(p.a) + token * fourths;
  const float4* b = p.b ? reinterpret_cast<const float4*>(p.b) + token * fourths : nullptr;
  float sum = 0; /* of zeros; one of NaN or infinity is NaN */
  for (int i = lane; i < fourths; i += WARP) {
    const float4 x = a[i], y = b ? b[i] : make_float4(0, 0, 0, 0);
    sum += (x.x + y.x) * 0 + (x.y + y.y) * 0 + (x.z + y.z) * 0 + (x.w + y.w) * 0;
  }
  sum = warp_sum(sum);
  if (lane == 0) p.y[token] = sum == 0;
}

/* A block for each row, of half. */
KERNEL(quantize_rows, Quantize, ROW_THREADS, 4) {
  QuantizeMemory& memory = shared_memory<QuantizeMemory>();
  const int fourths = p.K / 4;
  const int64_t row = blockIdx.x;
  const uint2* x = static_cast<const uint2*>(p.x) + row * fourths;
  const auto value_at = [&](int i) {
    const float2 first = halves_of(x[i].x), second = halves_of(x[i].y);
    return make_float4(first.x, first.y, second.x, second.y);
  };
  quantize_row<ROW_THREADS>(value_at, fourths, memory.largest, p.y, p.scales, row);
}

__device__ __forceinline__ float gated(float gate, float up) {
  return gate / (1.0f + expf(-gate)) * up;
}

KERNEL(gated_rows, Gated, ROW_THREADS, 4) {
  const int i = (int)blockIdx.x * ROW_THREADS + (int)threadIdx.x, fourths = p.K / 4;
  const int64_t row = blockIdx.y;
  if (i >= fourths) return;
  const float4* x = reinterpret_cast<const float4*>(p.x) + row * 2 * fourths;
  const float4 gate = x[i], up = x[fourths + i];
  const float4 y = make_float4(gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w));
  store_four(p.y, row * fourths + i, y);
}

/* The same in E4M3: a block for each row. */
KERNEL(gated_codes, Gated, ROW_THREADS, 4) {
  QuantizeMemory& memory = shared_memory<QuantizeMemory>();
  const int fourths = p.K / 4;
  const int64_t row = blockIdx.x;
  const float4* x = reinterpret_cast<const float4*>(p.x) + row * 2 * fourths;
  const auto value_at = [&](int i) {
    const float4 gate = x[i], up = x[fourths + i];
    return make_float4(gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w));
  };
  quantize_row<ROW_THREADS>(value_at, fourths, memory.largest, p.y, p.scales, row);
}

/* Four values of a row: half `second` of a tile, step and pair of codes. */
template <int step, int BITS>
__device__ __forceinline__ float4 decoded(const Codes<BITS>& codes, bool second, float scale, float zero_point) {
  const uint32_t first = second ? codes.template at<step, 1, 0>() : codes.template at<step, 0, 0>();
  const uint32_t last = second ? codes.template at<step, 3, 0>() : codes.template at<step, 2, 0>();
  return make_float4(((float)(first & 0xffff) - zero_point) * scale, ((float)(first >> 16) - zero_point) * scale,
                     ((float)(last & 0xffff) - zero_point) * scale, ((float)(last >> 16) - zero_point) * scale);
}

template <int step>
__device__ __forceinline__ float4 decoded(const Codes<16>& codes, bool second, float scale, float) {
  const uint32_t first = second ? codes.halves<step, 1>() : codes.halves<step, 0>();
  const uint32_t last = second ? codes.halves<step, 3>() : codes.halves<step, 2>();
  return make_float4(f16_to_float((uint16_t)first) * scale, f16_to_float((uint16_t)(first >> 16)) * scale,
                     f16_to_float((uint16_t)last) * scale, f16_to_float((uint16_t)(last >> 16)) * scale);
}

/* A thread decodes what one lane of a linear has of the row: 16 channels of a chunk. */
template <int BITS>
__device__ __forceinline__ void block_gather(const BlockGather& p) {
  const Weight& w = p.weight;
  const int at = (int)blockIdx.x * GATHER_THREADS + (int)threadIdx.x, chunk = at / 4, t = at % 4;
  const int chunks = parts_of(w.K, CHUNK);
  if (chunk >= chunks) return;
  int64_t id = p.ids[blockIdx.y];
  if (id < 0 && p.chosen) id = p.chosen[-1 - id];
  const bool known = id >= 0 && id < w.N;
  const int row = known ? (int)id : 0, tile = row / TILE, g = row % 8, second = row / 8 % 2;
  Codes<BITS> codes;
  codes.load(w.codes + ((int64_t)tile * chunks + chunk) * (TILE * CHUNK / 8 * BITS), 4 * g + t, ReadOnce());
  float* y = p.y + (int64_t)blockIdx.y * w.K + chunk * CHUNK + 8 * t;
#pragma unroll
  for (int span = 0; span < 2; span++) {
    if (chunk * CHUNK + span * SPAN >= w.K) break;
    const RowPair rows = load_rows<BITS>(w, tile, chunk * CHUNK + span * SPAN, g);
    const float scale = !known ? no_number() : second ? rows.scales.y : rows.scales.x;
    const float zero_point = (float)(second ? rows.zero_points >> 8 : rows.zero_points & 255);
    float4* to = reinterpret_cast<float4*>(y + span * SPAN);
    to[0] = span ? decoded<2>(codes, second, scale, zero_point) : decoded<0>(codes, second, scale, zero_point);
    to[1] = span ? decoded<3>(codes, second, scale, zero_point) : decoded<1>(codes, second, scale, zero_point);
  }
}
#define BLOCK_GATHER(bits)                                      \
  KERNEL(block_gather_##bits, BlockGather, GATHER_THREADS, 4) { \
    block_gather<bits>(p);                                      \
  }
#if SELECTED(GATHER_4)
BLOCK_GATHER(4)
#endif
#if SELECTED(GATHER_5)
BLOCK_GATHER(5)
#endif
#if SELECTED(GATHER_6)
BLOCK_GATHER(6)
#endif
#if SELECTED(GATHER_8)
BLOCK_GATHER(8)
#endif
#if SELECTED(GATHER_16)
BLOCK_GATHER(16)
#endif
