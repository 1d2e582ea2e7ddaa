/* Linears with activations quantized to int8 and weights of 4, 5, 6 or 8 bits, or 4-bit floats (codes.h): y = f(x) * W^T + bias.

   Activations are quantized for each token and block on its own, as MatMulNBits does at accuracy level 4
   (quantization/reference.py, round_activations). Products are summed in integers within a block and in float across
   blocks. Tokens share nothing, so a result does not depend on what else is in the batch. The operation that comes right
   before a linear in a transformer is done while its activations are quantized, and its result never goes to memory:

     BlockLinear         x [.., K]                            x
     GatedLinear         x [.., 2K]                           silu(first half) * second half
     NormLinear          x [.., K], weight [K]                x / rms(x) * weight
     ResidualNormLinear  a [.., K], b [.., K], weight [K]     the same of a + b, which is a second output
     HeadLinear          x [M, K], greedy bool                x; if greedy, y has no rows, and a second output [M] has the
                                                              index of each token's largest logit, the first of equals,
                                                              or -1 if a logit of the token is not finite

   All take codes, scales, zero points and bias after these; engines/passes/onnxruntime/block_linears.py packs them.

   Names: M tokens, N output channels, K input channels, B blocks of K (K / block); tiles and steps as in codes.h. N is
   padded to pairs of tiles. */
#include "block_product.h"
#include "ort.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANK = 8 };
typedef enum { PLAIN, GATED, NORM, RESIDUAL_NORM, HEAD } Kind; /* variants, in the order of declarations */

typedef struct {
  Base base;
  Kind kind;
  BlockShape shape;
  float epsilon;
  Stream* stream;                                  /* of `threads` */
  Tensor weight, codes, scales, zero_points, bias; /* where they are constant */
} Kernel;

/* The largest logit of a token in a part of the columns, and its column. */
typedef struct {
  float value;
  int32_t column;
} Max;

typedef struct {
  Kernel* kernel;
  int64_t M, parts;
  BlockWeight block;
  _Atomic int out_of_memory;
  const float* x;
  const float* residual; /* what is added to x before its norm */
  const float* weight;   /* of the norm */
  float* sum;            /* x + residual */
  float* y;
  Max* max; /* [M, parts] instead of y */
  BlockRows rows;
} Work;

/* The activations of a token: memory of the caller's, or `buffer` [K] with the result of the operation before. */
static const float* activations_of(const Work* w, size_t token, float* buffer) {
  const Kernel* k = w->kernel;
  const int64_t K = k->shape.K;
  if (k->kind == PLAIN || k->kind == HEAD) return w->x + token * K;
  if (k->kind == GATED) {
    const float *gate = w->x + token * 2 * K, *up = gate + K;
    for (int64_t i = 0; i < K; i += LANES) store(buffer + i, silu(load(gate + i)) * load(up + i));
    return buffer;
  }
  const float* x = w->x + token * K;
  if (k->kind == RESIDUAL_NORM) {
    float* sum = w->sum + token * K;
    const float* residual = w->residual + token * K;
    for (int64_t i = 0; i < K; i += LANES) store(sum + i, load(x + i) + load(residual + i));
    x = sum;
  }
  F32x16 squares = {0};
  for (int64_t i = 0; i < K; i += LANES) squares = vfma(load(x + i), load(x + i), squares);
  F32x16 inverse = splat(1.0f / sqrtf(reduce_add(squares) / (float)K + k->epsilon));
  for (int64_t i = 0; i < K; i += LANES) store(buffer + i, load(x + i) * inverse * load(w->weight + i));
  return buffer;
}

static void quantize_token(void* state, size_t token) {
  Work* w = state;
  const Kernel* k = w->kernel;
  float* buffer = scratch(SCRATCH_ROW, k->shape.K * sizeof(float));
  if (!buffer) {
    w->out_of_memory = 1;
    return;
  }
  const float* x = activations_of(w, token, buffer);
  quantize_row(&w->block, &w->rows, (int64_t)token, x);
  release_scratch(SCRATCH_ROW);
}

/* The largest of a token's lanes, the first of equals. */
static Max max_of_lanes(const LaneMax* lanes) {
  F32x16 value = load(lanes->value);
  const float largest = reduce_max(value);
  I32x16 column = blend_int(greater(splat(largest), value), splat_int(INT32_MAX), load_int(lanes->column));
  return (Max){largest, reduce_min_int(column)};
}

/* One of `parts` ranges of tiles, for all tokens. */
static void multiply_part(void* state, size_t part) {
  Work* w = state;
  const int64_t pairs = w->block.tiles / 2, index = (int64_t)part;
  const int64_t first = pairs * index / w->parts * 2, end = pairs * (index + 1) / w->parts * 2;
  if (!w->max) {
    multiply_rows(&w->block, &w->rows, first, end, w->y, NULL);
    return;
  }
  LaneMax* max = scratch(SCRATCH_ROW, w->M * sizeof(LaneMax));
  if (!max) {
    w->out_of_memory = 1;
    return;
  }
  for (int64_t token = 0; token < w->M; token++) {
    store(max[token].value, splat(-INFINITY));
    store_int(max[token].column, splat_int(INT32_MAX));
  }
  multiply_rows(&w->block, &w->rows, first, end, NULL, max);
  for (int64_t token = 0; token < w->M; token++) w->max[token * w->parts + index] = max_of_lanes(max + token);
  release_scratch(SCRATCH_ROW);
}

/* The column of a token's largest logit, or -1 if one of its logits is not finite. */
static int64_t argmax(const Work* w, int64_t token) {
  Max max = {-INFINITY, INT32_MAX};
  const Max* found = w->max + token * w->parts;
  for (int64_t part = 0; part < w->parts; part++) /* in the order of columns: the first of equals stays */
    if (found[part].value > max.value) max = found[part];
  return max.column == INT32_MAX || isinf(max.value) ? -1 : max.column;
}

/* The tokens of `w`, whose memory is bounded, at once. */
static Status* compute_tokens(Work* w, Context* context, void* memory, int64_t* greedy) {
  Kernel* k = w->kernel;
  Api api = k->base.api;
  w->rows = rows_in(memory, &k->shape, w->M);
  if (greedy) w->max = (Max*)((char*)memory + rows_bytes(&k->shape, w->M));
  if (w->M * k->shape.K < PARALLEL_ACTIVATIONS)
    for (int64_t token = 0; token < w->M; token++) quantize_token(w, token);
  else
    TRY(parallel(api, context, k->base.threads, quantize_token, w->M, w, NULL));
  if (!w->out_of_memory) TRY(parallel(api, context, k->base.threads, multiply_part, w->parts, w, k->stream));
  if (w->out_of_memory) return failure(api, ERROR_FAIL, "block-quantized linear: out of memory");
  for (int64_t token = 0; greedy && token < w->M; token++) greedy[token] = argmax(w, token);
  return NULL;
}

/* The tokens of `all`, as many at once as the scratch memory of a thread has room for. */
static Status* compute_chunks(const Work* all, Context* context, int64_t* greedy) {
  const Kernel* k = all->kernel;
  const int64_t token_bytes = rows_bytes(&k->shape, 1) + (greedy ? 8 * all->parts + (int64_t)sizeof(LaneMax) : 0);
  int64_t most = (SCRATCH_KEPT - 64) / token_bytes / GROUP * GROUP;
  if (most < GROUP) most = GROUP;
  const int64_t chunk = all->M < most ? all->M : most, inputs = k->kind == GATED ? 2 * k->shape.K : k->shape.K;
  void* memory = scratch(SCRATCH_LINEAR, chunk * token_bytes + 64);
  if (!memory) return failure(k->base.api, ERROR_FAIL, "block-quantized linear: out of memory");
  Status* status = NULL;
  for (int64_t token = 0; !status && token < all->M; token += chunk) {
    Work w = *all;
    w.M = all->M - token < chunk ? all->M - token : chunk;
    w.x += token * inputs;
    if (w.residual) w.residual += token * k->shape.K, w.sum += token * k->shape.K;
    if (!greedy) w.y += token * k->shape.N;
    status = compute_tokens(&w, context, memory, greedy ? greedy + token : NULL);
  }
  release_scratch(SCRATCH_LINEAR);
  return status;
}

/* Whether the weights have the shapes and types that the kernel was created for. */
static int are_sound(const Kernel* k, const Tensor* weight, const Tensor* codes, const Tensor* scales,
                     const Tensor* zero_points, const Tensor* bias) {
  return is_block_weight(&k->shape, 1, codes, scales, zero_points) &&
         (!bias->present || holds(bias, FLOAT, k->shape.N)) &&
         ((k->kind != NORM && k->kind != RESIDUAL_NORM) || holds(weight, FLOAT, k->shape.K));
}

/* What computes `tokens` tokens, but for their inputs and outputs. */
static Work work_of(Kernel* k, int64_t tokens, const Tensor* weight, const Tensor* codes, const Tensor* scales,
                    const Tensor* zero_points, const Tensor* bias) {
  const BlockWeight block = block_weight(&k->shape, codes, scales, zero_points, bias->data);
  const int64_t pairs = block.tiles / 2, pair_bytes = 2 * tile_bytes(&k->shape);
  int64_t pairs_of_part = (pairs + PARTS - 1) / PARTS;
  if (pairs_of_part * pair_bytes > PART_BYTES) pairs_of_part = PART_BYTES / pair_bytes ? PART_BYTES / pair_bytes : 1;
  return (Work){.kernel = k,
                .M = tokens,
                .parts = (pairs + pairs_of_part - 1) / pairs_of_part,
                .block = block,
                .weight = weight->data};
}

size_t linear_bytes(const void* self) {
  const Kernel* k = self;
  const int constant = are_sound(k, &k->weight, &k->codes, &k->scales, &k->zero_points, &k->bias);
  return constant && k->kind != HEAD ? (size_t)k->codes.elements : 0;
}

int compute_zeros(void* self, int64_t tokens) {
  Kernel* k = self;
  const int64_t inputs = k->kind == GATED ? 2 * k->shape.K : k->shape.K;
  float* memory = calloc((size_t)(tokens * (inputs + 2 * k->shape.K + k->shape.N)), sizeof *memory);
  if (!memory) return 0;
  Work w = work_of(k, tokens, &k->weight, &k->codes, &k->scales, &k->zero_points, &k->bias);
  float* residual = memory + tokens * inputs;
  w.x = memory, w.y = residual + 2 * tokens * k->shape.K;
  if (k->kind == RESIDUAL_NORM) w.residual = residual, w.sum = residual + tokens * k->shape.K;
  Status* status = compute_chunks(&w, NULL, NULL);
  const int done = !status;
  release_status(k->base.api, status);
  free(memory);
  return done;
}

static Status* compute(void* self, Context* context) {
  Kernel* k = self;
  Api api = k->base.api;
  const int normed = k->kind == NORM || k->kind == RESIDUAL_NORM;
  Tensor x, residual = {0}, greedy = {0}, weight = {0}, codes, scales, zero_points, bias;
  size_t next = 0;
  TRY(input(api, context, next++, NULL, &x));
  if (k->kind == RESIDUAL_NORM) TRY(input(api, context, next++, NULL, &residual));
  if (k->kind == HEAD) TRY(input(api, context, next++, NULL, &greedy));
  if (normed) TRY(input(api, context, next++, &k->weight, &weight));
  TRY(input(api, context, next++, &k->codes, &codes));
  TRY(input(api, context, next++, &k->scales, &scales));
  TRY(input(api, context, next++, &k->zero_points, &zero_points));
  TRY(input(api, context, next, &k->bias, &bias));

  if (!x.present || x.type != FLOAT || !x.rank || x.rank > MAX_RANK ||
      x.dims[x.rank - 1] != (k->kind == GATED ? 2 * k->shape.K : k->shape.K))
    return failure(api, ERROR_ARGUMENT, "block-quantized linear: the input does not have K columns");
  const int64_t M = x.elements / x.dims[x.rank - 1];
  if (!are_sound(k, &weight, &codes, &scales, &zero_points, &bias))
    return failure(api, ERROR_ARGUMENT, "block-quantized linear: weights of another shape or type");
  if (k->kind == RESIDUAL_NORM && !holds(&residual, FLOAT, x.elements))
    return failure(api, ERROR_ARGUMENT, "ResidualNormLinear: its inputs differ in shape");
  if (k->kind == HEAD && (x.rank != 2 || !holds(&greedy, BOOL, 1)))
    return failure(api, ERROR_ARGUMENT, "HeadLinear: the input is not [M, K] or greedy is not one bool");

  Work w = work_of(k, M, &weight, &codes, &scales, &zero_points, &bias);
  w.x = x.data, w.residual = residual.data;
  int64_t dims[MAX_RANK], *chosen = NULL;
  for (size_t i = 0; i < x.rank; i++) dims[i] = x.dims[i];
  if (k->kind == RESIDUAL_NORM) TRY(output(api, context, 1, dims, x.rank, &w.sum));
  dims[x.rank - 1] = k->shape.N;
  if (k->kind == HEAD) {
    const int is_greedy = *(const char*)greedy.data != 0;
    dims[0] = is_greedy ? M : 0;
    TRY(output(api, context, 1, dims, 1, &chosen));
    dims[0] = is_greedy ? 0 : M;
    if (!is_greedy) chosen = NULL;
  }
  TRY(output(api, context, 0, dims, x.rank, &w.y));
  if (!M) return NULL;
  return compute_chunks(&w, context, chosen);
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  const Declaration* declared = declaration_of(op);
  Kernel found = {.base = {api, threads_of(op)}, .kind = (Kind)declared->variant};
  TRY(attribute_int(api, info, "N", &found.shape.N));
  TRY(attribute_int(api, info, "K", &found.shape.K));
  TRY(attribute_int(api, info, "block_size", &found.shape.block));
  TRY(attribute_int(api, info, "bits", &found.shape.bits));
  TRY(attribute_int(api, info, "half_scales", &found.shape.half_scales));
  TRY(attribute_int(api, info, "symmetric", &found.shape.symmetric));
  found.shape.e2m1 = optional_int(api, info, "e2m1", 0);
  found.epsilon = optional_float(api, info, "epsilon", 1e-5f);
  if (!is_supported_shape(&found.shape))
    return failure(api, ERROR_ARGUMENT, "block-quantized linear: unsupported N, K, block_size or bits");
  if (found.shape.block > LARGEST_BLOCK)
    return failure(api, ERROR_ARGUMENT, "block-quantized linear: sums over more than 32768 channels overflow");
  if (!(found.epsilon >= 0)) return failure(api, ERROR_ARGUMENT, "block-quantized linear: a negative epsilon");
  const size_t first = declared->input_count - 4; /* codes, scales, zero points, bias */
  if (found.kind == NORM || found.kind == RESIDUAL_NORM) TRY(constant_input(api, info, first - 1, &found.weight));
  TRY(constant_input(api, info, first, &found.codes));
  TRY(constant_input(api, info, first + 1, &found.scales));
  TRY(constant_input(api, info, first + 2, &found.zero_points));
  TRY(constant_input(api, info, first + 3, &found.bias));
  TRY(keep_kernel(&found, sizeof found, self));
  Kernel* k = *self;
  const Tensor* codes = &k->codes; /* not constant: nothing is read ahead */
  if (!k->base.threads || (k->stream = create_stream(k->base.threads, codes->data, codes->elements))) return NULL;
  release_threads(k->base.threads);
  free(k);
  *self = NULL;
  return failure(api, ERROR_FAIL, "block-quantized linear: out of memory");
}

const Implementation block_linear = {create, compute};
