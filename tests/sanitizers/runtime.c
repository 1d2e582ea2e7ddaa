#include "runtime.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 3, MOST_OPS = 32, MOST_WORK = 1 << 16, COPIES = 2 };

struct Status {
  int code;
  char message[200];
};
struct Domain {
  size_t count;
  const Op* ops[MOST_OPS];
};

/* A graph of one node, or of two equal ones; nothing reads the first one's outputs. Then a node of another domain. */
typedef struct {
  char name[16];
  const Value* constant;
  int type;
} ValueInfo;
typedef struct {
  const char* domain;
  const Op* op;
  const Info* info;
  size_t input_count, output_count;
  const ValueInfo *inputs[MOST_INPUTS], *outputs[MOST_OUTPUTS];
} GraphNode;
typedef struct {
  size_t count;
  const GraphNode* nodes[COPIES + 1];
} Graph;
typedef struct {
  size_t count; /* of nodes that are one step */
} Support;

/* The structs of an execution provider, as far as they are called here. */
typedef struct Compute Compute;
struct Compute {
  uint32_t version;
  Status* (*create_state)(Compute*, void*, void**);
  Status* (*compute)(Compute*, void*, Context*);
  void (*release_state)(Compute*, void*);
};
typedef struct Provider Provider;
struct Provider {
  uint32_t version;
  const char* (*name)(const Provider*);
  Status* (*get_capability)(Provider*, const Graph*, Support*);
  Status* (*compile)(Provider*, const Graph**, const GraphNode**, size_t, Compute**, void**);
  void (*release_computes)(Provider*, Compute**, size_t);
};
typedef struct Factory Factory;
struct Factory {
  uint32_t version;
  const char* (*name)(const Factory*), *(*vendor)(const Factory*);
  void* get_devices;
  Status* (*create)(Factory*, const void*, const void*, size_t, const Options*, const void*, Provider**);
  void (*release)(Factory*, Provider*);
  void* others[10];
  Status* (*count_domains)(Factory*, size_t*);
  Status* (*get_domains)(Factory*, Domain**, size_t);
};

int64_t fail_call = -1, live_statuses, live_domains;
_Atomic int64_t fail_allocation = -1;
const char* failed_name;
int use_threads, own_threads, choose_threads_at_start, runs = 1, copies = 1;
uint64_t constant_inputs;
static uint64_t random_state;
static uint32_t newest_version;
static Factory* factory;
static Domain* domain;
static const Op* running;
static size_t input_of[MOST_INPUTS]; /* which input of the node is which of the step */

Status* CreateEpFactories(const char* name, const ApiBase* base, const void* logger, Factory** factories, size_t most,
                          size_t* count);
Status* ReleaseEpFactory(Factory* factory);

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
  if (domain->count == MOST_OPS) fail("more than %d operators", MOST_OPS);
  domain->ops[domain->count++] = op;
  return NULL;
}
static Status* session_entry(const Options* of, const char* key, char* value, size_t* size) {
  (void)of;
  const int chooses = !strcmp(key, "tapeout.choose_threads");
  if (!strcmp(key, "tapeout.mapped_experts")) return create_status(1, "no such entry");
  if (!chooses && strcmp(key, "tapeout.threads")) fail("an entry of another name: %s", key);
  if (chooses ? !choose_threads_at_start : !own_threads) return create_status(1, "no such entry");
  *size = (size_t)snprintf(value, *size, "%d", chooses ? 1 : own_threads) + 1;
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
  (void)info, (void)index, (void)value;
  TRY(injected());
  *constant = 0;
  return NULL;
}
static Status* get_input(const Context* context, size_t index, const Value** value) {
  TRY(injected());
  const Value* found = index < context->input_count ? &context->inputs[input_of[index]] : NULL;
  *value = found && found->present ? found : NULL;
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

static Status* count_nodes(const Graph* graph, size_t* count) {
  TRY(injected());
  *count = graph->count;
  return NULL;
}
static Status* get_nodes(const Graph* graph, const GraphNode** nodes, size_t count) {
  TRY(injected());
  memcpy(nodes, graph->nodes, count * sizeof *nodes);
  return NULL;
}
static Status* node_type(const GraphNode* node, const char** type) {
  TRY(injected());
  *type = node->op->name(node->op);
  return NULL;
}
static Status* node_domain(const GraphNode* node, const char** name) {
  TRY(injected());
  *name = node->domain;
  return NULL;
}
static Status* count_inputs(const GraphNode* node, size_t* count) {
  TRY(injected());
  *count = node->input_count;
  return NULL;
}
static Status* get_inputs(const GraphNode* node, const ValueInfo** infos, size_t count) {
  TRY(injected());
  memcpy(infos, node->inputs, count * sizeof *infos);
  return NULL;
}
static Status* count_outputs(const GraphNode* node, size_t* count) {
  TRY(injected());
  *count = node->output_count;
  return NULL;
}
static Status* get_outputs(const GraphNode* node, const ValueInfo** infos, size_t count) {
  TRY(injected());
  memcpy(infos, node->outputs, count * sizeof *infos);
  return NULL;
}
static Status* node_attribute(const GraphNode* node, const char* name, const Attribute** found) {
  TRY(injected_for(name));
  *found = NULL;
  for (size_t i = 0; i < node->info->count; i++)
    if (!strcmp(node->info->attributes[i].name, name)) *found = &node->info->attributes[i];
  return NULL;
}
static Status* read_attribute(const Attribute* of, int type, void* value, size_t bytes, size_t* needed) {
  TRY(injected_for(of->name));
  if (type != (of->is_float ? NODE_FLOAT : NODE_INT)) return create_status(2, "an attribute of another type");
  *needed = of->is_float ? sizeof of->f : sizeof of->i;
  if (bytes < *needed) fail("attribute %s: %zu bytes", of->name, bytes);
  memcpy(value, of->is_float ? (const void*)&of->f : (const void*)&of->i, *needed);
  return NULL;
}
static Status* value_name(const ValueInfo* info, const char** name) {
  TRY(injected());
  *name = info->name;
  return NULL;
}
static Status* value_type(const ValueInfo* info, const ValueInfo** type) {
  TRY(injected());
  *type = info;
  return NULL;
}
static Status* element_type(const ValueInfo* type, int* element) {
  TRY(injected());
  *element = type->type;
  return NULL;
}
static Status* is_constant(const ValueInfo* info, _Bool* constant) {
  TRY(injected());
  *constant = info->constant != NULL;
  return NULL;
}
static Status* initializer(const ValueInfo* info, const Value** value) {
  TRY(injected());
  *value = info->constant;
  return NULL;
}

static Status* add_nodes_to_fuse(Support* support, const GraphNode* const* nodes, size_t count, const void* how) {
  (void)nodes, (void)how;
  TRY(injected());
  support->count += count;
  return NULL;
}
static const void* provider_entries[ADD_NODES_TO_FUSE + 1];
static const void* const* provider_api(void) {
  provider_entries[ADD_NODES_TO_FUSE] = (const void*)add_nodes_to_fuse;
  return provider_entries;
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
  api[GRAPH_NODE_COUNT] = (const void*)count_nodes;
  api[GRAPH_NODES] = (const void*)get_nodes;
  api[NODE_TYPE] = (const void*)node_type;
  api[NODE_DOMAIN] = (const void*)node_domain;
  api[NODE_INPUT_COUNT] = (const void*)count_inputs;
  api[NODE_INPUTS] = (const void*)get_inputs;
  api[NODE_OUTPUT_COUNT] = (const void*)count_outputs;
  api[NODE_OUTPUTS] = (const void*)get_outputs;
  api[NODE_ATTRIBUTE] = (const void*)node_attribute;
  api[READ_ATTRIBUTE] = (const void*)read_attribute;
  api[VALUE_NAME] = (const void*)value_name;
  api[VALUE_TYPE] = (const void*)value_type;
  api[TYPE_TENSOR] = (const void*)value_type;
  api[TENSOR_ELEMENT] = (const void*)element_type;
  api[VALUE_IS_CONSTANT] = (const void*)is_constant;
  api[VALUE_INITIALIZER] = (const void*)initializer;
  api[PROVIDER_API] = (const void*)provider_api;
  return version <= newest_version ? api : NULL;
}
static const char* version_string(void) {
  return "0";
}

Status* register_library(uint32_t version) {
  static const ApiBase base = {get_api, version_string};
  newest_version = version;
  size_t count = 0;
  TRY(CreateEpFactories("tapeout", &base, NULL, &factory, 1, &count));
  if (count != 1) fail("%zu execution providers", count);
  TRY(factory->count_domains(factory, &count));
  if (count != 1) fail("%zu domains", count);
  return factory->get_domains(factory, &domain, count);
}
void release_library(void) {
  Status* status = ReleaseEpFactory(factory);
  if (status) fail("release: %s", message_of(status));
  factory = NULL, domain = NULL;
}
const Op* find_op(const char* name) {
  for (size_t i = 0; i < domain->count; i++) {
    const Op* op = domain->ops[i];
    if (!strcmp(op->name(op), name)) return op;
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
  for (size_t i = 0; i < MOST_OUTPUTS; i++) release_value(&context->outputs[i]);
  for (size_t i = 0; i < MOST_INPUTS; i++) release_value(&context->inputs[i]);
}

/* As ONNX Runtime runs what no execution provider takes. */
static Status* run_alone(const Op* op, const Info* info, Context* context) {
  void* kernel = NULL;
  for (size_t i = 0; i < MOST_INPUTS; i++) input_of[i] = i;
  TRY(op->create(op, get_api(newest_version), info, &kernel));
  Status* status = NULL;
  for (int run = 0; run < runs && !status; run++) status = op->compute(kernel, context);
  op->destroy(kernel);
  return status;
}

static Status* run_compiled(Compute* compute, Context* context) {
  void* state = NULL;
  TRY(compute->create_state(compute, NULL, &state));
  Status* status = NULL;
  for (int run = 0; run < runs && !status; run++) status = compute->compute(compute, state, context);
  compute->release_state(compute, state);
  return status;
}

/* ONNX Runtime drops initializers after a step is made: their memory holds something else while it runs. */
static void swap_constants(const GraphNode* node, Context* context, void* dropped[], int drop) {
  for (size_t i = 0; i < node->input_count; i++) {
    Value* value = &context->inputs[i];
    const size_t bytes = node->inputs[i] && node->inputs[i]->constant ? elements_of(value) * size_of(value->type) : 0;
    if (!bytes) continue;
    if (drop) {
      dropped[i] = memcpy(malloc(bytes), value->data, bytes);
      memset(value->data, 0xee, bytes);
    } else {
      memcpy(value->data, dropped[i], bytes);
      free(dropped[i]);
    }
  }
}

static Status* run_on_provider(Provider* provider, const Graph* graph, const GraphNode* fused, Context* context) {
  Support support = {0};
  TRY(provider->get_capability(provider, graph, &support));
  const Graph step = {graph->count - 1, {graph->nodes[0], graph->nodes[1]}}, *steps = &step;
  const GraphNode* node = step.nodes[step.count - 1];
  if (!support.count) return run_alone(node->op, node->info, context);
  if (support.count != step.count) fail("a step of %zu nodes, not %zu", support.count, step.count);
  Compute* compute = NULL;
  void *unused = NULL, *dropped[MOST_INPUTS];
  TRY(provider->compile(provider, &steps, &fused, 1, &compute, &unused)); /* nothing is released after an error */
  swap_constants(node, context, dropped, 1);
  Status* status = run_compiled(compute, context);
  swap_constants(node, context, dropped, 0);
  provider->release_computes(provider, &compute, 1);
  return status;
}

Status* run_node(const Op* op, const Info* info, Context* context) {
  ValueInfo inputs[MOST_INPUTS] = {0}, outputs[COPIES][MOST_OUTPUTS] = {0};
  GraphNode nodes[COPIES], fused = {0};
  running = op;
  for (int copy = 0; copy < COPIES; copy++) {
    nodes[copy] = (GraphNode){"tapeout.kernels", op, info, context->input_count, 0, {0}, {0}};
    nodes[copy].output_count = op->output_count(op);
    for (size_t i = 0; i < nodes[copy].output_count; i++) {
      snprintf(outputs[copy][i].name, sizeof outputs[copy][i].name, "output %d.%zu", copy, i);
      outputs[copy][i].type = op->output_type(op, i);
      nodes[copy].outputs[i] = &outputs[copy][i];
    }
  }
  for (size_t i = 0; i < context->input_count; i++) {
    const Value* value = &context->inputs[i];
    snprintf(inputs[i].name, sizeof inputs[i].name, "input %zu", i);
    if (!value->present) continue;
    inputs[i].constant = (constant_inputs & ~context->written) >> i & 1 ? value : NULL;
    for (int copy = 0; copy < COPIES; copy++) nodes[copy].inputs[i] = &inputs[i];
    if (inputs[i].constant) continue;
    input_of[fused.input_count] = i;
    fused.inputs[fused.input_count++] = &inputs[i];
  }
  const GraphNode* last = &nodes[COPIES - 1];
  fused.output_count = last->output_count;
  memcpy(fused.outputs, last->outputs, sizeof fused.outputs);
  GraphNode other = *last;
  other.domain = "com.example";
  Graph graph = {.count = (size_t)copies + 1};
  for (int i = 0; i < copies; i++) graph.nodes[i] = &nodes[COPIES - copies + i];
  graph.nodes[copies] = &other;
  Provider* provider = NULL;
  TRY(factory->create(factory, NULL, NULL, 0, NULL, NULL, &provider));
  Status* status = run_on_provider(provider, &graph, &fused, context);
  factory->release(factory, provider);
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
