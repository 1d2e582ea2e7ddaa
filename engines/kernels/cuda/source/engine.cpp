/* Runs a plan of operations as steps on a GPU: owns its memory, its stream and its graphs.

   All memory is one arena, taken when the engine is opened: weights, KV cache, activations for the largest step, inputs
   and results. A step is one copy to the device, the launches of its operations, one copy back, and one wait. Steps in which
   every sequence decodes one token run as a graph, captured when the engine is opened, for the next larger of some
   numbers of sequences: the sequences that are not there have no tokens, and their rows are computed for nobody.

   A step allocates nothing and is decided by its inputs alone, and by the tokens that the step before it has chosen, where
   these name them. Two steps may have begun and not ended: what the host writes and reads of them lies apart. */
#include "engine.hpp"
#include "driver.hpp"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_DRIVER = 13000, ALIGNMENT = 16, MOST_LAUNCHES = 4, FUNCTIONS = 128, STEPS = 2 };

/* Where inputs of a step lie, from their beginning. */
typedef struct {
  uint64_t ids, rows, offsets, starts, table, draws, bytes;
} Places;

/* Bytes of a step's results, in this order. tokens: with those that say which are finite. */
typedef struct {
  size_t tokens, ranking, logits;
} Results;

typedef struct {
  char name[56];
  void* function;
} Function;

/* A step that has begun and not ended. */
typedef struct {
  char *inputs, *results; /* of the host, pinned */
  void* event;            /* its end */
  size_t result_bytes;
} Begun;

typedef struct {
  Driver driver;
  void *library, *context, *module, *stream;
  int device, on_host, has_context;
  Settings settings; /* its pointers are the caller's until the engine is open */
  Operation* operations;
  Piece* pieces;
  CacheTensor* cache;
  int32_t* buckets;
  void** graphs; /* of buckets */
  Function functions[FUNCTIONS];
  int function_count;
  uint32_t multiprocessors, many_blocks;
  DevicePointer arena;
  Begun steps[STEPS]; /* take turns */
  uint64_t begun, ended;
  int failure;
  char error[512];
} Engine;

static int fail(Engine* e, int failure, const char* format, ...) __attribute__((format(printf, 3, 4)));
static int fail(Engine* e, int failure, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(e->error, sizeof e->error, format, arguments);
  va_end(arguments);
  return e->failure = failure;
}

/* Whether a call of the driver succeeded. */
static int called(Engine* e, int error, const char* what) {
  if (!error) return 0;
  const char* text = "an unknown error";
  e->driver.cuGetErrorString(error, &text);
  return fail(e, error == OUT_OF_MEMORY ? NO_MEMORY : DRIVER_ERROR, "%s: %s (%d)", what, text, error);
}
#define CALL(name, ...)                                                   \
  do {                                                                    \
    if (called(e, e->driver.name(__VA_ARGS__), #name)) return e->failure; \
  } while (0)

static int load_driver(Engine* e) {
  const Settings* s = &e->settings;
  if (!s->driver) {
#define STAND_IN(name, arguments) e->driver.name = name;
    DRIVER_FUNCTIONS(STAND_IN)
#undef STAND_IN
    e->on_host = 1;
    return 0;
  }
  e->library = dlopen(s->driver, RTLD_NOW | RTLD_LOCAL);
  if (!e->library) return fail(e, NO_DRIVER, "%s", dlerror());
#define FOUND(name, arguments)                                                          \
  if (!(e->driver.name = reinterpret_cast<int(*) arguments>(dlsym(e->library, #name)))) \
    return fail(e, OLD_DRIVER, "%s has no %s", s->driver, #name);
  DRIVER_FUNCTIONS(FOUND)
#undef FOUND
  return 0;
}

static int find_device(Engine* e) {
  int version = 0, multiprocessors = 0;
  CALL(cuDriverGetVersion, &version);
  if (version < LEAST_DRIVER)
    return fail(e, OLD_DRIVER, "the driver is for CUDA %d.%d", version / 1000, version % 1000 / 10);
  const int started = e->driver.cuInit(0);
  if (started == NO_DEVICE) return fail(e, NO_GPU, "the driver finds no GPU");
  if (called(e, started, "cuInit")) return e->failure;
  CALL(cuDeviceGet, &e->device, 0);
  CALL(cuDeviceGetAttribute, &multiprocessors, MULTIPROCESSORS, e->device);
  e->multiprocessors = (uint32_t)multiprocessors, e->many_blocks = e->multiprocessors * 3 / 4;
  CALL(cuDevicePrimaryCtxRetain, &e->context, e->device);
  e->has_context = 1;
  CALL(cuCtxSetCurrent, e->context);
  const int loaded = e->driver.cuModuleLoadData(&e->module, e->settings.machine_code);
  if (loaded == INVALID_IMAGE || loaded == NO_BINARY_FOR_GPU) {
    e->module = nullptr;
    int major = 0, minor = 0;
    CALL(cuDeviceGetAttribute, &major, MAJOR, e->device);
    CALL(cuDeviceGetAttribute, &minor, MINOR, e->device);
    return fail(e, NO_MACHINE_CODE, "the GPU has compute capability %d.%d, for which this machine code is not", major,
                minor);
  }
  if (called(e, loaded, "cuModuleLoadData")) return e->module = nullptr, e->failure;
  CALL(cuStreamCreate, &e->stream, NON_BLOCKING);
  return 0;
}

/* Pieces are in the arena, apart from each other, and begin where 16 bytes can be loaded. */
static int check_pieces(Engine* e) {
  uint64_t end = 0;
  const char* before = "the beginning";
  for (int i = 0; i < e->settings.piece_count; i++) {
    const Piece* piece = &e->pieces[i];
    if (piece->offset % ALIGNMENT) return fail(e, WRONG_PLAN, "%s begins in the middle of 16 bytes", piece->name);
    if (piece->offset < end + GUARD) return fail(e, WRONG_PLAN, "%s overlaps %s", piece->name, before);
    end = piece->offset + piece->bytes, before = piece->name;
  }
  if (end + GUARD > e->settings.arena_bytes) return fail(e, WRONG_PLAN, "%s ends behind the arena", before);
  return 0;
}

static int take_memory(Engine* e) {
  const Settings* s = &e->settings;
  size_t available = 0, total = 0;
  CALL(cuMemGetInfo_v2, &available, &total);
  const int taken = e->driver.cuMemAlloc_v2(&e->arena, s->arena_bytes);
  if (taken) e->arena = 0;
  if (taken == OUT_OF_MEMORY)
    return fail(e, NO_MEMORY, "%.2f GB for the engine, where %.2f of %.2f GB are free", (double)s->arena_bytes / 1e9,
                (double)available / 1e9, (double)total / 1e9);
  if (called(e, taken, "cuMemAlloc")) return e->failure;
  for (int i = 0; i < STEPS; i++) {
    CALL(cuMemHostAlloc, reinterpret_cast<void**>(&e->steps[i].inputs), s->inputs_bytes, 0);
    CALL(cuMemHostAlloc, reinterpret_cast<void**>(&e->steps[i].results), s->result_bytes, 0);
    CALL(cuEventCreate, &e->steps[i].event, NO_TIMING);
  }
  for (int i = 0; i < s->piece_count; i++) {
    const Piece* piece = &e->pieces[i];
    CALL(cuMemsetD8Async, e->arena + piece->offset + piece->bytes, GUARD_BYTE, GUARD, e->stream);
    if (piece->offset >= s->activations && piece->offset < s->activations_end)
      CALL(cuMemsetD8Async, e->arena + piece->offset, 0xff, piece->bytes, e->stream);
  }
  CALL(cuMemsetD8Async, e->arena + s->zeros, 0, s->zeros_bytes, e->stream);
  for (int i = 0; i < s->upload_count; i++)
    CALL(cuMemcpyHtoDAsync_v2, e->arena + s->uploads[i].offset, s->uploads[i].from, s->uploads[i].bytes, e->stream);
  CALL(cuStreamSynchronize, e->stream);
  return 0;
}

/* At level host: nobody wrote behind a piece. */
static int check_guards(Engine* e) {
  for (int i = 0; i < e->settings.piece_count; i++) {
    const uint8_t* guard = reinterpret_cast<const uint8_t*>(e->arena + e->pieces[i].offset + e->pieces[i].bytes);
    for (int j = 0; j < GUARD; j++)
      if (guard[j] != GUARD_BYTE) return fail(e, OVERWRITTEN, "%s was written behind its end", e->pieces[i].name);
  }
  return 0;
}

template <class T>
static void place(Engine* e, T*& pointer) {
  if (pointer) pointer = reinterpret_cast<T*>(e->arena + reinterpret_cast<uint64_t>(pointer));
}
static void place(Engine* e, Weight& weight) {
  place(e, weight.codes), place(e, weight.scales), place(e, weight.zero_points);
}

/* Offsets in the arena become addresses. */
static void place(Engine* e, Operation* o) {
  switch (o->kind) {
    case GATHER: place(e, o->gather.weight), place(e, o->gather.y); break;
    case NORM:
      place(e, o->norm.a), place(e, o->norm.b), place(e, o->norm.weight), place(e, o->norm.sum), place(e, o->norm.y);
      place(e, o->norm.scales);
      break;
    case GATED: place(e, o->gated.x), place(e, o->gated.y), place(e, o->gated.scales); break;
    case FINITE: place(e, o->finite.a), place(e, o->finite.b); break;
    case QUANTIZE: place(e, o->quantize.x), place(e, o->quantize.y), place(e, o->quantize.scales); break;
    case LINEAR:
      place(e, o->linear.weight), place(e, o->linear.x), place(e, o->linear.x_scales), place(e, o->linear.bias),
          place(e, o->linear.y), place(e, o->linear.sums), place(e, o->linear.ended);
      break;
    case ATTENTION: {
      Attention& a = o->attention;
      place(e, a.qkv), place(e, a.cosines), place(e, a.sines), place(e, a.key_cache), place(e, a.value_cache);
      place(e, a.key_scales), place(e, a.value_scales), place(e, a.query), place(e, a.part_sums);
      place(e, a.part_rows), place(e, a.ended), place(e, a.y), place(e, a.query_norm), place(e, a.key_norm);
      break;
    }
    case CHOOSE:
      place(e, o->choose.logits), place(e, o->choose.part_max), place(e, o->choose.part_index), place(e, o->choose.y);
      place(e, o->choose.ranking);
      break;
  }
}

static Places places_of(const Engine* e, int64_t M, int64_t B, int64_t P) {
  Places to;
  uint64_t end = 0;
  const auto take = [&](uint64_t bytes) {
    const uint64_t here = end;
    end = (here + bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return here;
  };
  to.ids = take((uint64_t)M * 8), to.rows = take((uint64_t)P * 8), to.offsets = take((uint64_t)(B + 1) * 4);
  to.starts = take((uint64_t)B * 4), to.table = take((uint64_t)(B * e->settings.columns) * 4);
  to.draws = take((uint64_t)P * sizeof(Draw));
  to.bytes = end;
  return to;
}

static int find_function(Engine* e, const Launch* launch, void** function) {
  for (int i = 0; i < e->function_count; i++)
    if (!strcmp(e->functions[i].name, launch->kernel)) return *function = e->functions[i].function, 0;
  if (e->function_count == FUNCTIONS) return fail(e, WRONG_PLAN, "more than %d kernels", FUNCTIONS);
  Function* to = &e->functions[e->function_count];
  memcpy(to->name, launch->kernel, sizeof to->name);
  if (called(e, e->driver.cuModuleGetFunction(&to->function, e->module, launch->kernel), launch->kernel))
    return e->failure;
  if (launch->shared_bytes > PLAIN_SHARED_BYTES)
    CALL(cuFuncSetAttribute, to->function, MOST_SHARED_BYTES, (int)launch->shared_bytes);
  e->function_count++;
  *function = to->function;
  return 0;
}

/* Whether some tokens of a step have no result: of them only this says that they are finite. */
static bool says_finite(const StepInputs* step) {
  return step->M > step->P;
}

/* The operation for a step, and its launches; how many. */
static int launches_of(Engine* e, const StepInputs* step, const Places* at, Operation* o, Launch* launches) {
  const DevicePointer inputs = e->arena + e->settings.inputs;
  const int rows = o->wanted ? step->P : step->M;
  switch (o->kind) {
    case GATHER:
      o->gather.ids = reinterpret_cast<const int64_t*>(inputs + at->ids), o->gather.M = step->M;
      o->gather.chosen = reinterpret_cast<const int64_t*>(e->arena + e->settings.tokens);
      return tapeout_cuda_block_gather(&o->gather, launches);
    case NORM:
      o->norm.rows = o->wanted ? reinterpret_cast<const int64_t*>(inputs + at->rows) : nullptr;
      o->norm.count = rows, o->norm.M = step->M;
      return tapeout_cuda_norm(&o->norm, launches);
    case GATED: o->gated.M = rows; return tapeout_cuda_gated(&o->gated, launches);
    case QUANTIZE: o->quantize.M = rows; return tapeout_cuda_quantize(&o->quantize, launches);
    case FINITE:
      if (!says_finite(step)) return 0;
      o->finite.y = reinterpret_cast<uint8_t*>(e->arena + e->settings.tokens + (uint64_t)step->P * sizeof(int64_t));
      o->finite.M = step->M;
      return tapeout_cuda_finite(&o->finite, launches);
    case LINEAR: o->linear.M = rows; return tapeout_cuda_block_linear(&o->linear, e->many_blocks, launches);
    case ATTENTION: {
      Attention* a = &o->attention;
      a->offsets = reinterpret_cast<const int32_t*>(inputs + at->offsets);
      a->starts = reinterpret_cast<const int32_t*>(inputs + at->starts);
      a->table = reinterpret_cast<const int32_t*>(inputs + at->table);
      a->M = step->M, a->B = step->B, a->columns = e->settings.columns;
      a->parts = (step->keys + ATTENTION_PART - 1) / ATTENTION_PART;
      a->few_tokens = step->few_tokens, a->most_tokens = step->most_tokens;
      return tapeout_cuda_attention(a, e->multiprocessors, launches);
    }
    case CHOOSE:
      o->choose.draws = reinterpret_cast<const Draw*>(inputs + at->draws), o->choose.M = step->P;
      return tapeout_cuda_choose(&o->choose, launches);
  }
  return 0;
}

/* What an operation has computed, and its size; of those that a trace asks for. */
static const void* result_of(const StepInputs* step, const Operation* o, size_t* bytes) {
  const int rows = o->wanted ? step->P : step->M;
  switch (o->kind) {
    case LINEAR: *bytes = (size_t)rows * (size_t)o->linear.weight.N * sizeof(float); return o->linear.y;
    case GATHER: *bytes = (size_t)rows * (size_t)o->gather.weight.K * sizeof(float); return o->gather.y;
    case ATTENTION:
      *bytes = (size_t)rows * (size_t)o->attention.H * (size_t)o->attention.D * sizeof(uint16_t);
      return o->attention.y;
  }
  return nullptr;
}

/* Launches the first `count` operations, or only finds their kernels. outputs: where results of operations are copied to,
   each right after it; NULL: none. */
static int run_operations(Engine* e, const StepInputs* step, bool launched, int count, void* const* outputs) {
  const Places at = places_of(e, step->M, step->B, step->P);
  for (int i = 0; i < count; i++) {
    Operation o = e->operations[i];
    if (o.wanted && !step->P) continue;
    Launch launches[MOST_LAUNCHES];
    const int launch_count = launches_of(e, step, &at, &o, launches);
    for (int j = 0; j < launch_count; j++) {
      const Launch* one = &launches[j];
      void *function = nullptr, *parameters = const_cast<void*>(one->parameters);
      if (find_function(e, one, &function)) return e->failure;
      if (launched && called(e,
                             e->driver.cuLaunchKernel(function, one->grid[0], one->grid[1], one->grid[2], one->threads,
                                                      1, 1, one->shared_bytes, e->stream, &parameters, nullptr),
                             one->kernel))
        return e->failure;
    }
    size_t bytes = 0;
    const void* result = outputs && outputs[i] ? result_of(step, &o, &bytes) : nullptr;
    if (result) CALL(cuMemcpyDtoHAsync_v2, outputs[i], reinterpret_cast<DevicePointer>(result), bytes, e->stream);
  }
  return 0;
}

/* A step of a bucket, as its graph has it: block tables of all columns, whatever the sequences' lengths. */
static StepInputs whole_bucket(const Engine* e, int bucket) {
  StepInputs step = {};
  step.M = step.B = step.P = step.bucket = bucket;
  step.keys = e->settings.columns * ATTENTION_BLOCK;
  step.few_tokens = step.most_tokens = 1;
  return step;
}

/* A step of a prompt, of more tokens than any has: only its kernels are found. */
static StepInputs whole_prompt(void) {
  StepInputs step = {};
  step.M = step.keys = step.most_tokens = 1 << 20;
  step.B = step.P = 1;
  return step;
}

/* All kernels are found before: a driver loads one when it is first asked for, which waits for the device and takes
   memory. */
static int capture(Engine* e) {
  const StepInputs prompt = whole_prompt();
  if (run_operations(e, &prompt, false, e->settings.operation_count, nullptr)) return e->failure;
  for (int i = 0; i < e->settings.bucket_count; i++) {
    const StepInputs step = whole_bucket(e, e->buckets[i]);
    if (run_operations(e, &step, false, e->settings.operation_count, nullptr)) return e->failure;
    void* graph = nullptr;
    CALL(cuStreamBeginCapture_v2, e->stream, CAPTURE_THIS_THREAD);
    const int failed = run_operations(e, &step, true, e->settings.operation_count, nullptr);
    CALL(cuStreamEndCapture, e->stream, &graph);
    if (failed) return failed;
    CALL(cuGraphInstantiateWithFlags, &e->graphs[i], graph, 0);
    CALL(cuGraphDestroy, graph);
  }
  return 0;
}

static void* copied(const void* from, size_t bytes) {
  void* to = malloc(bytes ? bytes : 1);
  if (to && bytes) memcpy(to, from, bytes);
  return to;
}

static int open_engine(Engine* e) {
  Settings* s = &e->settings;
  e->operations = static_cast<Operation*>(copied(s->operations, (size_t)s->operation_count * sizeof(Operation)));
  e->pieces = static_cast<Piece*>(copied(s->pieces, (size_t)s->piece_count * sizeof(Piece)));
  e->cache = static_cast<CacheTensor*>(copied(s->cache, (size_t)s->cache_count * sizeof(CacheTensor)));
  e->buckets = static_cast<int32_t*>(copied(s->buckets, (size_t)s->bucket_count * sizeof(int32_t)));
  e->graphs = static_cast<void**>(calloc((size_t)s->bucket_count + 1, sizeof(void*)));
  if (!e->operations || !e->pieces || !e->cache || !e->buckets || !e->graphs)
    return fail(e, NO_MEMORY, "memory of the host");
  if (load_driver(e) || find_device(e) || check_pieces(e) || take_memory(e)) return e->failure;
  for (int i = 0; i < s->operation_count; i++) place(e, &e->operations[i]);
  return capture(e);
}

/* Also of an engine that is half open. */
extern "C" EXPORTED void tapeout_cuda_close(Engine* e) {
  const Driver* d = &e->driver;
  if (e->has_context) d->cuCtxSetCurrent(e->context);
  for (int i = 0; e->graphs && i < e->settings.bucket_count; i++)
    if (e->graphs[i]) d->cuGraphExecDestroy(e->graphs[i]);
  for (int i = 0; i < STEPS; i++) {
    if (e->steps[i].inputs) d->cuMemFreeHost(e->steps[i].inputs);
    if (e->steps[i].results) d->cuMemFreeHost(e->steps[i].results);
    if (e->steps[i].event) d->cuEventDestroy_v2(e->steps[i].event);
  }
  if (e->arena) d->cuMemFree_v2(e->arena);
  if (e->stream) d->cuStreamDestroy_v2(e->stream);
  if (e->module) d->cuModuleUnload(e->module);
  if (e->has_context) d->cuDevicePrimaryCtxRelease_v2(e->device);
  if (e->library) dlclose(e->library);
  free(e->operations), free(e->pieces), free(e->cache), free(e->buckets), free(e->graphs);
  free(e);
}

/* NULL: ``failure`` says why, and ``error`` in words. */
extern "C" EXPORTED Engine* tapeout_cuda_open(const Settings* settings, int* failure, char* error, size_t length) {
  Engine* e = static_cast<Engine*>(calloc(1, sizeof(Engine)));
  if (!e) return *failure = NO_MEMORY, nullptr;
  e->settings = *settings;
  if (!open_engine(e)) return e;
  *failure = e->failure;
  snprintf(error, length, "%s", e->error);
  tapeout_cuda_close(e);
  return nullptr;
}

extern "C" EXPORTED const char* tapeout_cuda_error(const Engine* e) {
  return e->error;
}

/* Inputs of a step as they are copied to the device. Sequences of a bucket that are not there have no tokens, and rows of
   results that are not there are of no token. */
static void write_inputs(const Engine* e, char* inputs, const StepInputs* step, const StepInputs* run,
                         const Places* at) {
  int64_t *ids = reinterpret_cast<int64_t*>(inputs + at->ids), *rows = reinterpret_cast<int64_t*>(inputs + at->rows);
  int32_t *offsets = reinterpret_cast<int32_t*>(inputs + at->offsets),
          *starts = reinterpret_cast<int32_t*>(inputs + at->starts),
          *table = reinterpret_cast<int32_t*>(inputs + at->table);
  Draw* draws = reinterpret_cast<Draw*>(inputs + at->draws);
  const Draw greedy = {0, 1, 0, 0, 0, -1};
  const size_t row = (size_t)e->settings.columns * sizeof *table;
  memcpy(ids, step->ids, (size_t)step->M * sizeof *ids);
  memcpy(rows, step->rows, (size_t)step->P * sizeof *rows);
  memcpy(offsets, step->offsets, (size_t)(step->B + 1) * sizeof *offsets);
  memcpy(starts, step->starts, (size_t)step->B * sizeof *starts);
  memcpy(table, step->table, (size_t)step->B * row);
  for (int i = step->M; i < run->M; i++) ids[i] = 0;
  for (int i = step->P; i < run->P; i++) rows[i] = -1;
  for (int i = 0; i < run->P; i++) draws[i] = step->draws && i < step->P ? step->draws[i] : greedy;
  for (int i = step->B; i < run->B; i++) offsets[i + 1] = step->M, starts[i] = 0;
  memset(table + (size_t)step->B * (size_t)e->settings.columns, 0, (size_t)(run->B - step->B) * row);
}

/* After a failure: what the stream still has of this step reads memory that the next one writes. */
static int drained(Engine* e) {
  e->driver.cuStreamSynchronize(e->stream); /* the failure is the first one's */
  return e->failure;
}

/* Runs the first `count` operations of a step, and waits. outputs: for each operation that is a linear, attention or
   gathers rows, where its result is copied to, or NULL. */
extern "C" EXPORTED int tapeout_cuda_trace(Engine* e, const StepInputs* step, int count, void* const* outputs) {
  e->failure = 0;
  CALL(cuCtxSetCurrent, e->context);
  const Places at = places_of(e, step->M, step->B, step->P);
  if (at.bytes > e->settings.inputs_bytes || count > e->settings.operation_count)
    return fail(e, WRONG_PLAN, "a trace of %d tokens and %d operations", step->M, count);
  if (e->begun != e->ended) return fail(e, WRONG_PLAN, "a trace while a step runs");
  write_inputs(e, e->steps[0].inputs, step, step, &at);
  CALL(cuMemcpyHtoDAsync_v2, e->arena + e->settings.inputs, e->steps[0].inputs, at.bytes, e->stream);
  if (run_operations(e, step, true, count, outputs)) return drained(e);
  CALL(cuStreamSynchronize, e->stream);
  return e->on_host ? check_guards(e) : 0;
}

static Results results_of(const Engine* e, const StepInputs* step) {
  const size_t rows = (size_t)step->P, vocabulary = (size_t)e->settings.vocabulary;
  const size_t finite = says_finite(step) ? ((size_t)step->M + 7) / 8 * 8 : 0; /* what follows is aligned */
  return {rows * sizeof(int64_t) + finite, step->ranking ? rows * sizeof(Ranking) : 0,
          step->logits ? rows * vocabulary * sizeof(float) : 0};
}

/* Puts on the stream what a step consists of: its inputs up, what it runs, its results down, and its end. */
static int queue(Engine* e, const StepInputs* run, uint64_t input_bytes, int graph, const StepInputs* step,
                 const Begun* to) {
  CALL(cuMemcpyHtoDAsync_v2, e->arena + e->settings.inputs, to->inputs, input_bytes, e->stream);
  if (graph < 0) {
    if (run_operations(e, run, true, e->settings.operation_count, nullptr)) return e->failure;
  } else {
    CALL(cuGraphLaunch, e->graphs[graph], e->stream);
  }
  const Results sizes = results_of(e, step);
  char* results = to->results;
  if (sizes.tokens) CALL(cuMemcpyDtoHAsync_v2, results, e->arena + e->settings.tokens, sizes.tokens, e->stream);
  results += sizes.tokens;
  if (sizes.ranking) CALL(cuMemcpyDtoHAsync_v2, results, e->arena + e->settings.ranking, sizes.ranking, e->stream);
  results += sizes.ranking;
  if (sizes.logits) CALL(cuMemcpyDtoHAsync_v2, results, e->arena + e->settings.logits, sizes.logits, e->stream);
  CALL(cuEventRecord, to->event, e->stream);
  return 0;
}

/* Begins a step, which runs behind the one before; 0, or a Failure: then it has not begun. Its inputs may be changed when
   this returns. An id of -1 - i is the token of result i of the step that was begun before. */
extern "C" EXPORTED int tapeout_cuda_begin(Engine* e, const StepInputs* step) {
  e->failure = 0;
  if (e->begun - e->ended == STEPS) return fail(e, WRONG_PLAN, "more than %d steps at once", STEPS);
  Begun* to = &e->steps[e->begun % STEPS];
  CALL(cuCtxSetCurrent, e->context);
  int graph = -1;
  for (int i = 0; step->bucket && i < e->settings.bucket_count; i++)
    if (e->buckets[i] == step->bucket) graph = i;
  const StepInputs run = graph < 0 ? *step : whole_bucket(e, step->bucket);
  if (step->B > run.B || step->M > run.M || step->P > run.P || (step->bucket && (graph < 0 || says_finite(step))))
    return fail(e, WRONG_PLAN, "a step of %d sequences, %d tokens and %d results in the graph of %d", step->B, step->M,
                step->P, step->bucket);
  const Places at = places_of(e, run.M, run.B, run.P);
  if (at.bytes > e->settings.inputs_bytes)
    return fail(e, WRONG_PLAN, "inputs of %llu bytes", (unsigned long long)at.bytes);
  const Results sizes = results_of(e, step);
  to->result_bytes = sizes.tokens + sizes.ranking + sizes.logits;
  if (to->result_bytes > e->settings.result_bytes) return fail(e, WRONG_PLAN, "more results than there is room for");
  write_inputs(e, to->inputs, step, &run, &at);
  if (queue(e, &run, at.bytes, graph, step, to)) return drained(e);
  e->begun++;
  return 0;
}

/* Waits for the step that was begun first of those that have not ended; its results are copied to ``to``. */
extern "C" EXPORTED int tapeout_cuda_finish(Engine* e, void* to) {
  if (e->begun == e->ended) return fail(e, WRONG_PLAN, "no step was begun");
  const Begun* step = &e->steps[e->ended++ % STEPS];
  CALL(cuCtxSetCurrent, e->context);
  CALL(cuEventSynchronize, step->event);
  if (e->on_host && check_guards(e)) return e->failure;
  memcpy(to, step->results, step->result_bytes);
  return 0;
}

/* Copies the first tokens of a block of the cache to another block. The next step sees it. */
extern "C" EXPORTED int tapeout_cuda_copy_block(Engine* e, int64_t source, int64_t target, int64_t tokens) {
  e->failure = 0;
  CALL(cuCtxSetCurrent, e->context);
  for (int i = 0; i < e->settings.cache_count; i++) {
    const CacheTensor* tensor = &e->cache[i];
    const uint64_t head = tensor->token_bytes * ATTENTION_BLOCK, block = head * tensor->heads;
    Copy2D copy = {};
    copy.source_type = copy.target_type = DEVICE_MEMORY;
    copy.source = e->arena + tensor->offset + (uint64_t)source * block, copy.source_pitch = head;
    copy.target = e->arena + tensor->offset + (uint64_t)target * block, copy.target_pitch = head;
    copy.width = tensor->token_bytes * (uint64_t)tokens, copy.height = tensor->heads;
    CALL(cuMemcpy2DAsync_v2, &copy, e->stream);
  }
  return 0;
}
