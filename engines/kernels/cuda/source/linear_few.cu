/* Linears of up to 16 tokens: as fast as weights come from memory.

   A block has a tile of 16 outputs, a warp one slice of its channels. Codes go straight from memory into registers, DEPTH
   chunks ahead: a chunk is 512 neighbouring bytes or more. They are loaded before the kernel that gives the activations has
   ended. A lane without a token has another one's activations, and its results are not written. */
#include "linear.cuh"

struct FewMemory {
  float4 sums[2][LINEAR_SLICES][WARP]; /* by group of tokens; the second where there is one */
};

template <class T, int BITS, bool PLAIN, int GROUPS, int DEPTH>
__device__ __forceinline__ void linear_few(const BlockLinear& p) {
  using Element = typename T::Element;
  FewMemory& memory = shared_memory<FewMemory>();
  const Weight& w = p.weight;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x, chunks = parts_of(w.K, CHUNK);
  const int end = slice_begin(chunks, warp + 1);
  int chunk = slice_begin(chunks, warp);

  enum { BYTES = TILE * CHUNK / 8 * BITS };
  const uint32_t* plain_rows = nullptr;
  if constexpr (PLAIN) plain_rows = kept(static_cast<const uint32_t*>(w.scales) + rows_at(w, tile, 0, g));
  const int shift = w.group_shift - 6; /* of plain weights: chunks that share a scale */
  enum { SAME_PLACE = BITS % 4 == 0 }; /* a lane has 16 bytes of each plane */
  const uint8_t* from =
      kept(w.codes + (uint64_t)(uint32_t)(tile * chunks + chunk) * BYTES + (SAME_PLACE ? lane * 16 : 0));
  Codes<BITS> codes[DEPTH][1];
  ChunkRows<T, BITS, PLAIN> rows[DEPTH][1];
  const auto load = [&](int i, int next) {
    if (chunk + next < end) {
      codes[i][0].load(from + next * BYTES, SAME_PLACE ? 0 : lane, ReadOnce());
      if constexpr (PLAIN)
        rows[i][0].scales = load_once(plain_rows + ((chunk + next) >> shift) * (TILE / 2));
      else
        rows[i][0].load(w, tile, chunk + next, g);
    }
  };
#pragma unroll
  for (int i = 0; i < DEPTH; i++) load(i, i);

  using Eight = typename T::Eight;
  enum { AHEAD = DEPTH < 4 ? 2 : 4 }; /* activations come from the second-level cache, slowly while weights stream by */
  const Element* x[GROUPS];
  Eight activations[AHEAD][GROUPS][2]; /* of a chunk, and of the next ones, which come meanwhile */
  static_assert(DEPTH % AHEAD == 0, "a chunk has the same place in each pass");
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const int token = smaller(group * TOKENS + g, p.M - 1);
    x[group] = static_cast<const Element*>(p.x) + (int64_t)token * w.K + 8 * t;
  }
  const auto load_activations = [&](int of, Eight(&to)[GROUPS][2]) {
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; i++) {
      const int column = of * CHUNK + i % 2 * SPAN;
      if (of < end && (PLAIN || column < w.K)) to[i / 2][i % 2] = *reinterpret_cast<const Eight*>(x[i / 2] + column);
    }
  };
#pragma unroll
  for (int i = 0; i < AHEAD - 1; i++) load_activations(chunk + i, activations[i]);
  float4 sums[1][GROUPS];
#pragma unroll
  for (int group = 0; group < GROUPS; group++) sums[0][group] = make_float4(0, 0, 0, 0);
  for (; chunk < end; chunk += DEPTH, from += DEPTH * BYTES) {
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      if (chunk + i >= end) break;
      load_activations(chunk + i + AHEAD - 1, activations[(i + AHEAD - 1) % AHEAD]);
      const auto x_at = [&](int group, int span) { return activations[i % AHEAD][group][span]; };
      add_chunk<T, BITS, PLAIN>(w, tile, chunk + i, codes[i], rows[i], x_at, sums);
      load(i, i + DEPTH);
    }
  }

#pragma unroll
  for (int group = 0; group < GROUPS; group++) memory.sums[group][warp][lane] = sums[0][group];
  __syncthreads();
  if (warp >= GROUPS) return;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int slice = 0; slice < LINEAR_SLICES; slice++) add(sum, memory.sums[warp][slice][lane]);
  store_results<T>(p, tile, warp * TOKENS, sum);
}

#define LINEAR_FEW(T, bits, kind, groups, depth, blocks)                                          \
  KERNEL(linear_few_##T##_##bits##_##kind##_##groups, BlockLinear, LINEAR_SLICES* WARP, blocks) { \
    linear_few<T, bits, IS_##kind, groups, depth>(p);                                             \
  }
#define LINEARS_FEW(T, bits, kind, depth) \
  LINEAR_FEW(T, bits, kind, 1, depth, 4)  \
  LINEAR_FEW(T, bits, kind, 2, depth, 3)
#if SELECTED(LINEAR_F16_4_plain)
LINEARS_FEW(F16, 4, plain, 4)
#endif
#if SELECTED(LINEAR_F16_4_any)
LINEARS_FEW(F16, 4, any, 4)
#endif
#if SELECTED(LINEAR_F16_5_plain)
LINEARS_FEW(F16, 5, plain, 4)
#endif
#if SELECTED(LINEAR_F16_5_any)
LINEARS_FEW(F16, 5, any, 4)
#endif
#if SELECTED(LINEAR_F16_6_plain)
LINEARS_FEW(F16, 6, plain, 4)
#endif
#if SELECTED(LINEAR_F16_6_any)
LINEARS_FEW(F16, 6, any, 4)
#endif
#if SELECTED(LINEAR_F16_8_plain)
LINEARS_FEW(F16, 8, plain, 4)
#endif
#if SELECTED(LINEAR_F16_8_any)
LINEARS_FEW(F16, 8, any, 4)
#endif
#if SELECTED(LINEAR_F16_16_any)
LINEARS_FEW(F16, 16, any, 2)
#endif
#if SELECTED(LINEAR_E4M3_8_any)
LINEARS_FEW(E4M3, 8, any, 4)
#endif
