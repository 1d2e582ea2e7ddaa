/* Linears of more tokens: a block has 8 warps of TILES tiles of 16 outputs, and 8 GROUPS tokens.

   Chunks of codes and of activations are copied to shared memory, STAGES of them at once. A lane copies the codes that it
   decodes itself; all warps of a block read the same activations.

   Where there are few blocks, each has one slice of the channels (`split`). They leave their sums in memory, and the block of
   some outputs and tokens that ends last adds them up. Otherwise a block passes all slices in order. */
#include "linear.cuh"

enum { WIDE_WARPS = 8, WIDE_THREADS = WIDE_WARPS * WARP };

template <class T, int BITS, int TILES, int GROUPS>
struct WideStage {
  enum { PIECES = CHUNK * sizeof(typename T::Element) / 16, ROWS = GROUPS * TOKENS }; /* of 16 bytes, of a token */
  uint4 codes[WIDE_WARPS][TILES][8 * BITS];
  uint4 x[ROWS][PIECES];
  uint32_t scales[WIDE_WARPS][TILES][TILE]; /* in half, of both spans; one of plain weights */
  uint32_t zero_points[WIDE_WARPS][TILES][TILE / 2];
};

/* Where a piece of a token lies: rows whose pieces a warp reads at once do not share banks. */
template <int PIECES>
__device__ __forceinline__ int swizzled(int row, int piece) {
  return PIECES == 8 ? piece ^ (row & 1) * 4 : piece ^ (row / 2 & 1) * 2;
}

/* A lane's codes of a chunk: 16 bytes for every four bits, 8 or 4 for what is left. */
template <int BITS>
__device__ __forceinline__ void copy_codes(uint4* to, const uint8_t* from, int lane) {
#pragma unroll
  for (int plane = 0; plane < BITS / 4; plane++)
    copy_async<16>(to + plane * WARP + lane, from + (plane * WARP + lane) * 16);
  if constexpr (BITS % 4) {
    enum { PLACE = BITS / 4 * WARP * 16, BYTES = BITS % 4 * 4 };
    copy_async<BYTES>(reinterpret_cast<uint8_t*>(to) + PLACE + lane * BYTES, from + PLACE + lane * BYTES);
  }
}

template <class T, int BITS, bool PLAIN, bool SPLIT, int TILES, int GROUPS>
__device__ __forceinline__ void linear_wide(const BlockLinear& p) {
  using Stage = WideStage<T, BITS, TILES, GROUPS>;
  enum {
    PIECES = Stage::PIECES,
    STAGES = WIDE_STAGES(BITS),
    ROWED = CODES<T, BITS>, /* has scales in a chunk */
    COPIES = Stage::ROWS * PIECES / WIDE_THREADS > 0 ? Stage::ROWS * PIECES / WIDE_THREADS : 1
  };
  Stage* stages = &shared_memory<Stage>();
  const Weight& w = p.weight;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int first_tile = ((int)blockIdx.x * WIDE_WARPS + warp) * TILES, first_token = (int)blockIdx.y * GROUPS * TOKENS;
  const int chunks = parts_of(w.K, CHUNK), row_pieces = w.K * (int)sizeof(typename T::Element) / 16;
  const bool here = first_tile * TILE < w.N; /* of a warp: tiles come in pairs */
  int slice = SPLIT ? (int)blockIdx.z : 0;
  const int first = slice_begin(chunks, slice), end = SPLIT ? slice_begin(chunks, slice + 1) : chunks;

  const auto copy_weights = [&](int chunk, Stage& to) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      if (!here) break;
      const uint32_t sixteens = (uint32_t)((first_tile + i) * chunks + chunk) * (8 * BITS); /* fits 32 bits */
      copy_codes<BITS>(to.codes[warp][i], w.codes + (uint64_t)sixteens * 16, lane);
      const int tile = first_tile + i, channel = chunk * CHUNK;
      if constexpr (ROWED) {
        if (lane < (PLAIN ? TILE / 2 : TILE) && w.half_scales)
          copy_async<4>(&to.scales[warp][i][lane],
                        static_cast<const uint32_t*>(w.scales) + rows_at(w, tile, channel + lane / 8 * SPAN, lane % 8));
        if (!PLAIN && lane < TILE / 2 && w.zero_points)
          copy_async<4>(&to.zero_points[warp][i][lane],
                        w.zero_points + 2 * rows_at(w, tile, channel + lane / 4 * SPAN, 2 * (lane % 4)));
      }
    }
  };
  const auto copy_activations = [&](int chunk, Stage& to) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      const int at = i * WIDE_THREADS + (int)threadIdx.x, row = at / PIECES, piece = at % PIECES;
      if (Stage::ROWS * PIECES % WIDE_THREADS && at >= Stage::ROWS * PIECES) break;
      const int token = smaller(first_token + row, p.M - 1), column = smaller(chunk * PIECES + piece, row_pieces - 1);
      const uint32_t from = (uint32_t)token * (uint32_t)row_pieces + (uint32_t)column; /* in 16 bytes: fits 32 bits */
      copy_async<16>(&to.x[row][swizzled<PIECES>(row, piece)], static_cast<const uint4*>(p.x) + from);
    }
  };

#pragma unroll
  for (int i = 0; i < STAGES - 1; i++)
    if (first + i < end) copy_weights(first + i, stages[i]);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (first + i < end) copy_activations(first + i, stages[i]);
    end_of_copies();
  }

  float4 sums[TILES][GROUPS], total[SPLIT ? 1 : TILES][SPLIT ? 1 : GROUPS];
#pragma unroll
  for (int i = 0; i < TILES * GROUPS; i++) {
    sums[i / GROUPS][i % GROUPS] = make_float4(0, 0, 0, 0);
    if constexpr (!SPLIT) total[i / GROUPS][i % GROUPS] = make_float4(0, 0, 0, 0);
  }
  int from = 0, to = STAGES - 1, next = slice_begin(chunks, slice + 1); /* stages, and where the next slice begins */
  for (int chunk = first; chunk < end; chunk++) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    if (chunk + STAGES - 1 < end) {
      copy_weights(chunk + STAGES - 1, stages[to]);
      copy_activations(chunk + STAGES - 1, stages[to]);
    }
    end_of_copies();
    const Stage& stage = stages[from];
    from = from + 1 == STAGES ? 0 : from + 1, to = to + 1 == STAGES ? 0 : to + 1;
    if (here) {
      Codes<BITS> codes[TILES];
      ChunkRows<T, BITS, PLAIN> rows[TILES];
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        codes[i].load(reinterpret_cast<const uint8_t*>(stage.codes[warp][i]), lane, Read());
        if constexpr (PLAIN) {
          rows[i].scales = stage.scales[warp][i][g];
        } else if constexpr (ROWED) {
#pragma unroll
          for (int span = 0; span < 2; span++) {
            rows[i].scales[span] = stage.scales[warp][i][span * 8 + g];
            rows[i].zero_points[span] = reinterpret_cast<const uint16_t*>(stage.zero_points[warp][i])[span * 8 + g];
          }
        }
      }
      const auto x_at = [&](int group, int span) {
        const int bytes = (span * SPAN + 8 * t) * (int)sizeof(typename T::Element);
        const uint4* piece =
            &stage.x[g][swizzled<PIECES>(g, bytes / 16)] + group * TOKENS * PIECES; /* of eight rows on */
        return *reinterpret_cast<const typename T::Eight*>(reinterpret_cast<const char*>(piece) + bytes % 16);
      };
      add_chunk<T, BITS, PLAIN>(w, first_tile, chunk, codes, rows, x_at, sums);
    }
    if constexpr (!SPLIT) {
      if (chunk + 1 < next) continue; /* the slice goes on */
      slice++, next = slice_begin(chunks, slice + 1);
#pragma unroll
      for (int i = 0; i < TILES * GROUPS; i++) {
        add(total[i / GROUPS][i % GROUPS], sums[i / GROUPS][i % GROUPS]);
        sums[i / GROUPS][i % GROUPS] = make_float4(0, 0, 0, 0);
      }
    }
  }

  if constexpr (SPLIT) {
    const int64_t place = (int64_t)blockIdx.y * gridDim.x + blockIdx.x; /* of these outputs and tokens */
    enum { RESULTS = TILES * GROUPS };
    float4* parts =
        reinterpret_cast<float4*>(p.sums) + (place * LINEAR_SLICES * WIDE_WARPS + warp) * RESULTS * WARP + lane;
    enum { OTHER = WIDE_WARPS * RESULTS * WARP }; /* from a slice to the next */
#pragma unroll
    for (int i = 0; i < RESULTS; i++) parts[slice * OTHER + i * WARP] = sums[i / GROUPS][i % GROUPS];
    __syncthreads();
    uint32_t* before = reinterpret_cast<uint32_t*>(stages);
    if (threadIdx.x == 0) {
      __threadfence(); /* what this block has left is seen before it counts */
      *before = atomicAdd(&p.ended[place], 1u);
      __threadfence();
    }
    __syncthreads();
    if (*before + 1 < LINEAR_SLICES) return;
    __threadfence();
    if (threadIdx.x == 0) p.ended[place] = 0; /* for the next launch */
    if (!here) return;
    enum { AT_ONCE = 4 }; /* results, whose loads are on their way together */
#pragma unroll 1
    for (int done = 0; done < RESULTS; done += AT_ONCE) {
      float4 added[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) added[i] = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < LINEAR_SLICES * AT_ONCE; i++)
        add(added[i % AT_ONCE], load_of_others(parts + i / AT_ONCE * OTHER + (done + i % AT_ONCE) * WARP));
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        store_results<T>(p, first_tile + (done + i) / GROUPS, first_token + (done + i) % GROUPS * TOKENS, added[i]);
    }
  } else if (here) {
#pragma unroll
    for (int i = 0; i < TILES * GROUPS; i++)
      store_results<T>(p, first_tile + i / GROUPS, first_token + i % GROUPS * TOKENS, total[i / GROUPS][i % GROUPS]);
  }
}

#define LINEAR_WIDE(name, T, bits, kind, split, tiles, groups, blocks)                          \
  KERNEL(linear_##name##_##T##_##bits##_##kind##_##groups, BlockLinear, WIDE_THREADS, blocks) { \
    linear_wide<T, bits, IS_##kind, split, tiles, groups>(p);                                   \
  }
#define LINEARS_WIDE(T, bits, kind)                                  \
  LINEAR_WIDE(split, T, bits, kind, true, 1, 4, 2)                   \
  LINEAR_WIDE(split, T, bits, kind, true, 1, 8, (bits == 8 ? 1 : 2)) \
  LINEAR_WIDE(whole, T, bits, kind, false, 2, 4, 1)                  \
  LINEAR_WIDE(whole, T, bits, kind, false, 2, 8, 1)
#if SELECTED(LINEAR_F16_4_plain)
LINEARS_WIDE(F16, 4, plain)
#endif
#if SELECTED(LINEAR_F16_4_any)
LINEARS_WIDE(F16, 4, any)
#endif
#if SELECTED(LINEAR_F16_5_plain)
LINEARS_WIDE(F16, 5, plain)
#endif
#if SELECTED(LINEAR_F16_5_any)
LINEARS_WIDE(F16, 5, any)
#endif
#if SELECTED(LINEAR_F16_6_plain)
LINEARS_WIDE(F16, 6, plain)
#endif
#if SELECTED(LINEAR_F16_6_any)
LINEARS_WIDE(F16, 6, any)
#endif
#if SELECTED(LINEAR_F16_8_plain)
LINEARS_WIDE(F16, 8, plain)
#endif
#if SELECTED(LINEAR_F16_8_any)
LINEARS_WIDE(F16, 8, any)
#endif
#if SELECTED(LINEAR_F16_16_any)
LINEARS_WIDE(F16, 16, any)
#endif
#if SELECTED(LINEAR_E4M3_8_any)
LINEARS_WIDE(E4M3, 8, any)
#endif
