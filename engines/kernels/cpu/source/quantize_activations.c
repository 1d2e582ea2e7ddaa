/* QuantizeActivations: activations on a static grid, as ONNX Runtime's QuantizeLinear around 128 gives them. It also
   counts those that the grid does not reach, which no operator of ONNX Runtime does.

     x [..] float, scale: one float
     y [..] uint8: x / scale to the nearest integer, ties to even, from -128 to 127, plus 128 */
#include "ort.h"
#include "vector.h"

#include <float.h>
#include <stdatomic.h>
#include <stdlib.h>

/* As many as a thread quantizes in about the time that waking another takes. */
enum { PART = 1 << 13, MAX_RANK = 8 };

typedef struct {
  Base base;
  Tensor scale; /* where it is constant */
} Kernel;

typedef struct {
  const float* x;
  uint8_t* y;
  int64_t count;
  float scale;
} Work;

/* Activations that this process quantized, and how many of them lay beyond the grid. */
static _Atomic uint64_t quantized_values, clipped_values;

__attribute__((visibility("default"))) void tapeout_activation_values(uint64_t* stored, uint64_t* clipped) {
  *stored = atomic_load_explicit(&quantized_values, memory_order_relaxed);
  *clipped = atomic_load_explicit(&clipped_values, memory_order_relaxed);
}

/* NaN and what is far beyond the grid become the integers next to its ends, so that they have codes and are counted. */
INLINE I32x16 rounded(F32x16 x, float scale) {
  return round_to_int(vmin(vmax(x / splat(scale), splat(INT8_MIN - 1)), splat(INT8_MAX + 1)));
}

static void quantize_part(void* state, size_t part) {
  const Work* w = state;
  const int64_t first = (int64_t)part * PART, left = w->count - first, count = left < PART ? left : PART;
  const float* x = w->x + first;
  uint8_t* y = w->y + first;
  I32x16 clipped = splat_int(0);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const I32x16 codes = rounded(load(x + i), w->scale);
    clipped += beyond(codes, 8);
    store_int8(y + i, saturate_int8(codes) ^ (int8_t)INT8_MIN);
  }
  if (i < count) {
    const I32x16 codes = rounded(load_first(x + i, count - i), w->scale); /* no zero lies beyond the grid */
    clipped += beyond(codes, 8);
    const I8x16 bytes = saturate_int8(codes) ^ (int8_t)INT8_MIN;
    memcpy(y + i, &bytes, count - i);
  }
  const int32_t total = reduce_add_int(clipped);
  atomic_fetch_add_explicit(&quantized_values, count, memory_order_relaxed);
  if (total) atomic_fetch_add_explicit(&clipped_values, total, memory_order_relaxed);
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  Tensor x, scale;
  TRY(input(api, context, 0, NULL, &x));
  TRY(input(api, context, 1, &k->scale, &scale));
  if (!x.present || x.type != FLOAT || x.rank > MAX_RANK)
    return failure(api, ERROR_ARGUMENT, "QuantizeActivations: the input is not float or has more than 8 axes");
  if (!holds(&scale, FLOAT, 1)) return failure(api, ERROR_ARGUMENT, "QuantizeActivations: the scale is not one float");
  Work w = {.x = x.data, .count = x.elements, .scale = *(const float*)scale.data};
  if (!(w.scale > 0 && w.scale <= FLT_MAX))
    return failure(api, ERROR_ARGUMENT, "QuantizeActivations: the scale is not a positive number");
  TRY(output(api, context, 0, x.dims, x.rank, &w.y));
  const int64_t parts = (w.count + PART - 1) / PART;
  return parts ? parallel(api, context, k->base.threads, quantize_part, parts, &w, NULL) : NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  Kernel found = {.base = {api, threads_of(op)}};
  TRY(constant_input(api, info, 1, &found.scale));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation quantize_activations = {create, compute};
