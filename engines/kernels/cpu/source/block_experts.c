/* BlockExperts: the experts of a mixture over weights in blocks of codes, products as of BlockLinear.

     x [.., M, H] float, index [M, k] int64 of the experts of a token, weight [M, k] float
     up of E experts, codes, scales and zero points of a weight [U, H] each: pairs of tiles, of 16 gates and of the 16 ups
       of the same channels, where there are gates; else tiles of ups. up_bias [E, U], whole pairs of tiles, or none
     down of E experts, likewise of a weight [H, I] each; down_bias [E, H] in whole pairs of tiles, or none
     up_begins, down_begins [E + 1] int64, where experts differ in bits: where the codes of each begin, in bytes, and the end of
       all; the attribute says the bits of the widest. Scales and zero points lie as they do elsewhere
     y as x: the sum over a token's experts, in the order of its choices, of weight * (down · inner + bias), where inner is
       what an ExpertGate makes of up · x + bias

   The tokens of a step are grouped by expert, so that the weights of an expert are read once. Activations of the tokens are
   quantized once for all experts, inner channels for each pair of a token and an expert: a token's bits depend on nothing
   else in the step.

   U outputs of up: 2I, or I, in whole pairs of tiles     pairs: of a token and one of its choices, by expert */
#include "block_product.h"
#include "experts.h"

enum { MAX_RANK = 8 };
enum {
  X,
  INDEX,
  SHARE,
  UP_CODES,
  UP_SCALES,
  UP_ZEROS,
  DOWN_CODES,
  DOWN_SCALES,
  DOWN_ZEROS,
  UP_BIAS,
  DOWN_BIAS,
  UP_BEGINS,
  DOWN_BEGINS,
  INPUTS
};
/* Tokens at once: more take the experts in turns, so that scratch memory is bounded. */
enum { TOKENS_AT_ONCE = 512 };
/* Parts of the outputs: each has the weights of all experts that the step chose, so that the sum over a token's choices
   stays with the thread. Few enough for a part to read pages of an expert. */
enum { DOWN_PARTS = 32 };

typedef struct {
  Base base;
  ExpertGate gate;
  int64_t gated;
  BlockShape up, down; /* of an expert */
  Tensor constants[INPUTS];
} Kernel;

typedef struct {
  const Kernel* k;
  Routing routing;
  int64_t pairs;
  BlockWeight up, down;                   /* of the first expert, as if it had the bits of the widest */
  const int64_t *up_begins, *down_begins; /* NULL: all experts have as many bits */
  int64_t up_pairs, up_jobs;              /* pairs of tiles of a job, and jobs of an expert */
  const float *x, *share;                 /* share: the weight of a choice */
  const float *up_bias, *down_bias;
  BlockRows rows, inner_rows; /* [pairs] of x, and of inner channels */
  float *inner, *y;           /* inner [pairs, I] */
  int64_t* places;            /* [M, k] of each choice in the order of pairs */
  _Atomic int out_of_memory;
} Work;

static int64_t expert_bytes(const BlockShape* s) {
  return padded_tiles(s->N) * tile_bytes(s);
}

/* Bits of the codes of an expert, by the bytes that they take. */
static int64_t bits_of(const BlockShape* s, const int64_t* begins, int64_t expert) {
  return begins ? (begins[expert + 1] - begins[expert]) * 8 / (padded_tiles(s->N) * TILE * s->K) : s->bits;
}

/* Whether codes of experts that begin there fill `bytes`, each in bits that there are kernels for. */
static int are_begins(const BlockShape* s, const int64_t* begins, int64_t experts, int64_t bytes) {
  int64_t at = 0;
  if (s->e2m1) return 0;
  for (int64_t e = 0; e < experts; e++) {
    BlockShape own = *s;
    if (begins[e] != at || begins[e + 1] <= at || begins[e + 1] > bytes) return 0;
    own.bits = bits_of(s, begins, e);
    if (!is_supported_shape(&own) || begins[e + 1] - at != expert_bytes(&own)) return 0;
    at = begins[e + 1];
  }
  return at == bytes;
}

/* The weight of one expert. */
static BlockWeight expert_of(const BlockWeight* first, const int64_t* begins, int64_t expert, const float* biases) {
  BlockWeight w = *first;
  const int64_t tiles = expert * w.tiles, scales = tiles * w.blocks * TILE;
  w.codes += begins ? begins[expert] : tiles * tile_bytes(&w.shape), w.scales += scales * scale_bytes(&w.shape);
  w.shape.bits = bits_of(&w.shape, begins, expert);
  if (w.zero_points) w.zero_points += scales;
  w.bias = biases ? biases + tiles * TILE : NULL;
  return w;
}

/* Activations of a token, quantized where its first choice lies, and copied to the others. Sums are those that the bits of
   each expert ask for. */
static void quantize_token(void* state, size_t token) {
  const Work* w = state;
  const int64_t K = w->up.shape.K, first = (int64_t)token * w->routing.chosen, *places = w->places + first;
  const BlockRows* rows = &w->rows;
  BlockWeight plain = w->up;
  plain.shape.symmetric = 0;
  quantize_row(&plain, rows, places[0], w->x + (int64_t)token * K);
  for (int64_t choice = w->routing.chosen; choice-- > 0;) { /* the first, which the others are made of, is the last */
    BlockShape own = w->up.shape;
    own.bits = bits_of(&own, w->up_begins, w->routing.index[first + choice]);
    const int32_t factor = sum_factor(&own);
    if (choice) memcpy(rows->codes + places[choice] * row_bytes(K), rows->codes + places[0] * row_bytes(K), K);
    for (int64_t b = 0; b < w->up.blocks; b++) {
      rows->scales[b * rows->stride + places[choice]] = rows->scales[b * rows->stride + places[0]];
      rows->sums[b * rows->stride + places[choice]] = rows->sums[b * rows->stride + places[0]] * factor;
    }
  }
}

/* Some inner channels of one expert, for all its tokens. */
static void up_job(void* state, size_t number) {
  Work* w = state;
  const Routing* r = &w->routing;
  const int64_t expert = r->hits[(int64_t)number / w->up_jobs], first = (int64_t)number % w->up_jobs * w->up_pairs;
  const int64_t end = smaller(first + w->up_pairs, w->up.tiles / 2), I = w->down.shape.K;
  const int64_t begin = r->begins[expert], count = r->begins[expert + 1] - begin;
  const BlockWeight whole = expert_of(&w->up, w->up_begins, expert, w->up_bias);
  const BlockWeight part = some_tiles(&whole, 2 * first, 2 * end);
  const BlockRows rows = some_rows(&w->rows, part.shape.K, begin, count);
  float* y = scratch(SCRATCH_ROW, count * part.shape.N * sizeof(float));
  if (!y) {
    w->out_of_memory = 1;
    return;
  }
  multiply_rows(&part, &rows, 0, part.tiles, y, NULL);
  for (int64_t row = 0; row < count; row++) {
    const float* from = y + row * part.shape.N;
    float* inner = w->inner + (begin + row) * I;
    if (w->k->gated)
      for (int64_t i = first; i < end; i++, from += 2 * TILE)
        store(inner + i * TILE, gated(&w->k->gate, load(from), load(from + TILE)));
    else /* the last tile may be padding */
      for (int64_t i = 2 * first; i < 2 * end && i * TILE < I; i++, from += TILE)
        store(inner + i * TILE, activated(&w->k->gate, load(from)));
  }
  release_scratch(SCRATCH_ROW);
}

static void quantize_inner(void* state, size_t row) {
  const Work* w = state;
  BlockWeight down = w->down;
  down.shape.bits = bits_of(&down.shape, w->down_begins, w->routing.index[w->routing.order[row]]);
  quantize_row(&down, &w->inner_rows, (int64_t)row, w->inner + (int64_t)row * down.shape.K);
}

/* Some output channels of all tokens. */
static void down_job(void* state, size_t number) {
  Work* w = state;
  const Routing* r = &w->routing;
  const int64_t tile_pairs = w->down.tiles / 2, parts = smaller(tile_pairs, DOWN_PARTS), index = (int64_t)number;
  const int64_t first = tile_pairs * index / parts * 2, end = tile_pairs * (index + 1) / parts * 2;
  const int64_t H = w->down.shape.N, columns = smaller(H - first * TILE, (end - first) * TILE);
  float* answers = scratch(SCRATCH_ROW, w->pairs * columns * sizeof(float));
  if (!answers) {
    w->out_of_memory = 1;
    return;
  }
  for (int64_t hit = 0; hit < r->hit; hit++) {
    const int64_t expert = r->hits[hit], begin = r->begins[expert];
    const BlockWeight whole = expert_of(&w->down, w->down_begins, expert, w->down_bias);
    const BlockWeight part = some_tiles(&whole, first, end);
    const BlockRows rows = some_rows(&w->inner_rows, part.shape.K, begin, r->begins[expert + 1] - begin);
    multiply_rows(&part, &rows, 0, part.tiles, answers + begin * columns, NULL);
  }
  for (int64_t token = 0; token < r->tokens; token++)
    for (int64_t i = 0; i < columns; i += LANES) {
      const int64_t lanes = smaller(columns - i, LANES);
      F32x16 sum = {0};
      for (int64_t choice = token * r->chosen; choice < (token + 1) * r->chosen; choice++)
        sum = vfma(splat(w->share[choice]), load_first(answers + w->places[choice] * columns + i, lanes), sum);
      store_first(w->y + token * H + first * TILE + i, sum, lanes);
    }
  release_scratch(SCRATCH_ROW);
}

static Status* each(Work* w, Api api, Context* context, void (*job)(void*, size_t), int64_t count,
                    int64_t activations) {
  if (activations >= PARALLEL_ACTIVATIONS) return parallel(api, context, w->k->base.threads, job, count, w, NULL);
  for (int64_t i = 0; i < count; i++) job(w, i);
  return NULL;
}

/* As many pairs of tiles as leave PARTS jobs, within PART_BYTES. */
static void cut_up(Work* w) {
  const int64_t pairs = w->up.tiles / 2, bytes = 2 * tile_bytes(&w->up.shape);
  const int64_t most = PART_BYTES > bytes ? PART_BYTES / bytes : 1, wanted = w->routing.hit * pairs / PARTS;
  w->up_pairs = smaller(wanted > 1 ? wanted : 1, smaller(most, pairs));
  w->up_jobs = (pairs + w->up_pairs - 1) / w->up_pairs;
}

/* The tokens of `w`, whose memory is bounded, at once. */
static Status* compute_tokens(Work* w, Api api, Context* context) {
  Routing* r = &w->routing;
  Threads* threads = w->k->base.threads;
  const int64_t pairs = w->pairs = r->tokens * r->chosen, I = w->down.shape.K;
  const int64_t numbers = routing_numbers(r), x_bytes = rows_bytes(&w->up.shape, pairs),
                inner_bytes = rows_bytes(&w->down.shape, pairs);
  const size_t bytes = (numbers + pairs) * sizeof(int64_t) + x_bytes + inner_bytes + pairs * I * sizeof(float);
  char* memory = scratch(SCRATCH_EXPERTS, bytes);
  if (!memory) return failure(api, ERROR_FAIL, "BlockExperts: out of memory");
  w->inner = (float*)memory, memory += pairs * I * sizeof(float);
  w->places = (int64_t*)memory, memory += pairs * sizeof(int64_t);
  int64_t* routing = (int64_t*)memory;
  memory += numbers * sizeof(int64_t);
  w->rows = rows_in(memory, &w->up.shape, pairs);
  w->inner_rows = rows_in(memory + x_bytes, &w->down.shape, pairs);
  Status* status = NULL;
  if (!route(r, routing)) status = failure(api, ERROR_ARGUMENT, "BlockExperts: an index is of no expert");
  if (!status) {
    for (int64_t i = 0; i < pairs; i++) w->places[r->order[i]] = i;
    cut_up(w);
    status = each(w, api, context, quantize_token, r->tokens, r->tokens * w->up.shape.K);
  }
  if (!status) status = parallel(api, context, threads, up_job, r->hit * w->up_jobs, w, NULL);
  if (!status && !w->out_of_memory) status = each(w, api, context, quantize_inner, pairs, pairs * I);
  if (!status && !w->out_of_memory)
    status = parallel(api, context, threads, down_job, smaller(w->down.tiles / 2, DOWN_PARTS), w, NULL);
  release_scratch(SCRATCH_EXPERTS);
  if (!status && w->out_of_memory) status = failure(api, ERROR_FAIL, "BlockExperts: out of memory");
  return status;
}

/* Whether the tensors, `codes` and those behind it, hold the weights of so many experts. `begins` may be absent. */
static int are_weights(const BlockShape* s, int64_t experts, const Tensor* codes, const Tensor* begins) {
  const Tensor *scales = codes + 1, *zero_points = codes + 2;
  if (!begins->present) return is_block_weight(s, experts, codes, scales, zero_points);
  return holds(begins, INT64, experts + 1) && codes->present && codes->type == UINT8 &&
         are_begins(s, begins->data, experts, codes->elements) && is_block_grid(s, experts, scales, zero_points);
}

static Status* compute(void* self, Context* context) {
  const Kernel* k = self;
  Api api = k->base.api;
  Tensor in[INPUTS];
  for (size_t i = 0; i < INPUTS; i++) TRY(input(api, context, i, &k->constants[i], &in[i]));
  const Tensor *x = &in[X], *index = &in[INDEX];
  const int64_t H = k->up.K;
  if (!x->present || x->type != FLOAT || x->rank < 2 || x->rank > MAX_RANK || x->dims[x->rank - 1] != H)
    return failure(api, ERROR_ARGUMENT, "BlockExperts: x is not [.., M, H] float");
  const int64_t tokens = x->elements / H;
  const int64_t experts = in[UP_SCALES].elements / (padded_tiles(k->up.N) * TILE * (k->up.K / k->up.block));
  if (experts < 1 || !are_weights(&k->up, experts, &in[UP_CODES], &in[UP_BEGINS]) ||
      !are_weights(&k->down, experts, &in[DOWN_CODES], &in[DOWN_BEGINS]))
    return failure(api, ERROR_ARGUMENT, "BlockExperts: weights of another shape or type");
  if ((in[UP_BIAS].present && !holds(&in[UP_BIAS], FLOAT, experts * padded_tiles(k->up.N) * TILE)) ||
      (in[DOWN_BIAS].present && !holds(&in[DOWN_BIAS], FLOAT, experts * padded_tiles(k->down.N) * TILE)))
    return failure(api, ERROR_ARGUMENT, "BlockExperts: a bias does not fit its weight");
  if (!index->present || index->type != INT64 || index->rank != 2 || index->dims[0] != tokens ||
      !holds(&in[SHARE], FLOAT, index->elements))
    return failure(api, ERROR_ARGUMENT, "BlockExperts: index is not [M, k] int64, or weight not [M, k] float");
  Work all = {.k = k, .x = x->data, .share = in[SHARE].data};
  all.routing = (Routing){.chosen = index->dims[1], .experts = experts, .index = index->data};
  all.up = block_weight(&k->up, &in[UP_CODES], &in[UP_SCALES], &in[UP_ZEROS], NULL);
  all.down = block_weight(&k->down, &in[DOWN_CODES], &in[DOWN_SCALES], &in[DOWN_ZEROS], NULL);
  all.up_bias = in[UP_BIAS].data, all.down_bias = in[DOWN_BIAS].data;
  all.up_begins = in[UP_BEGINS].data, all.down_begins = in[DOWN_BEGINS].data;
  TRY(output(api, context, 0, x->dims, x->rank, &all.y));
  if (!tokens) return NULL;
  const int64_t chosen = all.routing.chosen;
  if (!chosen) return failure(api, ERROR_ARGUMENT, "BlockExperts: no expert of a token");
  for (int64_t token = 0; token < tokens; token += TOKENS_AT_ONCE) {
    Work w = all;
    w.routing.tokens = smaller(TOKENS_AT_ONCE, tokens - token);
    w.x += token * H, w.y += token * H, w.share += token * chosen, w.routing.index += token * chosen;
    TRY(compute_tokens(&w, api, context));
  }
  return NULL;
}

static Status* read_shape(Api api, const Info* info, const char* const* names, BlockShape* shape) {
  TRY(attribute_int(api, info, names[0], &shape->block));
  TRY(attribute_int(api, info, names[1], &shape->bits));
  TRY(attribute_int(api, info, names[2], &shape->half_scales));
  TRY(attribute_int(api, info, names[3], &shape->symmetric));
  shape->e2m1 = optional_int(api, info, names[4], 0);
  if (!is_supported_shape(shape) || shape->block > LARGEST_BLOCK)
    return failure(api, ERROR_ARGUMENT, "BlockExperts: unsupported H, I, block_size or bits");
  return NULL;
}

static Status* create(const Op* op, Api api, const Info* info, void** self) {
  static const char* const UP[] = {"up_block_size", "up_bits", "up_half_scales", "up_symmetric", "up_e2m1"};
  static const char* const DOWN[] = {"down_block_size", "down_bits", "down_half_scales", "down_symmetric", "down_e2m1"};
  Kernel found = {.base = {api, threads_of(op)}};
  int64_t H, I;
  TRY(attribute_int(api, info, "H", &H));
  TRY(attribute_int(api, info, "I", &I));
  TRY(attribute_int(api, info, "gated", &found.gated));
  TRY(read_gate(api, info, &found.gate));
  if (I < 1 || I > LARGEST_K) return failure(api, ERROR_ARGUMENT, "BlockExperts: unsupported H, I, block_size or bits");
  found.up.N = padded_tiles(found.gated ? 2 * I : I) * TILE,
  found.up.K = H; /* I is whole tiles where it is whole blocks */
  found.down.N = H, found.down.K = I;
  TRY(read_shape(api, info, UP, &found.up));
  TRY(read_shape(api, info, DOWN, &found.down));
  for (size_t i = UP_CODES; i < INPUTS; i++) TRY(constant_input(api, info, i, &found.constants[i]));
  return keep_kernel(&found, sizeof found, self);
}

const Implementation block_experts = {create, compute};
