/* BlockGather: dequantized rows of an embedding, from the same bytes that a tied lm_head multiplies.

     ids [..] int64   codes, scales, zero points: as of BlockLinear
     y [.., K] float */
#include "codes.h"
#include "ort.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_RANK = 8 };

typedef struct {
  Base base;
  int64_t N, K, block, bits, half_scales, e2m1;
  Tensor codes, scales, zero_points; /* where they are constant */
} Kernel;

typedef struct {
  const Kernel* kernel;
  const int64_t* ids;
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zero_points;
  float* y;
} Work;

static int code_at(const uint8_t* tile, int64_t lane, int64_t k, int bits) {
  int64_t step = k / STEP, byte = lane * STEP + k % STEP;
  if (bits == 8) return tile[64 * step + byte];
  if (bits == 4) return tile[64 * (step / 2) + byte] >> (step % 2 * 4) & 15;
  if (bits == 5) {
    const uint8_t* eight_steps = tile + 320 * (step / 8);
    int low = eight_steps[64 * (step % 8 / 2) + byte] >> (step % 2 * 4) & 15;
    return low | (eight_steps[256 + byte] >> (step % 8) & 1) << 4;
  }
  const uint8_t* four_steps = tile + 192 * (step / 4);
  int low = four_steps[64 * (step % 4 / 2) + byte] >> (step % 2 * 4) & 15;
  int high = four_steps[128 + byte] >> (step % 4 * 2) & 3;
  return low | high << 4;
}

static float scale_at(const Work* w, int64_t at) {
  if (w->kernel->e2m1) {
    const uint32_t exponent = (uint32_t)w->scales[at] << 23;
    float scale;
    memcpy(&scale, &exponent, sizeof scale);
    return scale;
  }
  if (w->kernel->half_scales) {
    _Float16 half;
    memcpy(&half, w->scales + 2 * at, sizeof half);
    return (float)half;
  }
  float scale;
  memcpy(&scale, w->scales + 4 * at, sizeof scale);
  return scale;
}

static void gather(void* state, size_t index) {
  const Work* w = state;
  const Kernel* k = w->kernel;
  int64_t id = w->ids[index] < 0 ? w->ids[index] + k->N : w->ids[index], blocks = k->K / k->block;
  const uint8_t* tile = w->codes + id / TILE * (TILE * k->K * k->bits / 8);
  float* y = w->y + (int64_t)index * k->K;
  for (int64_t b = 0; b < blocks; b++) {
    int64_t at = (id / TILE * blocks + b) * TILE + id % TILE;
    float scale = scale_at(w, at);
    int zero_point = w->zero_points ? w->zero_points[at] : 1 << ((k->e2m1 ? E2M1_BITS : k->bits) - 1);
    for (int64_t i = b * k->block; i < (b + 1) * k->block; i++) {
      const int code = code_at(tile, id % TILE, i, (int)k->bits);
      y[i] = (float)((k->e2m1 ? E2M1_CODES[code] : code) - zero_point) * scale;
    }
  }
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  Tensor ids, codes, scales, zero_points;
  TRY(input(api, context, 0, NULL, &ids));
  TRY(input(api, context, 1, &k->codes, &codes));
  TRY(input(api, context, 2, &k->scales, &scales));
  TRY(input(api, context, 3, &k->zero_points, &zero_points));
  const int64_t channels = (k->N + 2 * TILE - 1) / (2 * TILE) * (2 * TILE), blocks = channels * (k->K / k->block);
  if (!ids.present || ids.type != INT64 || ids.rank >= MAX_RANK)
    return failure(api, ERROR_ARGUMENT, "BlockGather: ids are not int64 or have more than 7 axes");
  const int scale_type = k->e2m1 ? UINT8 : k->half_scales ? HALF : FLOAT;
  if (!holds(&codes, UINT8, channels * k->K * k->bits / 8) || !holds(&scales, scale_type, blocks) ||
      (zero_points.present && !holds(&zero_points, UINT8, blocks)))
    return failure(api, ERROR_ARGUMENT, "BlockGather: codes, scales or zero points of another shape or type");
  Work w = {.kernel = k, .ids = ids.data, .codes = codes.data, .scales = scales.data, .zero_points = zero_points.data};
  for (int64_t i = 0; i < ids.elements; i++)
    if (w.ids[i] < -k->N || w.ids[i] >= k->N)
      return failure(api, ERROR_ARGUMENT, "BlockGather: an id is outside the embedding");
  int64_t dims[MAX_RANK];
  for (size_t i = 0; i < ids.rank; i++) dims[i] = ids.dims[i];
  dims[ids.rank] = k->K;
  TRY(output(api, context, 0, dims, ids.rank + 1, &w.y));
  return ids.elements ? parallel(api, context, k->base.threads, gather, ids.elements, &w, NULL) : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  Kernel found = {.base = {api, threads_of(op)}};
  TRY(attribute_int(api, info, "N", &found.N));
  TRY(attribute_int(api, info, "K", &found.K));
  TRY(attribute_int(api, info, "block_size", &found.block));
  TRY(attribute_int(api, info, "bits", &found.bits));
  TRY(attribute_int(api, info, "half_scales", &found.half_scales));
  found.e2m1 = optional_int(api, info, "e2m1", 0);
  if (!is_supported(found.N, found.K, found.block, found.bits) || (found.e2m1 && found.bits != 4))
    return failure(api, ERROR_ARGUMENT, "BlockGather: unsupported N, K, block_size or bits");
  TRY(constant_input(api, info, 1, &found.codes));
  TRY(constant_input(api, info, 2, &found.scales));
  TRY(constant_input(api, info, 3, &found.zero_points));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation block_gather = {create, compute};
