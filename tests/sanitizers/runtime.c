#include "runtime.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 3, MOST_OPS = 16, MOST_WORK = 1 << 16 };

struct Status {
  int code;
  char message[200];
};
struct Domain {
  size_t count;
  const Op* ops[MOST_OPS];
};
struct Options {
  Domain* domain;
};

int64_t fail_call = -1, live_statuses, live_domains;
_Atomic int64_t fail_allocation = -1;
const char* failed_name;
int use_threads, own_threads, runs = 1;
uint64_t constant_inputs;
static uint64_t random_state;
static uint32_t newest_version;
static Options options;
static const Op* running;
static const Context* running_context;

Status* RegisterCustomOps(Options* options, const ApiBase* base);

/* The sanitizers' own names for their defaults. ThreadSanitizer asks before it checks. */
#define UNCHECKED __attribute__((no_sanitize("thread")))
const char *__asan_default_options(void), *__tsan_default_options(void);
const char* __asan_default_options(void) {
  return "handle_abort=1:detect_leaks=1:strict_init_order=1";
}
UNCHECKED const char* __tsan_default_options(void) {
  return "halt_on_error=1";
}

_Noreturn void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
  abort();
}

void seed_random(uint64_t seed) {
  random_state = seed;
}
uint64_t next_random(void) { /* splitmix64 */
  uint64_t x = random_state += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
int64_t random_int(int64_t first, int64_t last) {
  return first + (int64_t)(next_random() % (uint64_t)(last - first + 1));
}

static Status* create_status(int code, const char* message) {
  Status* status = malloc(sizeof *status);
  status->code = code;
  snprintf(status->message, sizeof status->message, "%s", message);
  live_statuses++;
  return status;
}
void drop_status(Status* status) {
  live_statuses--;
  free(status);
}
const char* message_of(const Status* status) {
  return status->message;
}

/* The failure of this call, or NULL. */
static Status* injected_for(const char* name) {
  if (fail_call < 0 || fail_call--) return NULL;
  failed_name = name;
  return create_status(1, "injected");
}
static Status* injected(void) {
  return injected_for(NULL);
}

static Status* create_domain(const char* name, Domain** domain) {
  if (strcmp(name, "tapeout.kernels")) fail("a domain of another name: %s", name);
  TRY(injected());
  *domain = calloc(1, sizeof **domain);
  live_domains++;
  return NULL;
}
static Status* domain_add(Domain* domain, const Op* op) {
  TRY(injected());
  domain->ops[domain->count++] = op;
  return NULL;
}
static Status* session_entry(const Options* of, const char* key, char* value, size_t* size) {
  (void)of;
  if (strcmp(key, "tapeout.threads")) fail("an entry of another name: %s", key);
  if (!own_threads) return create_status(1, "no such entry");
  *size = (size_t)snprintf(value, *size, "%d", own_threads) + 1;
  return NULL;
}
static Status* add_domain(Options* to, Domain* domain) {
  TRY(injected());
  to->domain = domain;
  return NULL;
}
static void release_domain(Domain* domain) {
  live_domains--;
  free(domain);
}

static const Attribute* attribute_of(const Info* info, const char* name, int is_float) {
  for (size_t i = 0; i < info->count; i++)
    if (!strcmp(info->attributes[i].name, name) && info->attributes[i].is_float == is_float)
      return &info->attributes[i];
  return NULL;
}
static Status* get_attribute_float(const Info* info, const char* name, float* value) {
  TRY(injected_for(name));
  const Attribute* found = attribute_of(info, name, 1);
  if (!found) return create_status(1, "no such attribute");
  *value = found->f;
  return NULL;
}
static Status* get_attribute_int(const Info* info, const char* name, int64_t* value) {
  TRY(injected_for(name));
  const Attribute* found = attribute_of(info, name, 0);
  if (!found) return create_status(1, "no such attribute");
  *value = found->i;
  return NULL;
}

static Status* get_constant_input(const Info* info, size_t index, int* constant, const Value** value) {
  (void)info;
  TRY(injected());
  *constant = index < running_context->input_count && (constant_inputs >> index & 1);
  if (*constant && running_context->inputs[index].present) *value = &running_context->inputs[index];
  return NULL;
}
static Status* get_input(const Context* context, size_t index, const Value** value) {
  TRY(injected());
  *value = index < context->input_count && context->inputs[index].present ? &context->inputs[index] : NULL;
  return NULL;
}
static Status* get_output(Context* context, size_t index, const int64_t* dims, size_t rank, Value** value) {
  TRY(injected());
  if (index >= MOST_OUTPUTS) fail("output %zu of %d", index, MOST_OUTPUTS);
  Value* output = &context->outputs[index];
  if (output->present && (output->rank != rank || memcmp(output->dims, dims, rank * sizeof *dims)))
    return create_status(2, "the bound output has another shape");
  if (!output->present) {
    new_value(output, running->output_type(running, index), rank, dims);
    if (output->data) memset(output->data, 0xab, elements_of(output) * size_of(output->type));
  }
  *value = output;
  return NULL;
}
static Status* tensor_data(const Value* value, void** data) {
  TRY(injected());
  *data = value->data;
  return NULL;
}
static Status* tensor_type_shape(const Value* value, int* type, const int64_t** dims, size_t* rank) {
  TRY(injected());
  *type = value->type;
  *dims = value->rank ? value->dims : NULL;
  *rank = value->rank;
  return NULL;
}

typedef struct {
  void (*work)(void*, size_t);
  void* state;
  size_t total;
  _Atomic size_t next;
} Loop;

static void* run_loop(void* state) {
  Loop* loop = state;
  for (size_t i; (i = loop->next++) < loop->total;) loop->work(loop->state, i);
  return NULL;
}
static Status* parallel_for(const Context* context, void (*work)(void*, size_t), size_t total, size_t batches,
                            void* state) {
  (void)context, (void)batches;
  TRY(injected());
  if (use_threads) {
    Loop loop = {work, state, total, 0};
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
      if (pthread_create(&threads[i], NULL, run_loop, &loop)) fail("no thread");
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    return NULL;
  }
  static size_t order[MOST_WORK];
  if (total > MOST_WORK) fail("a parallel for of %zu", total);
  for (size_t i = 0; i < total; i++) {
    size_t at = (size_t)random_int(0, (int64_t)i);
    order[i] = order[at];
    order[at] = i;
  }
  for (size_t i = 0; i < total; i++) work(state, order[i]);
  return NULL;
}

static const void* api[TENSOR_TYPE_SHAPE + 1];

static Api get_api(uint32_t version) {
  api[CREATE_STATUS] = (const void*)create_status;
  api[CREATE_DOMAIN] = (const void*)create_domain;
  api[DOMAIN_ADD] = (const void*)domain_add;
  api[ADD_DOMAIN] = (const void*)add_domain;
  api[TENSOR_DATA] = (const void*)tensor_data;
  api[ATTRIBUTE_FLOAT] = (const void*)get_attribute_float;
  api[ATTRIBUTE_INT] = (const void*)get_attribute_int;
  api[CONSTANT_INPUT] = (const void*)get_constant_input;
  api[GET_INPUT] = (const void*)get_input;
  api[GET_OUTPUT] = (const void*)get_output;
  api[RELEASE_STATUS] = (const void*)drop_status;
  api[RELEASE_DOMAIN] = (const void*)release_domain;
  api[PARALLEL_FOR] = (const void*)parallel_for;
  api[SESSION_ENTRY] = (const void*)session_entry;
  api[TENSOR_TYPE_SHAPE] = (const void*)tensor_type_shape;
  return version <= newest_version ? api : NULL;
}
static const char* version_string(void) {
  return "0";
}

Status* register_library(uint32_t version) {
  static const ApiBase base = {get_api, version_string};
  newest_version = version;
  return RegisterCustomOps(&options, &base);
}
void release_library(void) {
  release_domain(options.domain);
  options.domain = NULL;
}
const Op* find_op(const char* name, size_t input, int type) {
  for (size_t i = 0; i < options.domain->count; i++) {
    const Op* op = options.domain->ops[i];
    if (!strcmp(op->name(op), name) && op->input_type(op, input) == type) return op;
  }
  fail("no operator %s", name);
}

int64_t elements_of(const Value* value) {
  int64_t elements = 1;
  for (size_t i = 0; i < value->rank; i++) elements *= value->dims[i];
  return elements;
}
void new_value(Value* value, int type, size_t rank, const int64_t* dims) {
  *value = (Value){.present = 1, .type = type, .rank = rank};
  if (rank) memcpy(value->dims, dims, rank * sizeof *dims);
  const size_t bytes = elements_of(value) * size_of(type);
  value->data = value->block = bytes ? malloc(bytes) : NULL;
}
void release_value(Value* value) {
  free(value->block);
  *value = (Value){0};
}
void release_context(Context* context) {
  for (size_t i = 0; i < MOST_OUTPUTS; i++) {
    for (size_t j = 0; j < MOST_INPUTS; j++) /* memory that is bound as an input, too */
      if (context->outputs[i].block == context->inputs[j].block) context->outputs[i].block = NULL;
    release_value(&context->outputs[i]);
  }
  for (size_t i = 0; i < MOST_INPUTS; i++) release_value(&context->inputs[i]);
}

Status* run_node(const Op* op, const Info* info, Context* context) {
  void* kernel = NULL;
  running = op, running_context = context;
  Status* status = op->create(op, get_api(newest_version), info, &kernel);
  if (status) return status;
  for (int run = 0; run < runs && !status; run++) status = op->compute(kernel, context);
  op->destroy(kernel);
  return status;
}

/* clang calls these, which gcc's runtime of ThreadSanitizer lacks; it checks the functions that they call. */
#if __has_feature(thread_sanitizer)
void *__tsan_memcpy(void*, const void*, size_t), *__tsan_memset(void*, int, size_t);
UNCHECKED void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  return memcpy(to, from, bytes);
}
UNCHECKED void* __tsan_memset(void* to, int byte, size_t bytes) {
  return memset(to, byte, bytes);
}
#endif

/* The linker sends the kernels' allocations here. */
void* __real_aligned_alloc(size_t alignment, size_t bytes);
void* __wrap_aligned_alloc(size_t alignment, size_t bytes) {
  return fail_allocation >= 0 && !fail_allocation-- ? NULL : __real_aligned_alloc(alignment, bytes);
}
