/* How operators are launched: which kernel, how many blocks, how much shared memory. */
#include "launch.h"

#include <stdio.h>

static uint32_t parts(int64_t count, int64_t size) {
  return (uint32_t)((count + size - 1) / size);
}

/* type: 0 half, 1 bfloat16. */
static const char* const types[] = {"F16", "BF16"};

/* Each returns the number of launches. */
extern "C" EXPORTED int tapeout_cuda_block_linear(const BlockLinear* p, int type, Launch* launch) {
  const int groups = p->M <= 8 ? 1 : p->M <= 16 ? 2 : p->M <= 32 ? 4 : 8, tiles = groups < 4 ? 1 : 2;
  snprintf(launch->kernel, sizeof launch->kernel, "block_linear_%s_%d_%d", types[type], p->weight.bits, groups);
  launch->parameters = p;
  launch->grid[0] = parts(p->weight.N, 16 * tiles), launch->grid[1] = parts(p->M, 8 * groups), launch->grid[2] = 1;
  launch->threads = 256;
  launch->shared_bytes = 4096 * (uint32_t)(tiles * groups < 8 ? tiles * groups : 8);
  return 1;
}
