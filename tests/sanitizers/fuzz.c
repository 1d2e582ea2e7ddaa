/* Runs the kernels on random nodes, valid and malformed, and on random draws, and compares valid results with plain C in
   double precision.

     fuzz SEED CASES [KERNEL [RESULTS]]

   Valid nodes must succeed, malformed ones must return a status, a failing API call or allocation must become one (or, of
   memory for tiles of AMX, the right result), and nothing may leak. Everything else is AddressSanitizer's and
   UndefinedBehaviorSanitizer's to find.

   KERNEL is the file of an operator (`norm_rows.c`), of which all nodes are then, or `all`.
   RESULTS is a file for all valid results: of each tensor a line "case operator type bytes", then its bytes. */
#include "runtime.h"
#include "sampling.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double ROUNDING = 1.0 / (1 << 24); /* relative error of a float32 operation */
static const double MADE = 3e-6;                /* of activations that a kernel computes itself */

enum { ROUTINE, EXTREME, NON_FINITE }; /* values of a tensor */

static int64_t running_case = -1;
static FILE* results;

static void write_result(const char* what, int type, const void* data, int64_t bytes) {
  if (!results) return;
  fprintf(results, "%lld %s %d %lld\n", (long long)running_case, what, type, (long long)bytes);
  fwrite(data, 1, bytes, results);
}

static int one_in(int count) {
  return random_int(0, count - 1) == 0;
}
#define PICK(...) ((const int64_t[]){__VA_ARGS__})[random_int(0, (int64_t)(sizeof((int64_t[]){__VA_ARGS__}) / 8) - 1)]

static float random_float(void) {
  float sum = 0;
  for (int i = 0; i < 4; i++) sum += (float)random_int(-1000, 1000) / 1000;
  return sum;
}
static int same_float(float a, float b) {
  return a == b || (isnan(a) && isnan(b));
}
static void fill_floats(Value* value, float size) {
  float* data = value->data;
  const int64_t count = elements_of(value);
  for (int64_t i = 0; i < count; i++) data[i] = random_float() * size;
}

static void add_int(Info* info, const char* name, int64_t i) {
  info->attributes[info->count++] = (Attribute){name, 0, i, 0};
}
static void add_float(Info* info, const char* name, float f) {
  info->attributes[info->count++] = (Attribute){name, 1, 0, f};
}

/* --- weights ---------------------------------------------------------------------------------------------------- */

typedef struct {
  int64_t N, K, block, bits, half, symmetric, e2m1, tiles, blocks; /* e2m1: codes are those of 5 bits, stored in 4 */
  uint8_t *codes, *zero_points;                                    /* [N, K], [N, blocks] */
  float* scales;                                                   /* [N, blocks] */
} Weights;

/* Twice a float of four bits: a sign, two bits of exponent with bias 1, and one of mantissa. */
static int twice_e2m1(int code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const int magnitude = exponent ? (2 + mantissa) << (exponent - 1) : mantissa;
  return code & 8 ? -magnitude : magnitude;
}

enum { MOST_EXPERTS = 4 };

static int64_t random_bits(int64_t block) {
  const int64_t bits = PICK(4, 5, 6, 8);
  return block % 32 && bits == 5 ? 6 : bits; /* 5 bits have no such blocks */
}

/* Random weights and their packed tensors: of a linear, or of `experts` of as many rows, which may differ in bits where
   `begins` is given. `largest`: all codes are the largest. */
static Weights new_weights(int64_t N, int64_t experts, int64_t K, int64_t block, int largest, Value* codes,
                           Value* scales, Value* zero_points, Value* begins) {
  Weights w = {.N = N, .K = K, .block = block, .bits = random_bits(block), .half = one_in(2), .symmetric = one_in(2)};
  if (one_in(6)) w.bits = 4, w.symmetric = w.e2m1 = 1, w.half = 0;
  const int differ = begins && !w.e2m1 && one_in(2);
  w.tiles = (N + 31) / 32 * 2, w.blocks = K / block;
  w.codes = malloc(N * K), w.zero_points = malloc(N * w.blocks), w.scales = malloc(N * w.blocks * sizeof(float));
  const int64_t rows = w.tiles * 16 / experts; /* of an expert */
  int64_t bits_of[MOST_EXPERTS], begin_of[MOST_EXPERTS + 1] = {0};
  for (int64_t e = 0; e < experts; e++) {
    bits_of[e] = differ ? random_bits(block) : w.bits;
    begin_of[e + 1] = begin_of[e] + rows * K * bits_of[e] / 8;
    if (bits_of[e] > w.bits || !e) w.bits = bits_of[e];
  }
  if (differ) {
    new_value(codes, UINT8, 1, (int64_t[]){begin_of[experts]});
    new_value(begins, INT64, 1, (int64_t[]){experts + 1});
    memcpy(begins->data, begin_of, (experts + 1) * sizeof *begin_of);
  } else
    new_value(codes, UINT8, 2, (int64_t[]){w.tiles, 16 * K * w.bits / 8});
  new_value(scales, w.e2m1 ? UINT8 : w.half ? HALF : FLOAT, 3, (int64_t[]){w.tiles, w.blocks, 16});
  if (!w.symmetric) new_value(zero_points, UINT8, 3, (int64_t[]){w.tiles, w.blocks, 16});
  memset(codes->data, 0, elements_of(codes));
  for (int64_t n = 0; n < w.tiles * 16; n++) {
    const int64_t bits = bits_of[n / rows], top = (1 << bits) - 1;
    uint8_t* tile = (uint8_t*)codes->data + begin_of[n / rows] + n % rows / 16 * (16 * K * bits / 8);
    for (int64_t k = 0; k < K; k++) {
      const uint8_t code = (uint8_t)(largest ? top : random_int(0, top));
      if (n < N) w.codes[n * K + k] = w.e2m1 ? (uint8_t)(16 + twice_e2m1(code)) : code;
      const int64_t step = k / 4, byte = n % 16 * 4 + k % 4;
      if (bits == 8) tile[64 * step + byte] = code;
      if (bits == 4) tile[64 * (step / 2) + byte] |= (uint8_t)(code << (step % 2 * 4));
      if (bits == 5) {
        uint8_t* eight_steps = tile + 320 * (step / 8);
        eight_steps[64 * (step % 8 / 2) + byte] |= (uint8_t)((code & 15) << (step % 2 * 4));
        eight_steps[256 + byte] |= (uint8_t)((code >> 4) << (step % 8));
      }
      if (bits == 6) {
        uint8_t* four_steps = tile + 192 * (step / 4);
        four_steps[64 * (step % 4 / 2) + byte] |= (uint8_t)((code & 15) << (step % 2 * 4));
        four_steps[128 + byte] |= (uint8_t)((code >> 4) << (step % 4 * 2));
      }
    }
    for (int64_t b = 0; b < w.blocks; b++) {
      const int64_t at = (n / 16 * w.blocks + b) * 16 + n % 16;
      const _Float16 half = (_Float16)((float)random_int(1, 30) / 1000 * (one_in(2) ? 1 : -1));
      const int exponent = (int)random_int(-9, -4);
      const float scale = w.e2m1 ? ldexpf(1, exponent) : w.half ? (float)half : (float)half * 1.0001f;
      const uint8_t zero_point = (uint8_t)random_int(0, top);
      if (w.e2m1)
        ((uint8_t*)scales->data)[at] = (uint8_t)(127 + exponent);
      else if (w.half)
        memcpy((char*)scales->data + 2 * at, &half, 2);
      else
        ((float*)scales->data)[at] = scale;
      if (!w.symmetric) ((uint8_t*)zero_points->data)[at] = zero_point;
      if (n < N) w.scales[n * w.blocks + b] = scale;
      if (n < N) w.zero_points[n * w.blocks + b] = w.symmetric ? (uint8_t)(1 << (w.e2m1 ? 4 : bits - 1)) : zero_point;
    }
  }
  return w;
}
static void release_weights(Weights* w) {
  free(w->codes), free(w->zero_points), free(w->scales);
}
static void add_weights(Info* info, const Weights* w) {
  add_int(info, "N", w->N), add_int(info, "K", w->K), add_int(info, "block_size", w->block);
  add_int(info, "bits", w->bits), add_int(info, "half_scales", w->half), add_int(info, "symmetric", w->symmetric);
  add_int(info, "e2m1", w->e2m1);
}

/* --- a node, whatever its operator ------------------------------------------------------------------------------ */

typedef struct {
  const char* what;
  const Op* op;
  Info info;
  Context context;
  int64_t changed[MOST_INPUTS]; /* whether another last axis, type or presence of an input is malformed, bit by bit */
  Weights weights, down;        /* down: of experts, whose ups and gates are `weights` */
  int64_t M, values;            /* of linears */
  int kind;
  int64_t heads, kv_heads, D, E, B, T, columns, blocks, rotary, window, packed; /* of attention */
  int bits, cache; /* of its cache: of a channel, and the type */
  float softcap, scale, epsilon;
  int64_t firsts[5], groups, channels, run, period; /* of columns, and of norms or heads of keys */
  int gated, silu, squash, sigmoid, norm_first, one, rated, by_channel;
  float least_step, most_step, least_decay, most_beta;
  float alpha, limit, offset;          /* of experts, whose activation is `kind` */
  uint64_t quantized, clipped;         /* activations that the process counted before the run */
  Value key_cache, value_cache, state; /* as they were before the run */
} Node;

enum { LAST_AXIS = 1, TYPE = 2, PRESENCE = 4, ALIGNMENT = 8, ALL = 15 };

static void release_node(Node* node) {
  release_context(&node->context);
  release_weights(&node->weights), release_weights(&node->down);
  release_value(&node->key_cache), release_value(&node->value_cache), release_value(&node->state);
}

static void copy_value(const Value* from, Value* to) {
  new_value(to, from->type, from->rank, from->dims);
  if (to->data) memcpy(to->data, from->data, elements_of(from) * size_of(from->type));
}

static void expect_success(Node* node, Status* status) {
  if (status) fail("%s: a valid node returned: %s", node->what, message_of(status));
}
static void expect_status(Node* node, Status* status, const char* why) {
  if (!status) fail("%s: %s was accepted", node->what, why);
  drop_status(status);
}

static int32_t int_of(const Node* node, int input, int64_t index) {
  return ((int32_t*)node->context.inputs[input].data)[index];
}

static void write_value(const Node* node, const Value* value) {
  if (value->data)
    write_result(node->what, value->type, value->data, elements_of(value) * (int64_t)size_of(value->type));
}
/* All outputs of a node, and the inputs that it writes. */
static void write_results(const Node* node) {
  const Context* context = &node->context;
  for (int i = 0; i < MOST_OUTPUTS; i++) write_value(node, &context->outputs[i]);
  for (int i = 0; i < MOST_INPUTS; i++)
    if (context->written >> i & 1) write_value(node, &context->inputs[i]);
}

/* --- linears ---------------------------------------------------------------------------------------------------- */

static const char* const LINEARS[] = {"BlockLinear", "GatedLinear", "NormLinear", "ResidualNormLinear", "HeadLinear"};
enum { PLAIN, GATED, NORM, RESIDUAL_NORM, HEAD };

/* `long_block`: 0, or the size of the only block, with the largest codes and activations. */
static Node new_linear(int64_t long_block) {
  Node node = {.what = "linear", .kind = (int)random_int(PLAIN, HEAD)};
  const int overflow = long_block > 0, wide = one_in(20), many = one_in(150);
  const int64_t block = overflow ? long_block : PICK(16, 32, 48, 64, 128);
  const int chunked =
      !wide && !many && one_in(10); /* several chunks of channels and groups of tokens, where by tiles */
  const int64_t K = overflow ? block : block * (chunked ? random_int(4, 20) : random_int(1, 4));
  const int64_t N = overflow ? random_int(1, 3) : wide ? random_int(2000, 2300) : random_int(1, 110);
  node.M = overflow && one_in(3) ? 130 /* more than one chunk */
           : many                ? random_int(300, 700)
           : chunked             ? random_int(24, 70)
           : one_in(4) ? random_int(14, 25) /* several groups of tokens; where wide, by several runs of tiles */
           : wide      ? random_int(1, 4)
                       : (one_in(10) ? 0 : random_int(1, 13));
  node.values = overflow ? EXTREME : one_in(6) ? NON_FINITE : one_in(6) ? EXTREME : ROUTINE;
  Value* in = node.context.inputs;
  size_t next = 0;
  const int64_t columns = node.kind == GATED ? 2 * K : K;
  const size_t rank = node.kind == HEAD ? 2 : (size_t)random_int(node.M == 1 ? 1 : 2, 4);
  int64_t dims[4] = {1, 1, 1, columns};
  dims[rank - 1] = columns;
  if (rank > 1) dims[random_int(0, (int64_t)rank - 2)] = node.M;
  for (int copies = 1 + (node.kind == RESIDUAL_NORM); copies; copies--) {
    new_value(&in[next], FLOAT, rank, dims);
    fill_floats(&in[next], powf(10, (float)random_int(-2, 2)));
    node.changed[next++] = ALL;
  }
  float* x = in[next - 1].data;
  for (int64_t i = 0; i < node.M * columns; i++) {
    if (node.values == EXTREME) x[i] = overflow || one_in(2) ? (i / columns % 2 ? -3.f : 3.f) : one_in(3) ? 1e-40f : 0;
    if (node.values == NON_FINITE && i % columns == 5 && i / columns % 2) x[i] = one_in(2) ? NAN : -INFINITY;
  }
  if (node.kind == HEAD) {
    new_value(&in[next], BOOL, 0, NULL);
    *(char*)in[next].data = 0;
    node.changed[next++] = TYPE | PRESENCE;
  }
  if (node.kind == NORM || node.kind == RESIDUAL_NORM) {
    new_value(&in[next], FLOAT, 1, &K);
    fill_floats(&in[next], 1);
    node.changed[next++] = ALL;
  }
  node.weights = new_weights(N, 1, K, block, overflow, &in[next], &in[next + 1], &in[next + 2], NULL);
  node.changed[next] = LAST_AXIS | TYPE | PRESENCE;
  node.changed[next + 1] = ALL;
  node.changed[next + 2] = node.weights.symmetric ? 0 : LAST_AXIS | TYPE | PRESENCE;
  const int tied = node.kind == HEAD && node.M > 0 && one_in(3); /* all logits of the first token are 0 */
  if (tied) memset(in[0].data, 0, K * sizeof(float));
  if (!tied && one_in(2)) {
    new_value(&in[next + 3], FLOAT, 1, &N);
    fill_floats(&in[next + 3], 1);
    node.changed[next + 3] = LAST_AXIS | TYPE | ALIGNMENT;
  }
  node.context.input_count = next + 4;
  node.epsilon = 0.01f;
  add_weights(&node.info, &node.weights);
  add_float(&node.info, "epsilon", node.epsilon);
  node.what = LINEARS[node.kind];
  node.op = find_op(node.what);
  return node;
}

/* What the kernel computes itself of a token's activations, in double. */
static void activations(const Node* node, int64_t token, double* a) {
  const Weights* w = &node->weights;
  const Value* in = node->context.inputs;
  const float* x = (const float*)in[0].data + token * w->K * (node->kind == GATED ? 2 : 1);
  double squares = 0;
  for (int64_t i = 0; i < w->K; i++) {
    a[i] = x[i];
    if (node->kind == GATED) a[i] = a[i] / (1 + exp(-a[i])) * x[w->K + i];
    if (node->kind == RESIDUAL_NORM) a[i] = x[i] + ((const float*)in[1].data)[token * w->K + i];
    squares += a[i] * a[i];
  }
  if (node->kind != NORM && node->kind != RESIDUAL_NORM) return;
  const float* weight = in[node->kind == NORM ? 1 : 2].data;
  for (int64_t i = 0; i < w->K; i++) a[i] = a[i] / sqrt(squares / (double)w->K + node->epsilon) * weight[i];
}

/* The activations of a token, and as a kernel rounds them: arrays of K, and the largest of each block. */
typedef struct {
  double *exact, *codes;
  char* near_tie; /* whether another rounding of the activation itself may give another code */
  float* largest;
  int finite;
} Token;

static Token new_token(int64_t K) {
  return (Token){malloc(K * sizeof(double)), malloc(K * sizeof(double)), malloc(K), malloc(K * sizeof(float)), 1};
}
static void release_token(Token* t) {
  free(t->exact), free(t->codes), free(t->near_tie), free(t->largest);
}

/* Of a token whose exact activations are known. */
static void round_exact(const Weights* w, double slack, Token* t) {
  t->finite = 1;
  for (int64_t i = 0; i < w->K; i++) t->finite &= isfinite(t->exact[i]) != 0;
  for (int64_t b = 0; b < w->blocks && t->finite; b++) {
    float largest = 0;
    for (int64_t i = b * w->block; i < (b + 1) * w->block; i++) largest = fmaxf(largest, fabsf((float)t->exact[i]));
    const float inverse = largest > 0 ? 127 / largest : 0;
    const int small = inverse > FLT_MAX; /* too small to divide by */
    t->largest[b] = largest;
    for (int64_t i = b * w->block; i < (b + 1) * w->block; i++) {
      const float quotient = small ? 0 : (float)t->exact[i] * inverse;
      t->codes[i] = nearbyintf(quotient);
      t->near_tie[i] = fabs(quotient - floorf(quotient) - 0.5f) < 2 * 127 * slack;
    }
  }
}

static void round_token(const Node* node, int64_t token, double slack, Token* t) {
  activations(node, token, t->exact);
  round_exact(&node->weights, slack, t);
}

/* Output n of rounded activations; the sum of what was added up, and what other roundings could change. */
static double coded_dot(const Weights* w, int64_t n, const Token* t, double* size, double* flips) {
  double sum = 0;
  *size = *flips = 0;
  for (int64_t b = 0; b < w->blocks && t->finite; b++) {
    const double scale = w->scales[n * w->blocks + b];
    const int zero_point = w->zero_points[n * w->blocks + b];
    const float largest = t->largest[b];
    double term = 0;
    for (int64_t i = b * w->block; i < (b + 1) * w->block; i++) {
      const int weight = w->codes[n * w->K + i] - zero_point;
      term += t->codes[i] * weight;
      if (t->near_tie[i]) *flips += fabs(weight * scale) * largest / 127;
    }
    sum += term * scale * (largest / 127);
    *size += fabs(term * scale * (largest / 127));
  }
  return sum;
}

static void check_linear_token(const Node* node, int64_t token, const float* y, Token* t) {
  const Weights* w = &node->weights;
  const Value* bias = &node->context.inputs[node->context.input_count - 1];
  const int exact = node->kind == PLAIN || node->kind == HEAD;
  const double slack = exact ? 0 : MADE;
  round_token(node, token, slack, t);
  for (int64_t n = 0; n < w->N; n++) {
    double size, flips, sum = coded_dot(w, n, t, &size, &flips);
    if (bias->present) sum += ((const float*)bias->data)[n], size += fabs(((const float*)bias->data)[n]);
    if (!t->finite) {
      if (isfinite(y[n])) fail("%s: token %d, output %d: NaN is lost", node->what, (int)token, (int)n);
    } else if (!(fabs(y[n] - sum) <= size * ((double)(w->blocks + 4) * ROUNDING + 2 * slack) + flips + 1e-30)) {
      fail("%s: N %d K %d block %d bits %d symmetric %d M %d: token %d, output %d: %.9g, expected %.9g", node->what,
           (int)w->N, (int)w->K, (int)w->block, (int)w->bits, (int)w->symmetric, (int)node->M, (int)token, (int)n, y[n],
           sum);
    }
  }
}

static void check_linear(Node* node) {
  const Weights* w = &node->weights;
  Token t = new_token(w->K);
  const float* y = node->context.outputs[0].data;
  const int64_t stride = node->M > 25 ? 37 : 1;
  for (int64_t token = 0; token < node->M; token += stride) check_linear_token(node, token, y + token * w->N, &t);
  if (node->kind == RESIDUAL_NORM)
    for (int64_t i = 0; i < node->M * w->K; i++) {
      const float sum = ((float*)node->context.inputs[0].data)[i] + ((float*)node->context.inputs[1].data)[i];
      const float found = ((float*)node->context.outputs[1].data)[i];
      if (found != sum && !(isnan(sum) && isnan(found))) fail("ResidualNormLinear: the sum differs");
    }
  release_token(&t);
  if (node->kind != HEAD) return;
  /* The same node once more, greedy: the first of the largest of the logits it gave. */
  Value logits = node->context.outputs[0];
  node->context.outputs[0] = (Value){0};
  release_value(&node->context.outputs[1]);
  *(char*)node->context.inputs[1].data = 1;
  expect_success(node, run_node(node->op, &node->info, &node->context));
  const int64_t* chosen = node->context.outputs[1].data;
  for (int64_t token = 0; token < node->M; token++) {
    const float* row = (const float*)logits.data + token * w->N;
    int64_t best = 0;
    for (int64_t n = 0; n < w->N && best >= 0; n++) best = !isfinite(row[n]) ? -1 : row[n] > row[best] ? n : best;
    if (chosen[token] != best) fail("HeadLinear: chose %d, expected %d", (int)chosen[token], (int)best);
  }
  write_results(node);
  release_value(&logits);
}

/* --- gather ----------------------------------------------------------------------------------------------------- */

static Node new_gather(void) {
  Node node = {.what = "BlockGather", .op = find_op("BlockGather")};
  Value* in = node.context.inputs;
  const int64_t block = PICK(16, 32, 64), K = block * random_int(1, 3), N = random_int(1, 70);
  new_value(&in[0], INT64, 2, (int64_t[]){random_int(1, 3), random_int(0, 5)});
  for (int64_t i = 0; i < elements_of(&in[0]); i++) ((int64_t*)in[0].data)[i] = random_int(-N, N - 1);
  node.weights = new_weights(N, 1, K, block, 0, &in[1], &in[2], &in[3], NULL);
  node.changed[0] = TYPE | PRESENCE | ALIGNMENT;
  node.changed[1] = LAST_AXIS | TYPE | PRESENCE;
  node.changed[2] = ALL;
  node.changed[3] = LAST_AXIS | TYPE;
  node.context.input_count = 4;
  add_weights(&node.info, &node.weights);
  return node;
}

static void check_gather(Node* node) {
  const Weights* w = &node->weights;
  const Value* ids = &node->context.inputs[0];
  for (int64_t i = 0; i < elements_of(ids); i++) {
    int64_t id = ((int64_t*)ids->data)[i];
    id += id < 0 ? w->N : 0;
    for (int64_t k = 0; k < w->K; k++) {
      const int64_t at = id * w->blocks + k / w->block;
      const float expected = (float)(w->codes[id * w->K + k] - w->zero_points[at]) * w->scales[at];
      const float found = ((float*)node->context.outputs[0].data)[i * w->K + k];
      if (found != expected) fail("BlockGather: channel %d of %d: %g, expected %g", (int)k, (int)id, found, expected);
    }
  }
}

/* --- activations on a static grid ------------------------------------------------------------------------------- */

void tapeout_activation_values(uint64_t* quantized, uint64_t* clipped);

static Node new_quantize(void) {
  Node node = {.what = "QuantizeActivations", .op = find_op("QuantizeActivations")};
  Value *in = node.context.inputs, *scale = &in[1];
  const int64_t K = one_in(8) ? random_int(8000, 9000) : random_int(1, 70); /* one part, or two */
  new_value(&in[0], FLOAT, 2, (int64_t[]){random_int(0, 3), K});
  fill_floats(&in[0], 1);
  new_value(scale, FLOAT, one_in(2), (int64_t[]){1});
  *(float*)scale->data = (float)random_int(1, 40) / 1000;
  float* x = in[0].data;
  for (int64_t i = 0; i < elements_of(&in[0]) && one_in(3); i += random_int(1, 40)) {
    const float special[] = {NAN, INFINITY, -INFINITY, 1e30f, -1e30f, 127.5f * *(float*)scale->data};
    x[i] = special[random_int(0, 5)];
  }
  node.changed[0] = TYPE | PRESENCE | ALIGNMENT;
  node.changed[1] = TYPE | PRESENCE | ALIGNMENT | (scale->rank ? LAST_AXIS : 0);
  node.context.input_count = 2;
  tapeout_activation_values(&node.quantized, &node.clipped);
  return node;
}

static void check_quantize(Node* node) {
  const Value* in = &node->context.inputs[0];
  const float *x = in->data, scale = *(const float*)node->context.inputs[1].data;
  uint64_t quantized, clipped, expected = 0;
  for (int64_t i = 0; i < elements_of(in); i++) {
    const float nearest = rintf(x[i] / scale);
    const int code = !(nearest >= -128) ? 0 : nearest > 127 ? 255 : (int)nearest + 128; /* NaN: 0 */
    const int found = ((uint8_t*)node->context.outputs[0].data)[i];
    expected += !(nearest >= -128 && nearest <= 127);
    if (found != code) fail("QuantizeActivations: %g at scale %g is %d, expected %d", x[i], scale, found, code);
  }
  tapeout_activation_values(&quantized, &clipped);
  quantized -= node->quantized, clipped -= node->clipped;
  if (quantized != (uint64_t)elements_of(in) || clipped != expected)
    fail("QuantizeActivations: %d of %d are counted as clipped, expected %d of %d", (int)clipped, (int)quantized,
         (int)expected, (int)elements_of(in));
}

/* --- norms of rows ---------------------------------------------------------------------------------------------- */

enum { NEXT_WEIGHT = 2, ROWS = 3 }; /* inputs of Norm, and of NormRows */

static const char* const NORMS[] = {"NormRows", "Norm", "ResidualNorm"};
enum { SOME_ROWS, ALL_ROWS, ALL_SUMS };

static Node new_norm(void) {
  const int64_t kind = random_int(SOME_ROWS, ALL_SUMS);
  Node node = {.what = NORMS[kind], .op = find_op(NORMS[kind]), .kind = (int)kind, .epsilon = 0.01f};
  Value* in = node.context.inputs;
  const int64_t K = 16 * random_int(1, 40), tokens = random_int(1, 6), rank = random_int(2, 3);
  const int64_t next = kind == ALL_ROWS && one_in(2) ? 16 * random_int(1, 20) : 0;
  const int64_t W = K + next + (kind == ALL_ROWS && one_in(2) ? 16 * random_int(1, 20) : 0);
  const int64_t dims[] = {1, tokens, W}, weight = kind == ALL_ROWS ? 1 : 2;
  for (int64_t i = 0; i < (kind == SOME_ROWS ? 1 + one_in(2) : weight); i++) {
    new_value(&in[i], FLOAT, rank, dims + 3 - rank);
    fill_floats(&in[i], powf(10, (float)random_int(-2, 2)));
    node.changed[i] = LAST_AXIS | TYPE | ALIGNMENT | (i ? 0 : PRESENCE);
  }
  if (kind == ALL_SUMS) node.changed[1] |= PRESENCE;
  if (one_in(6)) ((float*)in[0].data)[random_int(0, tokens * W - 1)] = NAN;
  new_value(&in[weight], FLOAT, 1, &K);
  fill_floats(&in[weight], 1);
  node.changed[weight] = ALL;
  if (next) {
    new_value(&in[NEXT_WEIGHT], FLOAT, 1, &next);
    fill_floats(&in[NEXT_WEIGHT], 1);
    node.changed[NEXT_WEIGHT] = LAST_AXIS | TYPE | ALIGNMENT;
  }
  if (kind == SOME_ROWS) {
    new_value(&in[ROWS], INT64, 1, (int64_t[]){random_int(0, 9)});
    for (int64_t i = 0; i < elements_of(&in[ROWS]); i++) ((int64_t*)in[ROWS].data)[i] = random_int(0, tokens - 1);
    node.changed[ROWS] = TYPE | PRESENCE | ALIGNMENT;
  }
  node.context.input_count = kind == SOME_ROWS ? 4 : (size_t)weight + 1 + (next > 0);
  add_float(&node.info, "epsilon", node.epsilon);
  return node;
}

static void check_norm(const Node* node) {
  const Value *in = node->context.inputs, *out = node->context.outputs, *added = node->kind == ALL_ROWS ? NULL : &in[1];
  const Value *weight = &in[node->kind == ALL_ROWS ? 1 : 2], *next = node->kind == ALL_ROWS ? &in[NEXT_WEIGHT] : NULL;
  const int64_t W = in[0].dims[in[0].rank - 1], K = weight->dims[0], L = next && next->present ? next->dims[0] : 0;
  const int64_t count = node->kind == SOME_ROWS ? elements_of(&in[ROWS]) : elements_of(&in[0]) / W;
  for (int64_t row = 0; row < count; row++) {
    const int64_t at = (node->kind == SOME_ROWS ? ((int64_t*)in[ROWS].data)[row] : row) * W;
    const float *x = (float*)in[0].data + at, *residual = added && added->present ? (float*)added->data + at : NULL;
    double squares[2] = {0, 0}; /* of each weight */
    for (int64_t i = 0; i < K + L; i++) {
      const float sum = residual ? x[i] + residual[i] : x[i];
      squares[i >= K] += (double)sum * sum;
      if (node->kind == ALL_SUMS && !same_float(((float*)out[1].data)[at + i], sum))
        fail("ResidualNorm: sum %d of row %d is %g, expected %g", (int)i, (int)row, ((float*)out[1].data)[at + i], sum);
    }
    for (int64_t i = 0; i < W; i++) {
      const float sum = residual ? x[i] + residual[i] : x[i], found = ((float*)out[0].data)[row * W + i];
      const int64_t second = i >= K;
      const double inverse = 1 / sqrt(squares[second] / (double)(second ? L : K) + node->epsilon);
      const double expected = i >= K + L ? sum
                              : second   ? sum * inverse * ((float*)next->data)[i - K]
                                         : sum * inverse * ((float*)weight->data)[i];
      if (isnan(expected) ? !isnan(found) : !(fabs(found - expected) <= MADE * fabs(expected) + 1e-30))
        fail("%s: channel %d of row %d: %g, expected %g", node->what, (int)i, (int)row, found, expected);
    }
  }
}

/* --- convolutions ----------------------------------------------------------------------------------------------- */

enum { CONV_X, CONV_WEIGHT, CONV_BIAS, CONV_STATE, CONV_OFFSETS, CONV_STARTS, CONV_SLOTS, CONV_INPUTS };

/* The weight and the state of `taps`, as random as the tokens are. */
static void new_taps(Node* node, int64_t taps, int64_t rows, int64_t C) {
  Value* in = node->context.inputs;
  new_value(&in[CONV_WEIGHT], FLOAT, 2, (int64_t[]){taps, C});
  new_value(&in[CONV_STATE], FLOAT, 3, (int64_t[]){rows, taps - 1, C});
  fill_floats(&in[CONV_WEIGHT], 1), fill_floats(&in[CONV_STATE], 1);
}

/* Offsets, starts and slots of a step, the three inputs from `first` on. Returns its tokens. */
static int64_t new_sequences(Node* node, int first, int64_t rows) {
  Value* in = node->context.inputs + first;
  new_value(&in[0], INT32, 1, (int64_t[]){node->B + 1});
  new_value(&in[1], INT32, 1, &node->B);
  new_value(&in[2], INT32, 1, &node->B);
  int32_t *offsets = in[0].data, *starts = in[1].data, *slots = in[2].data;
  offsets[0] = 0;
  for (int64_t b = 0; b < node->B; b++) {
    offsets[b + 1] = offsets[b] + (int32_t)(one_in(3) ? 1 : random_int(0, 20));
    starts[b] = one_in(2) ? 0 : (int32_t)PICK(1, 2, 17, INT32_MAX);
    do {
      slots[b] = (int32_t)random_int(0, rows - 1); /* a row of its own */
      for (int64_t i = 0; i < b; i++)
        if (slots[i] == slots[b]) slots[b] = -1;
    } while (slots[b] < 0);
  }
  return offsets[node->B];
}

/* Breaks a start, an offset or a slot of those; says what. */
static const char* malform_sequences(Node* node, int first, int64_t rows) {
  Value* in = node->context.inputs + first;
  const int64_t b = random_int(0, node->B - 1);
  int32_t *offsets = in[0].data, *starts = in[1].data, *slots = in[2].data;
  switch (random_int(0, 2)) {
    case 0: starts[b] = (int32_t)PICK(-1, INT32_MIN); return "a malformed start";
    case 1: {
      const int64_t wrong[] = {-1, INT32_MIN, offsets[node->B] + (int64_t)1, INT32_MAX};
      offsets[random_int(0, node->B)] = (int32_t)wrong[random_int(0, 3)];
      return "a malformed offset";
    }
    default: {
      const int64_t wrong[] = {-1, INT32_MIN, rows, INT32_MAX};
      slots[b] = (int32_t)wrong[random_int(0, 3)];
      return "a malformed slot";
    }
  }
}

static Node new_conv(void) {
  Node node = {.what = "CausalConv", .op = find_op("CausalConv"), .B = one_in(10) ? 0 : random_int(1, 4)};
  Value* in = node.context.inputs;
  const int64_t C = one_in(4) ? random_int(250, 600) : random_int(1, 50), taps = one_in(2) ? 3 : random_int(2, 16);
  const int64_t rows = node.B + random_int(0, 3), tokens = new_sequences(&node, CONV_OFFSETS, rows);
  node.gated = one_in(3), node.silu = one_in(3), node.firsts[0] = one_in(2) ? random_int(1, 20) : 0;
  const int64_t W = node.gated ? 3 * C : node.firsts[0] + C + (one_in(2) ? random_int(0, 9) : 0);
  const size_t rank = (size_t)random_int(2, 4);
  const int64_t dims[] = {1, 1, tokens, W};
  new_value(&in[CONV_X], FLOAT, rank, dims + 4 - rank);
  fill_floats(&in[CONV_X], 1);
  new_taps(&node, taps, rows, C);
  if (one_in(2)) {
    new_value(&in[CONV_BIAS], FLOAT, 1, &C);
    fill_floats(&in[CONV_BIAS], 1);
  }
  const float extremes[] = {NAN, INFINITY, -INFINITY, FLT_MAX, 1e-42f};
  for (int i = CONV_X; i <= CONV_STATE; i += CONV_STATE)
    for (int64_t j = 0, count = one_in(6) ? elements_of(&in[i]) : 0; j < count; j++)
      if (one_in(9)) ((float*)in[i].data)[j] = extremes[random_int(0, 4)];
  copy_value(&in[CONV_STATE], &node.state);
  for (int i = 0; i < CONV_INPUTS; i++) node.changed[i] = i == CONV_BIAS ? LAST_AXIS | TYPE | ALIGNMENT : ALL;
  node.changed[CONV_X] = TYPE | PRESENCE | ALIGNMENT; /* it may have more columns */
  add_int(&node.info, "first", node.firsts[0]), add_int(&node.info, "gated", node.gated);
  add_int(&node.info, "silu", node.silu);
  node.context.input_count = CONV_INPUTS;
  node.context.written = 1 << CONV_STATE;
  return node;
}

/* The value `back` tokens before token `s` of a sequence: of its own tokens, or of the state before the run. */
static float conv_input(const Node* node, int64_t b, int64_t s, int64_t back, int64_t channel) {
  const Value* in = node->context.inputs;
  const int64_t C = in[CONV_WEIGHT].dims[1], kept = in[CONV_WEIGHT].dims[0] - 1;
  if (s >= back) {
    const Value* x = &in[CONV_X];
    const float* token = (float*)x->data + (int_of(node, CONV_OFFSETS, b) + s - back) * x->dims[x->rank - 1];
    return node->gated ? token[channel] * token[2 * C + channel] : token[node->firsts[0] + channel];
  }
  if (!int_of(node, CONV_STARTS, b)) return 0;
  return ((float*)node->state.data)[(int_of(node, CONV_SLOTS, b) * kept + kept + s - back) * C + channel];
}

/* Outputs to the bit, since the order of the sum is part of the operator; states of sequences with tokens are their last
   inputs, and all others are as they were. */
static void check_conv(const Node* node) {
  const Value* in = node->context.inputs;
  const int64_t C = in[CONV_WEIGHT].dims[1], taps = in[CONV_WEIGHT].dims[0], rows = in[CONV_STATE].dims[0];
  const float *weight = in[CONV_WEIGHT].data, *bias = in[CONV_BIAS].data, *y = node->context.outputs[0].data;
  const float *state = in[CONV_STATE].data, *before = node->state.data;
  int64_t sequence_of[8];
  for (int64_t row = 0; row < rows; row++) sequence_of[row] = -1;
  for (int64_t b = 0; b < node->B; b++) {
    const int64_t first = int_of(node, CONV_OFFSETS, b), count = int_of(node, CONV_OFFSETS, b + 1) - first;
    if (count) sequence_of[int_of(node, CONV_SLOTS, b)] = b;
    for (int64_t s = 0; s < count; s++)
      for (int64_t i = 0; i < C; i++) {
        float sum = in[CONV_BIAS].present ? bias[i] : 0;
        for (int64_t k = 0; k < taps; k++) sum = fmaf(weight[k * C + i], conv_input(node, b, s, taps - 1 - k, i), sum);
        const float found = y[(first + s) * C + i];
        const double exact = sum / (1 + exp(-(double)sum));
        if (node->silu) { /* it is no sum, and exp has a clamp */
          if (!(fabsf(sum) < 80) || fabs(found) < 1e-30) continue;
          if (!node->gated && fabs(found - exact) <= 2e-6 * fabs(exact)) continue;
        }
        if (node->gated) {
          const float after = ((float*)in[CONV_X].data)[(first + s) * 3 * C + C + i];
          if (node->silu &&
              (!(fabsf(after) < 1e9f) || fabs(found - exact * after) <= 2e-6 * fabs(exact * after) + 1e-30))
            continue;
          sum *= after;
        }
        if (!same_float(found, sum))
          fail("CausalConv: C %d taps %d: token %d of sequence %d, channel %d: %.9g, expected %.9g", (int)C, (int)taps,
               (int)s, (int)b, (int)i, found, sum);
      }
  }
  for (int64_t row = 0; row < rows; row++)
    for (int64_t k = 0; k + 1 < taps; k++)
      for (int64_t i = 0; i < C; i++) {
        const int64_t at = (row * (taps - 1) + k) * C + i, b = sequence_of[row];
        if (b < 0 && memcmp(&state[at], &before[at], sizeof *state))
          fail("CausalConv: row %d of the state changed", (int)row);
        const int64_t last = b < 0 ? 0 : int_of(node, CONV_OFFSETS, b + 1) - int_of(node, CONV_OFFSETS, b) - 1;
        if (b >= 0 && !same_float(state[at], conv_input(node, b, last, taps - 2 - k, i)))
          fail("CausalConv: the state of sequence %d is not that of its last tokens", (int)b);
      }
}

/* --- linears in float ------------------------------------------------------------------------------------------- */

static Node new_float_linear(void) {
  Node node = {.what = "FloatLinear", .op = find_op("FloatLinear")};
  Value* in = node.context.inputs;
  const int64_t K = random_int(1, 70), N = random_int(1, 50);
  node.M = random_int(0, 11), node.T = K, node.D = N;
  new_value(&in[0], FLOAT, 3, (int64_t[]){1, node.M, K});
  new_value(&in[1], FLOAT, 3, (int64_t[]){(N + 15) / 16, K, 16});
  if (one_in(2)) new_value(&in[2], FLOAT, 1, &N);
  for (int i = 0; i < 3; i++) {
    if (in[i].present) fill_floats(&in[i], 1);
    node.changed[i] = i < 2 ? ALL : LAST_AXIS | TYPE | ALIGNMENT;
  }
  if (node.M && one_in(6)) ((float*)in[0].data)[random_int(0, node.M * K - 1)] = NAN;
  node.context.input_count = 3;
  add_int(&node.info, "N", N);
  return node;
}

static void check_float_linear(const Node* node) {
  const Value* in = node->context.inputs;
  const int64_t K = node->T, N = node->D;
  for (int64_t row = 0; row < node->M; row++)
    for (int64_t n = 0; n < N; n++) {
      double sum = in[2].present ? ((float*)in[2].data)[n] : 0, size = fabs(sum);
      for (int64_t k = 0; k < K; k++) {
        const double weight = ((float*)in[1].data)[(n / 16 * K + k) * 16 + n % 16];
        const double product = weight * ((float*)in[0].data)[row * K + k];
        sum += product, size += fabs(product);
      }
      const float found = ((float*)node->context.outputs[0].data)[row * N + n];
      if (isnan(sum) ? !isnan(found) : !(fabs(found - sum) <= size * (double)(K + 2) * ROUNDING))
        fail("FloatLinear: output %d of row %d: %g, expected %g", (int)n, (int)row, found, sum);
    }
}

/* --- routers ----------------------------------------------------------------------------------------------------- */

enum { OVER_ALL, OVER_CHOSEN, SIGMOIDS }; /* what scores are, as ChooseExperts has them */

/* T experts, of which `columns` are chosen; `run` of `groups` are kept, by their `period` best; `squash`: the scores.
   Sums of weights are at least `limit`, and `epsilon` more; the factor is `scale`. */
static Node new_choice(void) {
  Node node = {.what = "ChooseExperts", .op = find_op("ChooseExperts")};
  Value* in = node.context.inputs;
  node.groups = one_in(2) ? 1 : random_int(1, 5), node.run = random_int(1, node.groups);
  const int64_t size = random_int(1, 40 / node.groups);
  node.T = size * node.groups, node.M = random_int(0, one_in(20) ? 200 : 9), node.period = random_int(1, size);
  node.columns = random_int(1, size * node.run);
  node.packed = one_in(2) /* normalized */, node.squash = (int)random_int(OVER_ALL, SIGMOIDS);
  node.epsilon = one_in(2) ? 0.125f : 0, node.limit = one_in(2) ? 0.75f : 0, node.scale = one_in(2) ? 2.5f : 1;
  const int64_t rank = random_int(2, 3);
  new_value(&in[0], FLOAT, rank, (int64_t[]){1, node.M, node.T} + 3 - rank);
  fill_floats(&in[0], 3);
  if (one_in(2)) {
    new_value(&in[1], FLOAT, 1, &node.T);
    fill_floats(&in[1], 0.2f);
  }
  node.changed[0] = TYPE | PRESENCE | ALIGNMENT, node.changed[1] = LAST_AXIS | TYPE | ALIGNMENT;
  if (node.M && one_in(6))
    for (int64_t i = 0; i < node.T; i++) ((float*)in[0].data)[i] = NAN;
  node.context.input_count = 2;
  add_int(&node.info, "groups", node.groups), add_int(&node.info, "kept", node.run);
  add_int(&node.info, "best", node.period), add_int(&node.info, "scores", node.squash);
  add_int(&node.info, "chosen", node.columns), add_int(&node.info, "normalized", node.packed);
  add_float(&node.info, "added", node.epsilon), add_float(&node.info, "least", node.limit);
  add_float(&node.info, "factor", node.scale);
  return node;
}

static double share_of(const Node* node, const float* x, int64_t e) {
  double all = 0;
  for (int64_t i = 0; i < node->T; i++) all += exp((double)x[i]);
  return node->squash == OVER_CHOSEN ? x[e] : node->squash == SIGMOIDS ? 1 / (1 + exp(-(double)x[e])) : exp(x[e]) / all;
}

/* The sum of the best scores of a group. */
static double sum_of_group(const Node* node, const double* by, int64_t group) {
  const int64_t size = node->T / node->groups;
  double sum = 0;
  int taken[40] = {0};
  for (int64_t i = 0; i < node->period; i++) {
    int64_t best = -1;
    for (int64_t e = 0; e < size; e++)
      if (!taken[e] && (best < 0 || by[group * size + e] > by[group * size + best])) best = e;
    taken[best] = 1, sum += by[group * size + best];
  }
  return sum;
}

static void check_choice(const Node* node) {
  const int64_t E = node->T, k = node->columns, size = E / node->groups;
  const Value* in = node->context.inputs;
  for (int64_t row = 0; row < node->M; row++) {
    const float* x = (float*)in[0].data + row * E;
    const int64_t* index = (int64_t*)node->context.outputs[0].data + row * k;
    const float* weight = (float*)node->context.outputs[1].data + row * k;
    double scores[40], by[40], sums[5], largest = 0, total = node->epsilon, of_chosen = 0;
    for (int64_t e = 0; e < E; e++) {
      scores[e] = share_of(node, x, e), by[e] = scores[e] + (in[1].present ? ((float*)in[1].data)[e] : 0);
      largest = fmax(largest, fmax(fabs(scores[e]), fabs(by[e])));
    }
    for (int64_t g = 0; g < node->groups; g++) sums[g] = sum_of_group(node, by, g);
    const double near = 4e-6 * largest, near_group = near * (double)node->period;
    for (int64_t c = 0; c < k; c++) {
      if (index[c] < 0 || index[c] >= E) fail("ChooseExperts: expert %d of %d", (int)index[c], (int)E);
      of_chosen += exp((double)x[index[c]]);
      for (int64_t i = 0; i < c; i++)
        if (index[i] == index[c]) fail("ChooseExperts: an expert twice");
    }
    for (int64_t c = 0; c < k; c++)
      total += node->squash == OVER_CHOSEN ? exp((double)x[index[c]]) / of_chosen : scores[index[c]];
    if (total < node->limit) total = node->limit;
    for (int64_t c = 0; c < k; c++) {
      const double score = node->squash == OVER_CHOSEN ? exp((double)x[index[c]]) / of_chosen : scores[index[c]];
      const double wanted = (node->packed ? score / total : score) * node->scale;
      if (isnan(wanted) ? !isnan(weight[c]) : !(fabs(weight[c] - wanted) <= 4e-6 * wanted))
        fail("ChooseExperts: weight %d of row %d: %g, expected %g", (int)c, (int)row, weight[c], wanted);
      int larger = 0, better = 0;
      for (int64_t g = 0; g < node->groups; g++) better += sums[g] > sums[index[c] / size] + near_group;
      if (better >= node->run) fail("ChooseExperts: %d groups are before that of choice %d", better, (int)c);
      for (int64_t e = 0; e < E; e++) {
        int rivals = 0; /* of its group, for a place among those that are kept */
        for (int64_t g = 0; g < node->groups; g++) rivals += g != e / size && sums[g] > sums[e / size] - near_group;
        larger += rivals < node->run && by[e] > by[index[c]] + near;
      }
      if (larger > c) fail("ChooseExperts: %d experts are before choice %d", larger, (int)c);
    }
  }
}

/* --- recurrences ------------------------------------------------------------------------------------------------- */

enum { R_VALUE, R_QUERY, R_KEY, R_DECAY, R_BETA }; /* of a token; the state, sequences and numbers of heads follow */

static int is_recurrence(const Node* node) {
  return !strcmp(node->what, "GatedDelta") || !strcmp(node->what, "SelectiveScan");
}
static int per_token_of(const Node* node) {
  return !strcmp(node->what, "GatedDelta") ? R_BETA + 1 : R_BETA;
}
static int64_t columns_of(const Node* node, int which) {
  const int64_t* dims = node->context.inputs[per_token_of(node)].dims; /* [rows, H, K, V] */
  if (which == R_DECAY && node->by_channel) return dims[1] * dims[2];
  return which == R_VALUE ? dims[1] * dims[3] : which < R_DECAY ? node->groups * dims[2] : dims[1];
}

static double bfloat16(double x) { /* to the nearest, ties to even */
  int power;
  frexp(x, &power);
  const double step = ldexp(1, (power < -125 ? -125 : power) - 8);
  return nearbyint(x / step) * step;
}
/* The same values in bfloat16, in a block of their size. */
static void in_bfloat16(Value* value) {
  const int64_t elements = elements_of(value);
  Value floats = *value;
  new_value(value, BFLOAT16, floats.rank, floats.dims);
  for (int64_t i = 0; i < elements; i++) {
    const float rounded = (float)bfloat16(((float*)floats.data)[i]);
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    ((uint16_t*)value->data)[i] = (uint16_t)(bits >> 16);
  }
  release_value(&floats);
}
static double state_of(const Value* state, int64_t at) {
  if (state->type == FLOAT) return ((float*)state->data)[at];
  const uint32_t bits = (uint32_t)((uint16_t*)state->data)[at] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static Node new_recurrence(void) {
  Node node = {.what = one_in(2) ? "GatedDelta" : "SelectiveScan", .B = one_in(10) ? 0 : random_int(1, 4)};
  node.op = find_op(node.what);
  Value* in = node.context.inputs;
  const int per_token = per_token_of(&node), extras = per_token == R_BETA ? 3 : 2;
  const int64_t K = random_int(1, 20), V = one_in(4) ? 64 : random_int(1, 80), rows = node.B + random_int(0, 3);
  node.groups = random_int(1, 2);
  const int64_t H = node.groups * random_int(1, 2), tokens = new_sequences(&node, per_token + 1, rows);
  new_value(&in[per_token], FLOAT, 4, (int64_t[]){rows, H, K, V});
  fill_floats(&in[per_token], 1);
  if (one_in(3)) in_bfloat16(&in[per_token]);
  node.rated = one_in(2), node.squash = one_in(2), node.by_channel = extras == 2 && one_in(2);
  node.most_beta = one_in(2) ? 2 : 1;
  node.least_decay = node.rated && extras == 2 && one_in(3) ? -2 : 0;
  node.least_step = node.rated && one_in(2) ? 0.3f : 0, node.most_step = node.least_step > 0 ? 1.5f : FLT_MAX;
  add_int(&node.info, "groups", node.groups);
  static const char* const FIRSTS[] = {"value_first", "query_first", "key_first", "decay_first", "beta_first"};
  for (int i = 0; i < per_token; i++) {
    const size_t rank = (size_t)random_int(2, 4);
    node.firsts[i] = one_in(2) ? random_int(1, 20) : 0;
    const int64_t W = node.firsts[i] + columns_of(&node, i) + (one_in(2) ? random_int(0, 9) : 0);
    const int64_t dims[] = {1, 1, tokens, W};
    new_value(&in[i], FLOAT, rank, dims + 4 - rank);
    fill_floats(&in[i], 1);
    float* data = in[i].data;
    for (int64_t j = 0; j < tokens * W; j++) {
      if (i == R_DECAY && !node.rated) data[j] = -fabsf(data[j]);
      if (i == R_BETA && !node.squash) data[j] = fabsf(data[j]) / 4;
    }
    add_int(&node.info, FIRSTS[i], node.firsts[i]);
  }
  for (int i = 0; i < extras; i++) { /* rate, bias, skip */
    if (i == 0 ? !node.rated : one_in(3)) continue;
    Value* numbers = &in[per_token + 4 + i];
    const int64_t elements = i == 1 && node.by_channel ? H * K : H;
    new_value(numbers, FLOAT, 1, &elements);
    fill_floats(numbers, 1);
    for (int64_t h = 0; h < H && i == 0; h++) ((float*)numbers->data)[h] = -fabsf(((float*)numbers->data)[h]);
    node.changed[per_token + 4 + i] = LAST_AXIS | TYPE | ALIGNMENT;
  }
  add_int(&node.info, "squash", node.squash), add_int(&node.info, "by_channel", node.by_channel);
  add_float(&node.info, "least_decay", node.least_decay);
  if (node.most_beta > 1) add_float(&node.info, "most_beta", node.most_beta);
  add_float(&node.info, "least_step", node.least_step), add_float(&node.info, "most_step", node.most_step);
  copy_value(&in[per_token], &node.state);
  for (int i = 0; i < per_token + 4; i++)
    node.changed[i] = TYPE | PRESENCE | ALIGNMENT | (i > per_token ? LAST_AXIS : 0);
  node.context.input_count = per_token + 4 + extras;
  node.context.written = 1 << per_token;
  return node;
}

static const float* columns_at(const Node* node, int which, int64_t token) {
  const Value* x = &node->context.inputs[which];
  return (float*)x->data + token * x->dims[x->rank - 1] + node->firsts[which];
}

/* One head of one sequence: outputs and the last state, with limits that grow as the rounding of each token may. A state
   in bfloat16 is the nearest to what the last token leaves, and tokens before it may have fallen on either side. */
static void check_head(const Node* node, int64_t b, int64_t h) {
  const int per_token = per_token_of(node), delta = per_token > R_BETA, by_channel = node->by_channel;
  const Value *in = node->context.inputs, *state = &in[per_token];
  const int64_t H = state->dims[1], K = state->dims[2], V = state->dims[3], row = int_of(node, per_token + 3, b);
  const int64_t begin = int_of(node, per_token + 1, b), end = int_of(node, per_token + 1, b + 1);
  const float *rate = in[per_token + 4].data, *bias = in[per_token + 5].data,
              *skip = delta ? NULL : in[per_token + 6].data;
  const float* y = node->context.outputs[0].data;
  const int half = state->type == BFLOAT16;
  double S[20], size[20];
  for (int64_t v = 0; v < V; v++) {
    for (int64_t k = 0; k < K; k++) {
      const double before = state_of(&node->state, ((row * H + h) * K + k) * V + v);
      S[k] = int_of(node, per_token + 2, b) ? before : 0, size[k] = fabs(S[k]);
    }
    for (int64_t token = begin; token < end; token++) {
      for (int64_t k = 0; k < K && half && token > begin; k++) S[k] = bfloat16(S[k]);
      const double limit = 1e-5 + half * (double)(token - begin) / 128;
      const float* query = columns_at(node, R_QUERY, token) + h * node->groups / H * K;
      const float* key = columns_at(node, R_KEY, token) + h * node->groups / H * K;
      const double value = columns_at(node, R_VALUE, token)[h * V + v];
      double change = value, magnitude, answer = 0, answers = 0, queries = 1e-6;
      double keys = 1e-6, step = 1, read = 0, reads = 0;
      for (int64_t k = 0; k < K; k++) queries += (double)query[k] * query[k], keys += (double)key[k] * key[k];
      const double by_query = delta ? 1 / sqrt(queries * (double)K) : 1, by_key = delta ? 1 / sqrt(keys) : 1;
      for (int64_t k = 0; k < K; k++) {
        const int64_t at = by_channel ? h * K + k : h;
        double decay = columns_at(node, R_DECAY, token)[at];
        if (node->rated) {
          decay += bias ? bias[at] : 0;
          step = fmin(fmax(log1p(exp(decay)), node->least_step), node->most_step);
          decay = node->least_decay < 0 ? node->least_decay / (1 + exp(-rate[h] * decay)) : step * rate[h];
        }
        S[k] *= exp(decay), size[k] *= exp(decay);
        answer += S[k] * key[k] * by_key, answers += size[k] * fabs(key[k] * by_key);
      }
      magnitude = fabs(value * step), change *= step;
      if (delta) {
        double beta = columns_at(node, R_BETA, token)[h];
        if (node->squash) beta = node->most_beta / (1 + exp(-beta));
        change = beta * (value - answer), magnitude = beta * (fabs(value) + answers);
      }
      for (int64_t k = 0; k < K; k++) {
        S[k] += key[k] * by_key * change, size[k] += fabs(key[k] * by_key) * magnitude;
        read += query[k] * by_query * S[k], reads += fabs(query[k] * by_query) * size[k];
      }
      if (skip) read += skip[h] * value, reads += fabs(skip[h] * value);
      const double found = y[(token * H + h) * V + v];
      if (!(fabs(found - read) <= limit * reads + 1e-30))
        fail("%s: H %d K %d V %d: token %d of sequence %d, head %d, channel %d: %.9g, expected %.9g", node->what,
             (int)H, (int)K, (int)V, (int)(token - begin), (int)b, (int)h, (int)v, found, read);
    }
    for (int64_t k = 0; k < K; k++) {
      const double found = state_of(state, ((row * H + h) * K + k) * V + v);
      const double limit = 1e-5 + half * (double)(end - begin - 1) / 128;
      if (!(fabs(found - S[k]) <= limit * size[k] + half * fabs(S[k]) / 256 + 1e-30))
        fail("%s: the state of sequence %d is %.9g, expected %.9g", node->what, (int)b, found, S[k]);
    }
  }
}

static void check_recurrence(const Node* node) {
  const int per_token = per_token_of(node);
  const Value* state = &node->context.inputs[per_token];
  const int64_t rows = state->dims[0], elements = rows ? elements_of(state) / rows : 0;
  for (int64_t row = 0; row < rows; row++) {
    int touched = 0;
    for (int64_t b = 0; b < node->B; b++)
      touched |=
          int_of(node, per_token + 3, b) == row && int_of(node, per_token + 1, b) < int_of(node, per_token + 1, b + 1);
    const int64_t bytes = elements * (int64_t)size_of(state->type);
    if (!touched && memcmp((char*)state->data + row * bytes, (char*)node->state.data + row * bytes, bytes))
      fail("%s: row %d of the state changed", node->what, (int)row);
  }
  for (int64_t b = 0; b < node->B; b++)
    for (int64_t h = 0; h < state->dims[1] && int_of(node, per_token + 1, b) < int_of(node, per_token + 1, b + 1); h++)
      check_head(node, b, h);
}

/* --- gates and factors ------------------------------------------------------------------------------------------- */

static Node new_gated_norm(void) {
  Node node = {.what = one_in(3) ? "Scale" : "GatedNorm", .epsilon = 0.01f, .M = one_in(10) ? 0 : random_int(1, 9)};
  node.op = find_op(node.what);
  Value* in = node.context.inputs;
  const int scale = !strcmp(node.what, "Scale"), normed = !one_in(3), one = one_in(5);
  const int64_t group = random_int(1, 40), groups = random_int(1, 4), runs = one_in(2) && !one ? groups : 1,
                C = group * groups;
  node.channels = C, node.groups = normed ? group : 0, node.run = C / runs, node.period = node.run + random_int(0, 9);
  node.firsts[0] = scale || one_in(2) ? 0 : random_int(1, 20), node.firsts[1] = one_in(2) ? 0 : random_int(1, 20);
  node.sigmoid = one_in(3), node.norm_first = one_in(2);
  const int64_t X = scale ? C : node.firsts[0] + C + random_int(0, 5);
  const int64_t W = node.firsts[1] + (one ? 1 : (runs - 1) * node.period + node.run) + random_int(0, 5);
  new_value(&in[0], FLOAT, 3, (int64_t[]){1, node.M, X});
  fill_floats(&in[0], powf(10, (float)random_int(-2, 2)));
  node.changed[0] = TYPE | PRESENCE | ALIGNMENT;
  Value* weight = &in[scale ? 1 : 2];
  if (scale || one_in(2)) {
    const int64_t elements = scale ? (one_in(2) ? C : 1) : one_in(2) ? C : normed ? group : C;
    new_value(weight, FLOAT, 1, &elements);
    fill_floats(weight, 1);
    node.changed[scale ? 1 : 2] = TYPE | ALIGNMENT | (scale ? PRESENCE : 0);
  }
  node.context.input_count = 3;
  if (scale && one_in(2)) {
    new_value(&in[2], FLOAT, 3, (int64_t[]){1, node.M, C});
    fill_floats(&in[2], 1);
    node.changed[2] = LAST_AXIS | TYPE | ALIGNMENT;
  }
  if (scale) return node;
  node.one = one;
  new_value(&in[1], FLOAT, 3, (int64_t[]){1, node.M, W});
  fill_floats(&in[1], powf(10, (float)random_int(-2, 1)));
  node.changed[1] = TYPE | PRESENCE | ALIGNMENT;
  add_int(&node.info, "channels", C), add_int(&node.info, "x_first", node.firsts[0]);
  add_int(&node.info, "first", node.firsts[1]), add_int(&node.info, "run", node.run);
  add_int(&node.info, "period", node.period), add_int(&node.info, "group", node.groups);
  add_int(&node.info, "sigmoid", node.sigmoid), add_int(&node.info, "norm_first", node.norm_first);
  add_float(&node.info, "epsilon", node.epsilon);
  if (one) add_int(&node.info, "one", 1);
  return node;
}

static void check_scale(const Node* node) {
  const Value *x = &node->context.inputs[0], *factors = &node->context.inputs[1], *added = &node->context.inputs[2];
  const int64_t C = x->dims[2], several = elements_of(factors) > 1;
  for (int64_t i = 0; i < elements_of(x); i++) {
    volatile float expected = ((float*)x->data)[i] * ((float*)factors->data)[several ? i % C : 0];
    if (added->present) expected += ((float*)added->data)[i];
    const float found = ((float*)node->context.outputs[0].data)[i];
    if (!same_float(found, expected)) fail("Scale: element %d: %g, expected %g", (int)i, found, expected);
  }
}

static void check_gated_norm(const Node* node) {
  const Value *in = node->context.inputs, *weight = &in[2];
  const int64_t C = node->channels, group = node->groups ? node->groups : C;
  for (int64_t token = 0; token < node->M; token++)
    for (int64_t begin = 0; begin < C; begin += group) {
      double squares = 0, products[160];
      for (int64_t i = 0; i < group; i++) {
        const int64_t at = begin + i;
        const double x = ((float*)in[0].data)[token * in[0].dims[2] + node->firsts[0] + at];
        const int64_t column = node->one ? 0 : at / node->run * node->period + at % node->run;
        const double gate = ((float*)in[1].data)[token * in[1].dims[2] + node->firsts[1] + column];
        products[i] = x * (node->sigmoid ? 1 : gate) / (1 + exp(-gate));
        squares += node->norm_first ? x * x : products[i] * products[i];
      }
      for (int64_t i = 0; i < group; i++) {
        double expected = products[i];
        if (node->groups) {
          expected /= sqrt(squares / (double)group + node->epsilon);
          if (weight->present) expected *= ((float*)weight->data)[elements_of(weight) == C ? begin + i : i];
        }
        const float found = ((float*)node->context.outputs[0].data)[token * C + begin + i];
        if (!(fabs(found - expected) <= 2 * MADE * fabs(expected) + 1e-30))
          fail("GatedNorm: channel %d of token %d: %g, expected %g", (int)(begin + i), (int)token, found, expected);
      }
    }
}

/* --- experts ---------------------------------------------------------------------------------------------------- */

enum { X, INDEX, SHARE, UP, DOWN, UP_BIAS, DOWN_BIAS, EXPERT_INPUTS };

static Node new_experts(void) {
  Node node = {.what = "Experts", .op = find_op("Experts")};
  Value* in = node.context.inputs;
  const int64_t H = random_int(1, 50), I = random_int(1, 80), E = random_int(1, 5), tokens = random_int(0, 9);
  const int64_t chosen = random_int(1, E), inner = (I + 15) / 16, up = inner * (1 + !one_in(3)), down = (H + 15) / 16;
  new_value(&in[X], FLOAT, 3, (int64_t[]){1, tokens, H});
  new_value(&in[INDEX], INT64, 2, (int64_t[]){tokens, chosen});
  new_value(&in[SHARE], FLOAT, 2, (int64_t[]){tokens, chosen});
  new_value(&in[UP], FLOAT, 4, (int64_t[]){E, up, H, 16});
  new_value(&in[DOWN], FLOAT, 4, (int64_t[]){E, down, I, 16});
  if (one_in(2)) new_value(&in[UP_BIAS], FLOAT, 3, (int64_t[]){E, up, 16});
  if (one_in(2)) new_value(&in[DOWN_BIAS], FLOAT, 3, (int64_t[]){E, down, 16});
  for (int i = 0; i < EXPERT_INPUTS; i++) {
    if (i != INDEX && in[i].present) fill_floats(&in[i], 1);
    node.changed[i] = i < UP_BIAS ? ALL : LAST_AXIS | TYPE | ALIGNMENT;
  }
  for (int64_t i = 0; i < tokens * chosen; i++) ((int64_t*)in[INDEX].data)[i] = random_int(0, one_in(2) ? 0 : E - 1);
  if (tokens && one_in(6)) ((float*)in[X].data)[random_int(0, tokens * H - 1)] = NAN;
  node.context.input_count = EXPERT_INPUTS;
  node.kind = (int)random_int(0, 2), node.alpha = one_in(2) ? 1 : 1.702f, node.limit = one_in(2) ? 0 : 0.8f;
  node.offset = one_in(2) ? 0 : 1;
  add_int(&node.info, "activation", node.kind), add_float(&node.info, "alpha", node.alpha);
  add_float(&node.info, "limit", node.limit), add_float(&node.info, "offset", node.offset);
  return node;
}

/* A dot product with one output of a tiled weight, and the sum of what was added up. */
static double tiled_dot(const Value* weight, const Value* bias, int64_t expert, int64_t output, const double* x,
                        double* sizes) {
  const int64_t tile = expert * weight->dims[1] + output / 16, K = weight->dims[2], lane = output % 16;
  double sum = bias->present ? ((float*)bias->data)[tile * 16 + lane] : 0;
  *sizes = fabs(sum);
  for (int64_t k = 0; k < K; k++) {
    const double product = ((float*)weight->data)[(tile * K + k) * 16 + lane] * x[k];
    sum += product, *sizes += fabs(product);
  }
  return sum;
}

static double activated(const Node* node, double x) {
  if (node->limit && x > node->limit) x = node->limit;
  if (node->kind == 2) return x < 0 ? 0 : x * x;
  const double sharpened = node->kind ? 1.5957691216057308 * (x + 0.044715 * x * x * x) : node->alpha * x;
  return x / (1 + exp(-sharpened));
}

static void check_experts(const Node* node) {
  const Value* in = node->context.inputs;
  const int64_t tokens = in[X].dims[1], H = in[X].dims[2], chosen = in[INDEX].dims[1], I = in[DOWN].dims[2];
  const int64_t inner = (I + 15) / 16 * 16;
  for (int64_t token = 0; token < tokens; token++) {
    double x[50], between[80], y[50] = {0}, limit[50] = {0};
    for (int64_t h = 0; h < H; h++) x[h] = ((float*)in[X].data)[token * H + h];
    for (int64_t choice = 0; choice < chosen; choice++) {
      const int64_t expert = ((int64_t*)in[INDEX].data)[token * chosen + choice];
      const double share = ((float*)in[SHARE].data)[token * chosen + choice];
      double most = 0, sizes, more = 1;
      for (int64_t i = 0; i < I; i++) {
        between[i] = activated(node, tiled_dot(&in[UP], &in[UP_BIAS], expert, i, x, &sizes));
        if (in[UP].dims[1] * 16 > inner) {
          double up = tiled_dot(&in[UP], &in[UP_BIAS], expert, inner + i, x, &more);
          if (node->limit) up = up > node->limit ? node->limit : up < -node->limit ? -node->limit : up;
          between[i] *= up + node->offset, more += 1;
        }
        most = fmax(most, (1 + sizes) * (1 + sizes) * more);
      }
      for (int64_t h = 0; h < H; h++) {
        y[h] += share * tiled_dot(&in[DOWN], &in[DOWN_BIAS], expert, h, between, &sizes);
        limit[h] += fabs(share) * (sizes + most * 0.01 * (double)I) * 1e-5;
      }
    }
    for (int64_t h = 0; h < H; h++) {
      const float found = ((float*)node->context.outputs[0].data)[token * H + h];
      if (isnan(y[h]) ? !isnan(found) : !(fabs(found - y[h]) <= limit[h]))
        fail("Experts: channel %d of token %d: %g, expected %g", (int)h, (int)token, found, y[h]);
    }
  }
}

/* --- experts over codes ------------------------------------------------------------------------------------------ */

enum {
  UP_CODES = SHARE + 1,
  UP_SCALES,
  UP_ZEROS,
  DOWN_CODES,
  DOWN_SCALES,
  DOWN_ZEROS,
  CODED_UP_BIAS,
  CODED_DOWN_BIAS,
  CODED_UP_BEGINS,
  CODED_DOWN_BEGINS,
  CODED_INPUTS
};

static void add_expert_weights(Info* info, const Weights* w, const char* const* names) {
  add_int(info, names[0], w->block), add_int(info, names[1], w->bits);
  add_int(info, names[2], w->half), add_int(info, names[3], w->symmetric), add_int(info, names[4], w->e2m1);
}

static Node new_block_experts(void) {
  static const char* const UP_NAMES[] = {"up_block_size", "up_bits", "up_half_scales", "up_symmetric", "up_e2m1"};
  static const char* const DOWN_NAMES[] = {"down_block_size", "down_bits", "down_half_scales", "down_symmetric",
                                           "down_e2m1"};
  Node node = {.what = "BlockExperts", .op = find_op("BlockExperts")};
  Value* in = node.context.inputs;
  const int64_t block = PICK(16, 32, 48, 64), down_block = PICK(16, 32, 48, 64);
  const int64_t H = block * random_int(1, 3), I = down_block * random_int(1, 3), E = random_int(1, MOST_EXPERTS);
  const int64_t tokens = one_in(5) ? random_int(14, 30) : random_int(0, 9), chosen = random_int(1, E);
  node.packed = !one_in(3); /* has gates */
  const int64_t up = (I * (1 + node.packed) + 31) / 32 * 32, down = (H + 31) / 32 * 32;
  node.B = E, node.M = tokens, node.D = I, node.T = up, node.columns = chosen;
  new_value(&in[X], FLOAT, 3, (int64_t[]){1, tokens, H});
  new_value(&in[INDEX], INT64, 2, (int64_t[]){tokens, chosen});
  new_value(&in[SHARE], FLOAT, 2, (int64_t[]){tokens, chosen});
  /* Experts lie one after another, each in whole pairs of tiles: as one weight. */
  node.weights =
      new_weights(E * up, E, H, block, 0, &in[UP_CODES], &in[UP_SCALES], &in[UP_ZEROS], &in[CODED_UP_BEGINS]);
  node.down = new_weights(E * down, E, I, down_block, 0, &in[DOWN_CODES], &in[DOWN_SCALES], &in[DOWN_ZEROS],
                          &in[CODED_DOWN_BEGINS]);
  if (one_in(2)) new_value(&in[CODED_UP_BIAS], FLOAT, 2, (int64_t[]){E, up});
  if (one_in(2)) new_value(&in[CODED_DOWN_BIAS], FLOAT, 2, (int64_t[]){E, down});
  for (int i = 0; i < CODED_INPUTS; i++) {
    const int begins = i == CODED_UP_BEGINS || i == CODED_DOWN_BEGINS;
    const int floats = i == X || i == SHARE || (i >= CODED_UP_BIAS && !begins);
    if (floats && in[i].present) fill_floats(&in[i], 1);
    node.changed[i] = i == UP_CODES || i == DOWN_CODES ? LAST_AXIS | TYPE | PRESENCE
                      : i == UP_ZEROS                  ? (node.weights.symmetric ? 0 : LAST_AXIS | TYPE | PRESENCE)
                      : i == DOWN_ZEROS                ? (node.down.symmetric ? 0 : LAST_AXIS | TYPE | PRESENCE)
                      : begins                         ? LAST_AXIS | TYPE | ALIGNMENT
                      : i >= CODED_UP_BIAS             ? LAST_AXIS | TYPE | ALIGNMENT
                                                       : ALL;
  }
  for (int64_t i = 0; i < tokens * chosen; i++) ((int64_t*)in[INDEX].data)[i] = random_int(0, one_in(2) ? 0 : E - 1);
  if (tokens && one_in(6)) ((float*)in[X].data)[random_int(0, tokens * H - 1)] = one_in(2) ? NAN : INFINITY;
  node.context.input_count = CODED_INPUTS;
  node.kind = (int)random_int(0, 2), node.alpha = one_in(2) ? 1 : 1.702f, node.limit = one_in(2) ? 0 : 0.8f;
  node.offset = one_in(2) ? 0 : 1;
  add_int(&node.info, "H", H), add_int(&node.info, "I", I), add_int(&node.info, "gated", node.packed);
  add_expert_weights(&node.info, &node.weights, UP_NAMES), add_expert_weights(&node.info, &node.down, DOWN_NAMES);
  add_int(&node.info, "activation", node.kind), add_float(&node.info, "alpha", node.alpha);
  add_float(&node.info, "limit", node.limit), add_float(&node.info, "offset", node.offset);
  return node;
}

static double bias_at(const Value* bias, int64_t row) {
  return bias->present ? ((float*)bias->data)[row] : 0;
}

static void check_block_experts(const Node* node) {
  const Value* in = node->context.inputs;
  const int64_t H = node->weights.K, I = node->D, up = node->T, down = (H + 31) / 32 * 32, chosen = node->columns;
  const double slack = 10 * MADE; /* inner channels are made of sums of blocks */
  Token outer = new_token(H), inner = new_token(I);
  for (int64_t token = 0; token < node->M; token++) {
    double y[192] = {0}, limit[192] = {0}, size, flips;
    int finite = 1;
    for (int64_t h = 0; h < H; h++) outer.exact[h] = ((float*)in[X].data)[token * H + h];
    round_exact(&node->weights, 0, &outer);
    for (int64_t choice = token * chosen; choice < (token + 1) * chosen; choice++) {
      const int64_t expert = ((int64_t*)in[INDEX].data)[choice];
      const double share = ((float*)in[SHARE].data)[choice];
      for (int64_t i = 0; i < I; i++) {
        const int64_t row = expert * up + (node->packed ? i / 16 * 32 + i % 16 : i);
        const double x = coded_dot(&node->weights, row, &outer, &size, &flips) + bias_at(&in[CODED_UP_BIAS], row);
        inner.exact[i] = outer.finite ? activated(node, x) : NAN;
        if (node->packed) {
          double wide = coded_dot(&node->weights, row + 16, &outer, &size, &flips);
          wide += bias_at(&in[CODED_UP_BIAS], row + 16);
          if (node->limit) wide = fmin(node->limit, fmax(-node->limit, wide));
          inner.exact[i] *= wide + node->offset;
        }
      }
      round_exact(&node->down, slack, &inner);
      finite &= inner.finite;
      for (int64_t h = 0; h < H; h++) {
        const int64_t row = expert * down + h;
        const double bias = bias_at(&in[CODED_DOWN_BIAS], row);
        const double answer = coded_dot(&node->down, row, &inner, &size, &flips) + bias;
        y[h] += share * answer;
        size += fabs(bias);
        limit[h] += fabs(share) * (size * ((double)(node->down.blocks + 8) * ROUNDING + 2 * slack) + flips + 1e-30);
      }
    }
    for (int64_t h = 0; h < H; h++) {
      const float found = ((float*)node->context.outputs[0].data)[token * H + h];
      if (finite ? !(fabs(found - y[h]) <= limit[h]) : isfinite(found))
        fail("BlockExperts: up %d bits, down %d bits: channel %d of token %d: %g, expected %g", (int)node->weights.bits,
             (int)node->down.bits, (int)h, (int)token, found, y[h]);
    }
  }
  release_token(&outer), release_token(&inner);
}

/* --- attention -------------------------------------------------------------------------------------------------- */

enum {
  QUERY,
  KEY,
  VALUE,
  KEY_CACHE,
  VALUE_CACHE,
  OFFSETS,
  FIRST,
  TABLE,
  COSINES,
  SINES,
  KEY_SCALE,
  VALUE_SCALE,
  QUERY_NORM,
  KEY_NORM,
  SINKS,
  INPUTS
};
enum { NO_ROPE, HALVES, INTERLEAVED };

static int64_t count_of(const Node* node, int64_t b) {
  return int_of(node, OFFSETS, b + 1) - int_of(node, OFFSETS, b);
}
/* The cache entry, in entries of D or E channels, of a KV head at a position of a sequence. */
static int64_t entry_of(const Node* node, int64_t b, int64_t head, int64_t position) {
  const int64_t block = int_of(node, TABLE, b * node->columns + position / node->T);
  return (block * node->kv_heads + head) * node->T + position % node->T;
}

static Node new_attention(void) {
  Node node = {.what = "CachedAttention", .packed = one_in(2)};
  Value* in = node.context.inputs;
  node.bits = PICK(32, 8, 4);
  node.cache = node.bits == 32 ? FLOAT : node.bits == 8 ? INT8 : UINT8;
  const int64_t group = random_int(1, 7);
  const int many = one_in(30);
  node.kv_heads = random_int(1, 3), node.heads = node.kv_heads * (many ? 60 : group);
  node.D = PICK(16, 16, 32, 48, 64, 80);
  node.E = one_in(2) ? node.D : PICK(16, 32, 48, 64, 80);
  node.B = random_int(0, 9) ? random_int(1, 4) : 0;
  const int many_keys = one_in(4); /* more than those of a unit whose next one is prefetched */
  node.columns = one_in(2) ? 1 : random_int(2, many_keys ? 7 : 3),
  node.T = node.columns > 1 ? 64 * (one_in(4) ? 2 : 1) : random_int(1, many_keys ? 450 : 150);
  node.blocks = node.B * node.columns + random_int(0, 2);
  const int64_t most = many_keys ? 440 : 158, positions = node.columns * node.T > most ? most : node.columns * node.T;
  int64_t counts[4] = {0}, tokens = 0;
  for (int64_t b = 0; b < node.B; b++) {
    counts[b] = one_in(2) ? 1 : random_int(0, positions < 30 ? positions : 30);
    tokens += counts[b];
  }
  node.rotary = random_int(NO_ROPE, INTERLEAVED);
  node.window = one_in(3) ? random_int(1, 100) : one_in(10) ? INT64_MAX : 0;
  node.softcap = one_in(4) ? 3.0f : 0;
  node.scale = 1 / sqrtf((float)node.D);
  node.period = node.D + (one_in(3) ? random_int(1, 80) : 0);
  const int64_t width = node.heads * node.period, kv_width = node.kv_heads * (node.D + node.E);
  new_value(&in[QUERY], FLOAT, 3, (int64_t[]){1, tokens, node.packed ? width + kv_width : width});
  fill_floats(&in[QUERY], 1);
  for (int i = KEY; i <= VALUE && !node.packed; i++) {
    new_value(&in[i], FLOAT, 3, (int64_t[]){1, tokens, node.kv_heads * (i == KEY ? node.D : node.E)});
    fill_floats(&in[i], 1);
    node.changed[i] = ALL;
  }
  for (int i = KEY_CACHE; i <= VALUE_CACHE; i++) {
    const int64_t channels = i == KEY_CACHE ? node.D : node.E, columns = node.bits == 4 ? channels / 2 : channels;
    new_value(&in[i], node.cache, 4, (int64_t[]){node.blocks, node.kv_heads, node.T, columns});
    if (node.bits < 32)
      for (int64_t j = 0, count = elements_of(&in[i]); j < count; j++)
        ((int8_t*)in[i].data)[j] = (int8_t)random_int(-128, 127);
    else
      fill_floats(&in[i], 1);
    node.changed[i] = LAST_AXIS | PRESENCE | (node.bits < 32 ? 0 : ALIGNMENT);
    copy_value(&in[i], i == KEY_CACHE ? &node.key_cache : &node.value_cache);
  }
  new_value(&in[OFFSETS], INT32, 1, (int64_t[]){node.B + 1});
  new_value(&in[FIRST], INT32, 1, &node.B);
  new_value(&in[TABLE], INT32, 2, (int64_t[]){node.B, node.columns});
  int32_t *offsets = in[OFFSETS].data, *first = in[FIRST].data, *table = in[TABLE].data;
  offsets[0] = 0;
  for (int64_t i = 0; i < node.B * node.columns; i++) table[i] = (int32_t)i;
  for (int64_t i = node.B * node.columns - 1; i > 0; i--) { /* in any order */
    const int64_t j = random_int(0, i);
    const int32_t swapped = table[i];
    table[i] = table[j], table[j] = swapped;
  }
  for (int64_t b = 0; b < node.B; b++) {
    offsets[b + 1] = offsets[b] + (int32_t)counts[b];
    first[b] = (int32_t)random_int(0, positions - counts[b]);
    const int64_t used = (first[b] + counts[b] + node.T - 1) / node.T; /* what lies behind is not read */
    for (int64_t i = counts[b] ? used : 0; i < node.columns; i++)
      if (one_in(2)) table[b * node.columns + i] = one_in(2) ? -1 : INT32_MAX;
  }
  const int64_t table_rows = positions + random_int(0, 5), half = one_in(3) ? random_int(1, node.D / 2) : node.D / 2;
  for (int i = COSINES; i <= SINES && node.rotary; i++) {
    new_value(&in[i], FLOAT, 2, (int64_t[]){table_rows, half});
    fill_floats(&in[i], 0.7f);
    node.changed[i] = ALL;
  }
  for (int i = KEY_SCALE; i <= VALUE_SCALE && node.bits < 32; i++) {
    new_value(&in[i], FLOAT, 2, (int64_t[]){node.kv_heads, i == KEY_SCALE ? node.D : node.E});
    const float unit = node.bits == 8 ? 1e-3f : 1e-2f;
    for (int64_t j = 0; j < elements_of(&in[i]); j++) ((float*)in[i].data)[j] = (float)random_int(10, 40) * unit;
    node.changed[i] = ALL;
  }
  node.epsilon = 0.01f;
  for (int i = QUERY_NORM, some = one_in(2); i <= KEY_NORM && some; i++) {
    new_value(&in[i], FLOAT, 1, &node.D);
    fill_floats(&in[i], 1);
    node.changed[i] = LAST_AXIS | TYPE | ALIGNMENT;
  }
  if (one_in(3)) {
    new_value(&in[SINKS], FLOAT, 1, &node.heads);
    for (int64_t h = 0; h < node.heads; h++) {
      const float sinks[] = {-INFINITY, -50, -1, 0, 2, 30};
      ((float*)in[SINKS].data)[h] = sinks[random_int(0, 5)];
    }
    node.changed[SINKS] = LAST_AXIS | TYPE | ALIGNMENT;
  }
  if (one_in(8)) { /* values whose results are not compared */
    const float extremes[] = {NAN, INFINITY, -INFINITY, FLT_MAX, 1e-42f};
    node.values = NON_FINITE;
    float* query = in[QUERY].data;
    for (int64_t i = 0; i < elements_of(&in[QUERY]); i++)
      if (one_in(9)) query[i] = extremes[random_int(0, 4)];
  }
  node.changed[QUERY] = ALL, node.changed[OFFSETS] = ALL, node.changed[FIRST] = ALL;
  node.changed[TABLE] = TYPE | PRESENCE | ALIGNMENT;
  node.context.input_count = INPUTS;
  node.context.written = 1 << KEY_CACHE | 1 << VALUE_CACHE;
  node.op = find_op("CachedAttention");
  add_int(&node.info, "num_heads", node.heads), add_int(&node.info, "kv_num_heads", node.kv_heads);
  add_float(&node.info, "scale", node.scale);
  add_int(&node.info, "do_rotary", node.rotary != NO_ROPE);
  add_int(&node.info, "rotary_interleaved", node.rotary == INTERLEAVED);
  add_float(&node.info, "softcap", node.softcap), add_float(&node.info, "epsilon", node.epsilon);
  add_int(&node.info, "local_window_size", node.window);
  if (node.period > node.D) add_int(&node.info, "query_period", node.period);
  return node;
}

static void rotated(const Node* node, const float* from, int norm, int64_t position, double* to) {
  const Value* in = node->context.inputs;
  const int64_t half = node->rotary ? in[COSINES].dims[1] : 0;
  double squares = 0;
  for (int64_t i = 0; i < node->D; i++) squares += (double)from[i] * from[i];
  const double inverse = 1 / sqrt(squares / (double)node->D + node->epsilon);
  for (int64_t i = 0; i < node->D; i++)
    to[i] = in[norm].present ? from[i] * inverse * ((float*)in[norm].data)[i] : from[i];
  for (int64_t i = 0; i < half; i++) {
    const double c = ((float*)in[COSINES].data)[position * half + i], s = ((float*)in[SINES].data)[position * half + i];
    const int64_t first = node->rotary == INTERLEAVED ? 2 * i : i;
    const int64_t other = node->rotary == INTERLEAVED ? 2 * i + 1 : half + i;
    const double a = to[first], b = to[other];
    to[first] = a * c - b * s;
    to[other] = b * c + a * s;
  }
}

/* A float or a code. `at`: where an entry of the cache begins; `i`: a channel of it. */
static double stored(const Node* node, const Value* cache, int64_t at, int64_t i) {
  if (node->bits == 32) return ((float*)cache->data)[at + i];
  if (node->bits == 8) return ((int8_t*)cache->data)[at + i];
  return (((uint8_t*)cache->data)[(at + i) / 2] >> 4 * (i % 2) & 15) - 8;
}
static double cached(const Node* node, const Value* cache, int scale, int64_t head, int64_t at, int64_t i) {
  const double x = stored(node, cache, at, i);
  const int64_t channels = scale == KEY_SCALE ? node->D : node->E;
  return node->bits == 32 ? x : x * ((float*)node->context.inputs[scale].data)[head * channels + i];
}

/* New entries are the rounded keys and values; all others of the pool are as they were. */
static void check_cache(const Node* node) {
  const Value* in = node->context.inputs;
  const int64_t sizes[] = {node->D, node->E}, kv_width = node->kv_heads * (node->D + node->E);
  const int64_t entries = node->blocks * node->kv_heads * node->T;
  char* fresh = calloc(entries ? entries : 1, 1);
  for (int64_t b = 0; b < node->B; b++)
    for (int64_t s = 0; s < count_of(node, b); s++)
      for (int64_t head = 0; head < node->kv_heads; head++)
        for (int side = 0; side < 2; side++) {
          const int64_t position = int_of(node, FIRST, b) + s, at = entry_of(node, b, head, position);
          const int64_t token = int_of(node, OFFSETS, b) + s;
          fresh[at] = 1;
          double expected[80];
          const int64_t width = node->heads * node->period, size = sizes[side];
          const float* from = node->packed
                                  ? (float*)in[QUERY].data + token * (width + kv_width) + width +
                                        side * node->kv_heads * node->D + head * size
                                  : (float*)in[side ? VALUE : KEY].data + (token * node->kv_heads + head) * size;
          for (int64_t i = 0; i < size; i++) expected[i] = from[i];
          if (!side) rotated(node, from, KEY_NORM, position, expected);
          for (int64_t i = 0; i < size; i++) {
            double wanted = expected[i], limit = 1e-5 * (1 + fabs(wanted));
            const double found = stored(node, &in[KEY_CACHE + side], at * size, i);
            if (node->bits < 32) {
              const double codes = ldexp(1, node->bits - 1);
              wanted /= ((float*)in[KEY_SCALE + side].data)[head * size + i];
              wanted = fmin(fmax(wanted, -codes), codes - 1), limit = 0.5 + 1e-3;
            }
            if (!(fabs(found - wanted) <= limit)) fail("CachedAttention: cache entry %g, expected %g", found, wanted);
          }
        }
  for (int64_t at = 0; at < entries; at++)
    for (int side = 0; side < 2 && !fresh[at]; side++) {
      const int64_t bytes = sizes[side] * node->bits / 8;
      if (memcmp((char*)(side ? &node->value_cache : &node->key_cache)->data + at * bytes,
                 (char*)in[KEY_CACHE + side].data + at * bytes, bytes))
        fail("CachedAttention: entry %d of the cache changed", (int)at);
    }
  free(fresh);
}

static void check_attention(Node* node) {
  if (node->values == NON_FINITE) return;
  const Value *in = node->context.inputs, *out = node->context.outputs;
  const int64_t D = node->D, E = node->E, group = node->heads / node->kv_heads;
  const int64_t stride = node->heads * node->period + (node->packed ? node->kv_heads * (D + E) : 0);
  /* With AVX-512 queries and weights have 16 bits where the cache has codes: a score of 80 channels moves by up to 7e-4, and
     the weights of a tile by up to 5e-4 together. */
  const double limit = node->bits < 32 && in_digits ? 1e-3 : 2e-5;
  check_cache(node);
  const int64_t step = node->heads > 30 ? 13 : 1;
  for (int64_t b = 0; b < node->B; b++)
    for (int64_t s = 0; s < count_of(node, b); s++)
      for (int64_t h = 0; h < node->heads; h += step) {
        const int64_t head = h / group, position = int_of(node, FIRST, b) + s, token = int_of(node, OFFSETS, b) + s;
        double query[80], scores[448], y[80] = {0}, max = -INFINITY, sum = 0, largest = 0;
        rotated(node, (float*)in[QUERY].data + token * stride + h * node->period, QUERY_NORM, position, query);
        const int64_t first = node->window && position + 1 > node->window ? position + 1 - node->window : 0;
        for (int64_t t = first; t <= position; t++) {
          const int64_t at = entry_of(node, b, head, t) * D;
          double score = 0;
          for (int64_t i = 0; i < D; i++) score += query[i] * cached(node, &in[KEY_CACHE], KEY_SCALE, head, at, i);
          score *= node->scale;
          if (node->softcap > 0) score = node->softcap * tanh(score / node->softcap);
          scores[t] = score, max = fmax(max, score);
        }
        const float* sink = in[SINKS].present ? (float*)in[SINKS].data + h : NULL;
        if (sink) max = fmax(max, *sink), sum = exp(*sink - max);
        for (int64_t t = first; t <= position; t++) sum += exp(scores[t] - max);
        for (int64_t t = first; t <= position; t++) {
          const int64_t at = entry_of(node, b, head, t) * E;
          const double weight = exp(scores[t] - max) / sum;
          for (int64_t i = 0; i < E; i++) {
            const double value = cached(node, &in[VALUE_CACHE], VALUE_SCALE, head, at, i);
            y[i] += weight * value, largest = fmax(largest, fabs(value));
          }
        }
        const float* found = (float*)out[0].data + (token * node->heads + h) * E;
        for (int64_t i = 0; i < E; i++)
          if (!(fabs(found[i] - y[i]) <= limit * largest))
            fail("CachedAttention: B %d T %d M %d D %d E %d bits %d window %d: token %d, head %d: %.9g, expected %.9g",
                 (int)node->B, (int)node->T, (int)node->columns, (int)D, (int)E, node->bits, (int)node->window,
                 (int)token, (int)h, found[i], y[i]);
      }
}

/* --- malformed nodes -------------------------------------------------------------------------------------------- */

static int64_t malformed_int(const char* name) {
  if (!strcmp(name, "local_window_size")) return PICK(-1, INT64_MIN);
  if (!strcmp(name, "activation") || !strcmp(name, "scores")) return PICK(-1, 3, INT64_MIN, INT64_MAX);
  return PICK(0, -1, INT64_MIN, INT64_MAX, INT64_C(1) << 40, INT64_C(1) << 31, -32);
}

/* Of operators that say themselves how theirs are malformed. */
static int is_own(const char* attribute) {
  static const char* const NAMES[] = {"gated",  "silu",   "squash", "least_step", "most_step",  "channels",
                                      "run",    "period", "group",  "sigmoid",    "norm_first", "one",
                                      "groups", "kept",   "best",   "added",      "least",      "factor"};
  int found = strstr(attribute, "first") != NULL;
  for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) found |= !strcmp(attribute, NAMES[i]);
  return found;
}

static int is_optional(const char* attribute) {
  return !strncmp(attribute, "do_", 3) || !strncmp(attribute, "rotary", 6) || !strcmp(attribute, "epsilon") ||
         !strcmp(attribute, "softcap") || !strcmp(attribute, "local_window_size") || strstr(attribute, "e2m1") ||
         !strcmp(attribute, "query_period") || is_own(attribute);
}

/* Breaks one thing of a node; says what, or NULL if the thing cannot be broken. */
static const char* malform(Node* node, int64_t thing) {
  Context* context = &node->context;
  if (thing < MOST_INPUTS) {
    Value* value = &context->inputs[thing];
    const int64_t kinds = node->changed[thing], kind = PICK(LAST_AXIS, LAST_AXIS, TYPE, PRESENCE, ALIGNMENT);
    if (!value->present || !(kinds & kind) || !elements_of(value)) return NULL;
    const Value before = *value;
    if (kind == LAST_AXIS || kind == TYPE) {
      if (kind == LAST_AXIS) {
        int64_t* axis = &value->dims[value->rank - 1];
        *axis += *axis > 1 && one_in(2) ? -1 : 1;
      }
      const Value shape = *value;
      const int type = kind == LAST_AXIS ? shape.type : shape.type == INT64 ? FLOAT : INT64;
      new_value(value, type, shape.rank, shape.dims);
      if (value->data) memset(value->data, 0, elements_of(value) * size_of(value->type));
      free(before.block);
      return kind == TYPE ? "another type" : "another last axis";
    }
    if (kind == PRESENCE) {
      value->present = 0;
      return "an absent input";
    }
    if (size_of(value->type) == 1) return NULL; /* bytes are aligned anywhere */
    const size_t bytes = elements_of(value) * size_of(value->type);
    value->block = malloc(bytes + 1);
    value->data = (char*)value->block + 1;
    memset(value->data, 0, bytes);
    free(before.block);
    return "data that is not aligned";
  }
  if (thing == MOST_INPUTS) {
    if (!node->info.count) return NULL;
    Attribute* attribute = &node->info.attributes[random_int(0, (int64_t)node->info.count - 1)];
    if (!is_optional(attribute->name) && one_in(4) &&
        (strcmp(attribute->name, "symmetric") || strcmp(node->what, "BlockGather"))) {
      attribute->name = "absent";
      return "a missing attribute";
    }
    if (!strcmp(attribute->name, "gated") || !strcmp(attribute->name, "normalized")) return NULL;
    if (strstr(attribute->name, "e2m1")) {
      attribute->i = !attribute->i;
      return "another e2m1";
    }
    if (strstr(attribute->name, "half_scales")) {
      if ((strstr(attribute->name, "down") ? &node->down : &node->weights)->e2m1) return NULL; /* which has one kind */
      attribute->i = !attribute->i;
      return "another half_scales";
    }
    if (!strncmp(attribute->name, "do_", 3) || !strncmp(attribute->name, "rotary", 6) ||
        strstr(attribute->name, "symmetric") || !strcmp(attribute->name, "offset") || is_own(attribute->name))
      return NULL;
    if (attribute->is_float) {
      const float bad[] = {NAN, -1.0f, -INFINITY};
      attribute->f = bad[random_int(0, 2)];
    } else {
      attribute->i = malformed_int(attribute->name);
    }
    return "a malformed attribute";
  }
  if (!strcmp(node->what, "CachedAttention")) {
    if (!node->B) return NULL;
    const int64_t b = random_int(0, node->B - 1), limit = node->columns * node->T;
    int32_t *offsets = context->inputs[OFFSETS].data, *first = context->inputs[FIRST].data;
    int32_t* table = context->inputs[TABLE].data;
    switch (random_int(0, 2)) {
      case 0: {
        const int64_t starts[] = {limit + 1 - count_of(node, b), INT32_MAX, INT32_MIN, -1};
        first[b] = (int32_t)starts[random_int(0, 3)];
        return "a malformed start";
      }
      case 1: {
        const int64_t wrong[] = {-1, INT32_MIN, offsets[node->B] + (int64_t)1, INT32_MAX};
        offsets[random_int(0, node->B)] = (int32_t)wrong[random_int(0, 3)];
        return "a malformed offset";
      }
      default: {
        if (!count_of(node, b)) return NULL;
        const int64_t used = (first[b] + count_of(node, b) + node->T - 1) / node->T;
        const int64_t wrong[] = {-1, INT32_MIN, node->blocks, INT32_MAX};
        table[b * node->columns + random_int(0, used - 1)] = (int32_t)wrong[random_int(0, 3)];
        return "a malformed block table";
      }
    }
  }
  if (!strcmp(node->what, "CausalConv")) {
    const int64_t rows = context->inputs[CONV_STATE].dims[0];
    if (node->B && !one_in(4)) return malform_sequences(node, CONV_OFFSETS, rows);
    if (one_in(2) && !node->gated) { /* the last channel is not there */
      Attribute* first = &node->info.attributes[0];
      const Value* x = &context->inputs[CONV_X];
      first->i = PICK(x->dims[x->rank - 1] - context->inputs[CONV_WEIGHT].dims[1] + 1, -1, INT64_MIN, INT64_MAX);
      return "a malformed first column";
    }
    const int64_t C = context->inputs[CONV_WEIGHT].dims[1];
    release_value(&context->inputs[CONV_WEIGHT]), release_value(&context->inputs[CONV_STATE]);
    new_taps(node, PICK(1, 17, 40), rows, C);
    return "a malformed number of taps";
  }
  if (is_recurrence(node)) {
    const int per_token = per_token_of(node);
    if (node->B && !one_in(3)) return malform_sequences(node, per_token + 1, context->inputs[per_token].dims[0]);
    const int which = (int)random_int(0, per_token - 1);
    const Value* x = &context->inputs[which];
    node->info.attributes[1 + which].i =
        PICK(x->dims[x->rank - 1] - columns_of(node, which) + 1, -1, INT64_MIN, INT64_MAX);
    return "a malformed first column";
  }
  if (!strcmp(node->what, "ChooseExperts")) {
    Attribute* attributes = node->info.attributes;
    if (!node->M) return NULL;
    switch (random_int(0, 3)) {
      case 0: attributes[0].i = PICK(-1, 0, node->T + 1, INT64_MAX); return "a malformed number of groups";
      case 1: attributes[1].i = PICK(-1, 0, node->groups + 1, INT64_MAX); return "too many groups that are kept";
      case 2: attributes[2].i = PICK(-1, 0, node->T / node->groups + 1, INT64_MAX); return "too many best of a group";
      default: attributes[3].i = PICK(-1, 3, INT64_MIN, INT64_MAX); return "unknown scores";
    }
  }
  if (!strcmp(node->what, "GatedNorm")) {
    const Value *x = &context->inputs[0], *gate = &context->inputs[1];
    Attribute* attributes = node->info.attributes;
    switch (random_int(0, 3)) {
      case 0:
        attributes[0].i = PICK(-1, x->dims[x->rank - 1] - node->firsts[0] + 1, INT64_MIN, INT64_MAX);
        return "a malformed number of channels";
      case 1:
        attributes[1].i = PICK(-1, x->dims[x->rank - 1] - node->channels + 1, INT64_MIN, INT64_MAX);
        return "a malformed first column";
      case 2:
        attributes[2].i = PICK(-1, gate->dims[gate->rank - 1], INT64_MIN, INT64_MAX);
        return "a malformed first column of the gate";
      default:
        attributes[4].i = PICK(node->run - 1, INT64_MIN, node->channels > node->run ? INT64_MAX : -1);
        return "a malformed period";
    }
  }
  if (!strcmp(node->what, "BlockGather") && elements_of(&context->inputs[0])) {
    const int64_t N = node->weights.N, ids[] = {N, -N - 1, INT64_MIN, INT64_MAX};
    ((int64_t*)context->inputs[0].data)[0] = ids[random_int(0, 3)];
    return "a malformed id";
  }
  if (!strcmp(node->what, "NormRows") && elements_of(&context->inputs[ROWS])) {
    const int64_t rows[] = {elements_of(&context->inputs[0]) / context->inputs[2].dims[0], -1, INT64_MIN, INT64_MAX};
    ((int64_t*)context->inputs[ROWS].data)[0] = rows[random_int(0, 3)];
    return "a malformed row";
  }
  if (!strcmp(node->what, "Experts") && elements_of(&context->inputs[INDEX])) {
    const int64_t experts[] = {context->inputs[UP].dims[0], -1, INT64_MIN, INT64_MAX};
    ((int64_t*)context->inputs[INDEX].data)[0] = experts[random_int(0, 3)];
    return "an index of no expert";
  }
  if (!strcmp(node->what, "BlockExperts") && one_in(2)) {
    const Value* begins = &context->inputs[one_in(2) ? CODED_UP_BEGINS : CODED_DOWN_BEGINS];
    const int64_t wrong[] = {1, -1, 64, -64, INT64_MAX, INT64_MIN}, at = random_int(0, node->B);
    if (begins->present) {
      ((int64_t*)begins->data)[at] =
          (int64_t)((uint64_t)((int64_t*)begins->data)[at] + (uint64_t)wrong[random_int(0, 5)]);
      return "codes of experts that begin elsewhere";
    }
  }
  if (!strcmp(node->what, "BlockExperts") && elements_of(&context->inputs[INDEX])) {
    const int64_t experts[] = {node->B, -1, INT64_MIN, INT64_MAX};
    ((int64_t*)context->inputs[INDEX].data)[0] = experts[random_int(0, 3)];
    return "an index of no expert";
  }
  if (!strcmp(node->what, "QuantizeActivations")) {
    const float wrong[] = {0, -0.01f, NAN, INFINITY};
    *(float*)context->inputs[1].data = wrong[random_int(0, 3)];
    return "a malformed scale";
  }
  return NULL;
}

/* --- draws ------------------------------------------------------------------------------------------------------- */

static float random_logit(int kind) {
  if (kind == 0) return random_float();
  if (kind == 1) return (float)random_int(-3, 3);
  if (kind == 2) return one_in(10) ? random_float() * 10 : -INFINITY;
  return one_in(300) ? (one_in(2) ? NAN : INFINITY) : random_float() * 1e38f;
}

static int allowed(const Row* row, int64_t token) {
  return !row->mask || (row->mask[token >> 5] >> (token & 31) & 1);
}

/* What is left of the logits, in plain C; whether they are finite. */
static int expected_scores(const Row* row, int64_t V, float* scores) {
  int finite = 1;
  for (int64_t v = 0; v < V; v++) finite &= row->logits[v] < INFINITY, scores[v] = row->logits[v];
  if (!finite) return 0;
  for (int64_t i = 0; i < row->adjusted; i++) {
    float* score = &scores[row->tokens[i]];
    *score += row->bias[i];
    *score = (*score > 0 ? *score / row->factor[i] : *score * row->factor[i]) + row->shift[i];
  }
  for (int64_t v = 0; v < V; v++) {
    if (!allowed(row, v)) scores[v] = -INFINITY;
    finite &= scores[v] < INFINITY;
  }
  return finite;
}

static void check_draw(const Row* row, int64_t V) {
  float* scores = malloc(V * sizeof *scores);
  const int finite = expected_scores(row, V, scores);
  float max = -INFINITY;
  for (int64_t v = 0; finite && v < V; v++) max = scores[v] > max ? scores[v] : max;
  const int32_t status = !finite ? NOT_FINITE : max == -INFINITY ? NONE_LEFT : 0;
  if (row->token < 0 ? row->token != status : status) fail("a draw gave %d, expected %d", row->token, status);
  if (row->token >= 0) {
    const int64_t token = row->token;
    if (token >= V || !(scores[token] > -INFINITY)) fail("a draw gave the excluded token %d", (int)token);
    int64_t before = 0;
    for (int64_t v = 0; v < V; v++) before += scores[v] > scores[token] || (scores[v] == scores[token] && v < token);
    if (row->scale == 0 && before) fail("a draw gave token %d, not the likeliest", (int)token);
    if (row->top_k && before >= row->top_k) fail("a draw gave token %d, not of the top %d", (int)token, row->top_k);
  }
  for (int64_t i = 1; finite && row->total && i < row->top; i++) {
    const int32_t a = row->top_tokens[i - 1], b = row->top_tokens[i];
    if (a < 0 || a >= V || b < 0 || b >= V || row->logits[a] < row->logits[b] ||
        (row->logits[a] == row->logits[b] && a >= b))
      fail("the top is not in order");
  }
  free(scores);
}

/* Rows of their exact sizes: of logits, masks, changed tokens and memory. */
static void run_draws(void) {
  enum { MOST = 3 };
  const int64_t V = PICK(random_int(1, 40), 512, random_int(500, 530), random_int(1, 1600)),
                count = random_int(1, MOST);
  Row rows[MOST] = {{0}}, *pointers[MOST];
  void *blocks[MOST][7], *memory = malloc(tapeout_sample_bytes(V));
  for (int64_t r = 0; r < count; r++) {
    Row* row = pointers[r] = &rows[r];
    row->adjusted = random_int(0, V < 20 ? V : 20), row->random = one_in(5) ? UINT64_MAX : next_random();
    row->top = (int32_t)random_int(-1, V < 9 ? V : 9);
    const int64_t words = (V + 31) / 32, changed = row->adjusted * (int64_t)sizeof(float);
    const size_t sizes[7] = {V * sizeof(float),
                             words * 4,
                             changed,
                             changed,
                             changed,
                             changed,
                             (row->top < 0 ? 0 : row->top) * sizeof(int32_t)};
    for (int i = 0; i < 7; i++) blocks[r][i] = malloc(sizes[i]);
    float *logits = blocks[r][0], *bias = blocks[r][3], *factor = blocks[r][4], *shift = blocks[r][5];
    int32_t* tokens = blocks[r][2];
    const int kind = (int)random_int(0, 3);
    for (int64_t v = 0; v < V; v++) logits[v] = random_logit(kind);
    for (int64_t i = 0; i < words; i++) ((uint32_t*)blocks[r][1])[i] = (uint32_t)next_random() >> (one_in(3) ? 28 : 0);
    for (int64_t i = 0; i < row->adjusted; i++) {
      tokens[i] = (int32_t)((V - 1 - i + (int64_t)(row->random % 7)) % V);
      bias[i] = one_in(4) ? -INFINITY : random_float(), factor[i] = (float)PICK(1, 1, 2, 0), shift[i] = random_float();
    }
    memset(blocks[r][6], -1, sizes[6]);
    row->logits = logits, row->mask = one_in(2) ? blocks[r][1] : NULL, row->tokens = tokens;
    row->bias = bias, row->factor = factor, row->shift = shift, row->top_tokens = blocks[r][6];
    row->scale = one_in(4) ? 0 : (float)random_int(1, 3000) / 1000 * (one_in(5) ? 0x1p90f : 1);
    row->top_k = one_in(2) ? 0 : (int32_t)random_int(1, V + 1);
    row->top_p = one_in(2) ? 1 : (double)random_int(1, 999999) / 1e6;
    row->least = one_in(2) ? 0 : (int32_t)random_int(0, 1 << 30);
  }
  tapeout_sample_1(pointers, count, V, memory);
  for (int64_t r = 0; r < count; r++) {
    const Row* row = &rows[r];
    check_draw(row, V);
    write_result("draw", INT32, &row->token, sizeof row->token);
    if (row->top >= 0 && row->total) {
      write_result("draw", INT64, &row->total, sizeof row->total);
      write_result("draw", INT32, row->top_tokens, row->top * (int64_t)sizeof *row->top_tokens);
    }
    for (int i = 0; i < 7; i++) free(blocks[r][i]);
  }
  free(memory);
}

/* --- cases ------------------------------------------------------------------------------------------------------ */

/* Operators by the file of their kernel: the numbers of `new_node`. The first row has all of them. */
typedef struct {
  const char* file;
  int64_t first, last;
} Kernel;
static const Kernel KERNELS[] = {
    {"all", 0, 16},
    {"block_linear.c", 0, 3},
    {"block_gather.c", 4, 4},
    {"cached_attention.c", 5, 7},
    {"quantize_activations.c", 8, 8},
    {"norm_rows.c", 9, 9},
    {"causal_conv.c", 10, 10},
    {"experts.c", 11, 11},
    {"block_experts.c", 12, 12},
    {"float_linear.c", 13, 13},
    {"choose_experts.c", 14, 14},
    {"recurrence.c", 15, 15},
    {"gated_norm.c", 16, 16},
};
static const Kernel* kernel = KERNELS; /* whose nodes are run */

static Node new_node(int64_t op) {
  if (op < 4) return new_linear(one_in(150) ? 32768 : 0);
  if (op < 8) return op == 4 ? new_gather() : new_attention();
  if (op == 8) return new_quantize();
  if (op < 11) return op == 9 ? new_norm() : new_conv();
  if (op == 11) return new_experts();
  if (op == 12) return new_block_experts();
  if (op < 15) return op == 13 ? new_float_linear() : new_choice();
  return op == 15 ? new_recurrence() : new_gated_norm();
}
static int is_norm(const Node* node) {
  for (size_t i = 0; i < sizeof NORMS / sizeof *NORMS; i++)
    if (!strcmp(node->what, NORMS[i])) return 1;
  return 0;
}
static void check_node(Node* node) {
  write_results(node);
  if (!strcmp(node->what, "CachedAttention"))
    check_attention(node);
  else if (!strcmp(node->what, "BlockGather"))
    check_gather(node);
  else if (!strcmp(node->what, "QuantizeActivations"))
    check_quantize(node);
  else if (is_norm(node))
    check_norm(node);
  else if (!strcmp(node->what, "CausalConv"))
    check_conv(node);
  else if (!strcmp(node->what, "Experts"))
    check_experts(node);
  else if (!strcmp(node->what, "BlockExperts"))
    check_block_experts(node);
  else if (!strcmp(node->what, "FloatLinear"))
    check_float_linear(node);
  else if (!strcmp(node->what, "ChooseExperts"))
    check_choice(node);
  else if (is_recurrence(node))
    check_recurrence(node);
  else if (!strcmp(node->what, "GatedNorm"))
    check_gated_norm(node);
  else if (!strcmp(node->what, "Scale"))
    check_scale(node);
  else
    check_linear(node);
}

/* An input, or what follows them in `malform`. Values that a node must check, if it has some, are as likely as all else
   together: there is one way to break the shape of an input, and many to break a start, an offset or a block. */
static int64_t random_thing(const Node* node) {
  const int64_t inputs = (int64_t)node->context.input_count, thing = random_int(0, inputs + 1);
  const int checks_values = !strcmp(node->what, "CachedAttention") || !strcmp(node->what, "BlockGather") ||
                            !strcmp(node->what, "QuantizeActivations") || !strcmp(node->what, "NormRows") ||
                            !strcmp(node->what, "CausalConv") || strstr(node->what, "Experts") || is_recurrence(node) ||
                            !strcmp(node->what, "GatedNorm");
  if (checks_values && one_in(2)) return MOST_INPUTS + 1;
  return thing < inputs ? thing : MOST_INPUTS + thing - inputs;
}

static int is_linear(const Node* node) {
  return strstr(node->what, "Linear") != NULL && strcmp(node->what, "FloatLinear") != 0;
}

/* Whether vectors compute what tiles of AMX have no memory for. */
static int does_without_tiles(const Node* node) {
  const int64_t rows = strcmp(node->what, "BlockExperts") ? node->M : node->M * node->columns;
  return in_tiles && rows >= 24 && (is_linear(node) || !strcmp(node->what, "BlockExperts"));
}

static void run_case(int64_t counts[4]) {
  if (!kernel->first && one_in(100)) {
    Node node = new_linear(32784);
    runs = copies = 1;
    expect_status(&node, run_node(node.op, &node.info, &node.context), "a block whose sums overflow");
    release_node(&node);
    counts[1]++;
    return;
  }
  Node node = new_node(random_int(kernel->first, kernel->last));
  const int64_t way = random_int(0, 9);
  use_threads = one_in(12);
  choose_threads_at_start = running_case % 4 == 0;
  constant_inputs = one_in(2) ? next_random() : 0;
  runs = is_linear(&node) && one_in(4) ? 3 : 1;
  /* That one counts what it clips, and this one goes on with its state. */
  const int once =
      !strcmp(node.what, "QuantizeActivations") || !strcmp(node.what, "CausalConv") || is_recurrence(&node);
  copies = !once && one_in(4) ? 2 : 1;
  if (way < 5) {
    expect_success(&node, run_node(node.op, &node.info, &node.context));
    check_node(&node);
    counts[0]++;
  } else if (way < 8) {
    const char* why = NULL;
    for (int tries = 0; !why && tries < 8; tries++) why = malform(&node, random_thing(&node));
    Status* status = run_node(node.op, &node.info, &node.context);
    if (why)
      expect_status(&node, status, why);
    else
      expect_success(&node, status);
    counts[why ? 1 : 0]++;
  } else if (way == 8) {
    fail_call = random_int(0, 120);
    Status* status = run_node(node.op, &node.info, &node.context);
    if (fail_call >= 0) /* the node makes fewer calls */
      expect_success(&node, status);
    else if (!status && (!failed_name || !is_optional(failed_name)))
      fail("%s: a failing call was ignored", node.what);
    else if (status)
      drop_status(status);
    fail_call = -1;
    counts[2]++;
  } else {
    choose_threads_at_start = 0; /* it goes without what it has no memory for */
    fail_allocation = random_int(0, 2);
    Status* status = run_node(node.op, &node.info, &node.context);
    if (fail_allocation < 0 && !status && does_without_tiles(&node))
      check_node(&node);
    else if (fail_allocation < 0)
      expect_status(&node, status, "a failed allocation");
    else
      expect_success(&node, status);
    fail_allocation = -1;
    counts[3]++;
  }
  release_node(&node);
  if (live_statuses) fail("%s: %d statuses leak", node.what, (int)live_statuses);
}

/* Every failing call of the registration, and a runtime that is too old. */
static void check_registration(void) {
  for (fail_call = 0; fail_call < 16;) {
    const int64_t call = fail_call;
    Status* status = register_library(API_VERSION);
    fail_call = call + 1;
    if (!status) {
      release_library();
      if (call < 9) fail("registration: a failing call %d was accepted", (int)call);
    } else {
      drop_status(status);
    }
  }
  fail_call = -1;
  Status* status = register_library(API_VERSION - 1);
  if (!status) fail("registration: an older runtime was accepted");
  drop_status(status);
  if (live_domains || live_statuses) fail("registration: domains or statuses leak");
}

static uint64_t seed;
__attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)(void));
static void print_case(void) {
  fprintf(stderr, "seed %llu, case %lld\n", (unsigned long long)seed, (long long)running_case);
}

static void* run_in_thread(void* counts) {
  run_case(counts);
  if (kernel == KERNELS && running_case % 8 == 0) run_draws();
  return NULL;
}

int main(int count, char** arguments) {
  if (count < 3 || count > 5) fail("usage: fuzz SEED CASES [KERNEL [RESULTS]]");
  seed = strtoull(arguments[1], NULL, 10);
  const int64_t cases = strtoll(arguments[2], NULL, 10);
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(print_case);
  while (count > 3 && strcmp(kernel->file, arguments[3]))
    if (++kernel == KERNELS + sizeof KERNELS / sizeof *KERNELS) fail("no operator has a kernel in %s", arguments[3]);
  if (count > 4 && !(results = fopen(arguments[4], "wb"))) fail("%s cannot be written", arguments[4]);
  check_registration();
  Status* status = register_library(API_VERSION);
  if (status) fail("registration: %s", message_of(status));
  int64_t counts[4] = {0};
  for (int64_t i = 0; i < cases; i++) {
    if (i == cases / 2) {
      release_library();
      own_threads = 3;
      if (register_library(API_VERSION)) fail("registration with threads");
    }
    seed_random(seed * 1000003 + (uint64_t)i);
    running_case = i;
    pthread_t thread; /* of its own, so that no case finds the scratch memory of another */
    if (pthread_create(&thread, NULL, run_in_thread, counts)) fail("no thread");
    pthread_join(thread, NULL);
  }
  release_library();
  if (results && fclose(results)) fail("%s cannot be written", arguments[4]);
  printf("seed %llu: %lld valid, %lld malformed, %lld with a failing call, %lld with a failing allocation\n",
         (unsigned long long)seed, (long long)counts[0], (long long)counts[1], (long long)counts[2],
         (long long)counts[3]);
  return 0;
}
