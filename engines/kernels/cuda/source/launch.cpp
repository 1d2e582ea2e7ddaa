/* How operators are launched: which kernels, how many blocks, how much shared memory. Each function fills as many launches
   as it returns; all of them have the parameters that it is given. */
#include "launch.h"

#include <stdio.h>

enum { WARP_BYTES = 32 * 16 }; /* a float4 for each lane */
/* Of choose_rows: sums, their own sums, bins, the likeliest tokens, and what all threads are told. */
enum { CHOOSE_BYTES = 8 * (512 + 32 + 1) + 4 * (2 * 256 + 2 * MOST_TOP + 4) };

static uint32_t parts(int64_t count, int64_t size) {
  return (uint32_t)((count + size - 1) / size);
}

static uint32_t least(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}

static void set(Launch* launch, const void* parameters, uint32_t x, uint32_t y, uint32_t z, uint32_t threads,
                uint32_t shared_bytes) {
  launch->parameters = parameters;
  launch->grid[0] = x, launch->grid[1] = y, launch->grid[2] = z;
  launch->threads = threads, launch->shared_bytes = shared_bytes;
}

/* A block has all tokens where there are few. Else it has up to 64, and 256 outputs; where that makes fewer blocks than
   `many_blocks`, which fill a GPU, it has 128 outputs and a slice of the input channels. */
int tapeout_cuda_block_linear(const BlockLinear* p, uint32_t many_blocks, Launch* launch) {
  const char* type = p->weight.e4m3 ? "E4M3" : "F16";
  const Weight& w = p->weight;
  const bool has_rows = !w.e4m3 && w.bits != 16;
  const char* kind = has_rows && w.half_scales && !w.zero_points && w.group_shift >= 6 ? "plain" : "any";
  const uint32_t bits = (uint32_t)w.bits, N = (uint32_t)w.N;
  if (p->M <= 16) {
    snprintf(launch->kernel, sizeof launch->kernel, "linear_few_%s_%u_%s_%u", type, bits, kind, p->M <= 8 ? 1u : 2u);
    set(launch, p, parts(N, 16), 1, 1, LINEAR_SLICES * 32, 2 * LINEAR_SLICES * WARP_BYTES);
    return 1;
  }
  const uint32_t groups = p->M <= 32 ? 4 : 8, across = parts(p->M, 8 * groups);
  const bool split = parts(N, 256) * across < least(many_blocks, LINEAR_PLACES / 2);
  const uint32_t tiles = split ? 1 : 2,
                 stage = 8 * tiles * (128 * bits + 96) + groups * 8 * (p->weight.e4m3 ? 64 : 128);
  snprintf(launch->kernel, sizeof launch->kernel, "linear_%s_%s_%u_%s_%u", split ? "split" : "whole", type, bits, kind,
           groups);
  set(launch, p, parts(N, 128 * tiles), across, split ? LINEAR_SLICES : 1, 256, WIDE_STAGES(bits) * stage);
  return 1;
}

int tapeout_cuda_norm(const Norm* p, Launch* launch) {
  snprintf(launch->kernel, sizeof launch->kernel, "norm_rows");
  set(launch, p, (uint32_t)p->count, 1, 1, 512, 2 * 16 * sizeof(float));
  return 1;
}

int tapeout_cuda_quantize(const Quantize* p, Launch* launch) {
  snprintf(launch->kernel, sizeof launch->kernel, "quantize_rows");
  set(launch, p, (uint32_t)p->M, 1, 1, 256, 8 * sizeof(float));
  return 1;
}

int tapeout_cuda_finite(const Finite* p, Launch* launch) {
  snprintf(launch->kernel, sizeof launch->kernel, "finite_rows");
  set(launch, p, parts(p->M, 8), 1, 1, 256, 0);
  return 1;
}

int tapeout_cuda_gated(const Gated* p, Launch* launch) {
  if (p->scales) {
    snprintf(launch->kernel, sizeof launch->kernel, "gated_codes");
    set(launch, p, (uint32_t)p->M, 1, 1, 256, 8 * sizeof(float));
    return 1;
  }
  snprintf(launch->kernel, sizeof launch->kernel, "gated_rows");
  set(launch, p, parts(p->K, 4 * 256), (uint32_t)p->M, 1, 256, 0);
  return 1;
}

int tapeout_cuda_block_gather(const BlockGather* p, Launch* launch) {
  snprintf(launch->kernel, sizeof launch->kernel, "block_gather_%d", p->weight.bits);
  set(launch, p, parts(parts(p->weight.K, 64) * 4, 128), (uint32_t)p->M, 1, 128, 0);
  return 1;
}

int tapeout_cuda_choose(const Choose* p, Launch* launches) {
  snprintf(launches[0].kernel, sizeof launches[0].kernel, "argmax_parts");
  set(&launches[0], p, ARGMAX_PARTS, (uint32_t)p->M, 1, 256, 8 * (sizeof(float) + sizeof(int)));
  snprintf(launches[1].kernel, sizeof launches[1].kernel, "choose_rows");
  set(&launches[1], p, (uint32_t)p->M, 1, 1, 512, CHOOSE_BYTES);
  return 2;
}

/* Sequences of few new tokens are cut into parts; others are prompts. Of parts a GPU gets about four blocks for each
   multiprocessor, where there are as many: two at once. */
int tapeout_cuda_attention(const Attention* p, uint32_t multiprocessors, Launch* launches) {
  const char* cache = !p->key_scales ? "Half" : p->fp8 ? "Fp8" : "Int8";
  const uint32_t group = (uint32_t)(p->H / p->KV), D = (uint32_t)p->D, KV = (uint32_t)p->KV, B = (uint32_t)p->B;
  Launch* launch = launches;
  if (p->few_tokens > 0) {
    const uint32_t rows = least((uint32_t)p->few_tokens, (uint32_t)p->most_tokens) * group;
    const uint32_t heads = KV * parts(rows, 16), blocks = parts(4 * multiprocessors, heads * B);
    snprintf(launch->kernel, sizeof launch->kernel, "attention_parts_%s_%u", cache, D);
    set(launch++, p, least((uint32_t)p->parts, blocks), heads, B, 256,
        8 * (p->key_scales && D == 64 ? 8 : 16) * WARP_BYTES + D / 16 * WARP_BYTES + 2 * 8 * 16 * 4 + 2 * 16 * 4 +
            8 * 8 + 32);
  }
  if (p->most_tokens > p->few_tokens) {
    snprintf(launch->kernel, sizeof launch->kernel, "rotary_cache_%s", cache);
    set(launch++, p, (uint32_t)p->M, parts(p->H + 2 * p->KV, 8), 1, 256, 0);
    const uint32_t split = D > 128 ? 2 : 1;
    snprintf(launch->kernel, sizeof launch->kernel, "attention_prompt_%s_%u", cache, D);
    set(launch++, p, parts((int64_t)p->most_tokens * group, 64 / split), KV, B, 128,
        64 * (2 * D + 16) + 32 * 4 * (D + 8) + 4 * (D / 8 / split) * WARP_BYTES);
  }
  return (int)(launch - launches);
}
