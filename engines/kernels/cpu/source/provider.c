/* This library as an execution provider of ONNX Runtime, which makes steps of its operators.

   ONNX Runtime sorts a graph's nodes so that each comes after those whose results it reads. Of our own operators those that
   follow each other there are one step: no other node can lie between two of them.

   Initializers are copied to memory in huge pages, equal ones once, and ONNX Runtime drops its own. The pages that they came
   from are paged out, so that a file's are in memory once.

   A session may be given the file to leave the weights of experts in: a step reads a few experts, and what the memory has no
   room for the system reads again when it is needed. */
#include "memory.h"
#include "step.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CACHE_LINE = 64, MOST_THREADS = 1024, NAME_BYTES = 64, PATH_BYTES = 4096, NO_FILE = -1 };
/* Memory for initializers is taken in chunks, each as large as all before it together, within these bounds. */
enum { FIRST_CHUNK = HUGE_PAGE, LARGEST_CHUNK = 64 << 20 };
enum { PIECE = 4 << 20 };
#define OPERATOR_DOMAIN "tapeout.kernels"

typedef struct Graph Graph;
typedef struct Node Node;
typedef struct ValueInfo ValueInfo;
typedef struct External External; /* OrtExternalInitializerInfo */
typedef struct Support Support;   /* OrtEpGraphSupportInfo */
typedef struct Device Device;     /* OrtHardwareDevice */
typedef struct ProviderDevice ProviderDevice;

/* ONNX Runtime's structs. It reads the fields of an API version, where those that may be NULL are not needed. */
typedef struct Compute Compute;
typedef struct Provider Provider;
typedef struct Factory Factory;
typedef struct {
  uint32_t version;
  _Bool drop_constants;
} FusionOptions;
struct Compute {
  uint32_t version;
  Status* (*create_state)(Compute*, void* context, void** state);
  Status* (*compute)(Compute*, void* state, Context*);
  void (*release_state)(Compute*, void* state);
  Step step; /* ours */
};
typedef struct Chunk Chunk;
typedef struct Copy Copy;
typedef struct Mapping Mapping;
struct Provider {
  uint32_t version;
  const char* (*name)(const Provider*);
  Status* (*get_capability)(Provider*, const Graph*, Support*);
  Status* (*compile)(Provider*, const Graph**, const Node** fused, size_t count, Compute**, void** contexts);
  void (*release_computes)(Provider*, Compute**, size_t count);
  void* others[24];
  const Factory* factory; /* ours from here */
  Threads* threads;
  int chooses; /* how many of the threads compute */
  Operator* operators;
  Chunk* chunks;
  size_t taken; /* bytes of all chunks */
  Copy* copies;
  int file; /* that experts are left in, or NO_FILE */
  Mapping* mappings;
  Workspaces workspaces;
};
struct Factory {
  uint32_t version;
  const char* (*name)(const Factory*);
  const char* (*vendor)(const Factory*);
  Status* (*get_devices)(Factory*, const Device* const*, size_t count, ProviderDevice**, size_t most, size_t* found);
  Status* (*create)(Factory*, const Device* const*, const void* const* metadata, size_t count, const Options*,
                    const void* logger, Provider**);
  void (*release)(Factory*, Provider*);
  uint32_t (*vendor_id)(const Factory*);
  const char* (*library_version)(const Factory*);
  void* validate_compiled;
  Status* (*create_allocator)(Factory*, const void* memory, const void* options, void** allocator);
  void (*release_allocator)(Factory*, void* allocator);
  Status* (*create_transfer)(Factory*, void** transfer);
  _Bool (*has_streams)(const Factory*);
  void* create_stream;
  void* incompatibility;
  void* create_importer;
  Status* (*count_domains)(Factory*, size_t* count);
  Status* (*get_domains)(Factory*, Domain** domains, size_t count);
  void* others[8];
  Api ort; /* ours from here */
  const void* step_api[API_ENTRIES];
  char registered[NAME_BYTES];
  Operator* operators;
  Domain* domain;
};

struct Chunk {
  Chunk* next;
  size_t left;
  char *free, *memory;
};
/* An initializer in memory of the provider's. Equal ones are one: a table of RoPE, or an embedding and a tied lm_head. */
struct Copy {
  Copy* next;
  Tensor tensor;
};

/* Memory of the file's, which the system may drop and read again. */
struct Mapping {
  Mapping* next;
  void* memory;
  size_t bytes;
};

/* Of the session that the calling thread opened last; 0: it was told how many. */
static _Thread_local size_t chosen_threads;

__attribute__((visibility("default"))) size_t tapeout_chosen_threads(void) {
  return chosen_threads;
}

static Status* out_of_memory(Api ort) {
  return failure(ort, ERROR_FAIL, "out of memory");
}

/* Of a graph. */

static Status* list_nodes(Api ort, const Graph* graph, const Node*** nodes, size_t* count) {
  TRY(((Status * (*)(const Graph*, size_t*)) ort[GRAPH_NODE_COUNT])(graph, count));
  if (!(*nodes = calloc(*count + 1, sizeof **nodes))) return out_of_memory(ort);
  return ((Status * (*)(const Graph*, const Node**, size_t)) ort[GRAPH_NODES])(graph, *nodes, *count);
}

static Status* list_values(Api ort, const Node* node, int outputs, const ValueInfo*** values, size_t* count) {
  TRY(((Status * (*)(const Node*, size_t*)) ort[outputs ? NODE_OUTPUT_COUNT : NODE_INPUT_COUNT])(node, count));
  if (!(*values = calloc(*count + 1, sizeof **values))) return out_of_memory(ort);
  return ((Status * (*)(const Node*, const ValueInfo**, size_t)) ort[outputs ? NODE_OUTPUTS : NODE_INPUTS])(
      node, *values, *count);
}

static Status* type_of(Api ort, const ValueInfo* value, int* type) {
  const void *of = NULL, *tensor = NULL;
  TRY(((Status * (*)(const ValueInfo*, const void**)) ort[VALUE_TYPE])(value, &of));
  TRY(((Status * (*)(const void*, const void**)) ort[TYPE_TENSOR])(of, &tensor));
  return tensor ? ((Status * (*)(const void*, int*)) ort[TENSOR_ELEMENT])(tensor, type) : NULL;
}

/* Which of our operators a node is; NULL: none. */
static Status* operator_of(const Provider* p, const Node* node, const Op** found) {
  Api ort = p->factory->ort;
  const char *domain = "", *type = "";
  *found = NULL;
  TRY(((Status * (*)(const Node*, const char**)) ort[NODE_DOMAIN])(node, &domain));
  TRY(((Status * (*)(const Node*, const char**)) ort[NODE_TYPE])(node, &type));
  for (size_t i = 0; !*found && !strcmp(domain, OPERATOR_DOMAIN) && i < operator_count; i++) {
    const Op* op = &p->operators[i].op;
    if (!strcmp(op->name(op), type)) *found = op;
  }
  return NULL;
}

/* Of the oldest chunk with room, so that small initializers fill what large ones leave: a chunk's last huge page is in
   memory as a whole. NULL if no chunk has room. */
static Chunk* roomy_chunk(const Provider* p, size_t bytes) {
  Chunk* found = NULL;
  for (Chunk* chunk = p->chunks; chunk; chunk = chunk->next)
    if (chunk->left >= bytes) found = chunk;
  return found;
}

/* Memory that lives as long as the provider. NULL if there is none. */
static char* take_memory(Provider* p, size_t bytes) {
  const size_t rounded = (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
  Chunk* chunk = roomy_chunk(p, rounded);
  if (!chunk) {
    size_t size = p->taken < FIRST_CHUNK ? FIRST_CHUNK : p->taken < LARGEST_CHUNK ? p->taken : LARGEST_CHUNK;
    if (size < rounded) size = (rounded + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    chunk = malloc(sizeof *chunk);
    char* memory = chunk ? aligned_alloc(HUGE_PAGE, size) : NULL;
    if (!memory) {
      free(chunk);
      return NULL;
    }
    madvise(memory, size, ADVICE_HUGE_PAGE);
    *chunk = (Chunk){p->chunks, size, memory, memory};
    p->chunks = chunk, p->taken += size;
  }
  char* found = chunk->free;
  chunk->free += rounded, chunk->left -= rounded;
  return found;
}

static void page_out(char* data, size_t bytes) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE); /* 4, 16 or 64 KiB on ARM */
  const uintptr_t first = ((uintptr_t)data + page - 1) / page * page, end = ((uintptr_t)data + bytes) / page * page;
  if (end > first) madvise(data + (first - (uintptr_t)data), end - first, ADVICE_PAGE_OUT);
}

/* A piece at a time, so that the original and the copy of a large tensor are never in memory together. */
static void copy_and_page_out(char* to, char* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += PIECE) {
    const size_t piece = bytes - at < PIECE ? bytes - at : PIECE;
    memcpy(to + at, from + at, piece);
    page_out(from + at, piece);
  }
}

static size_t bytes_of(const Tensor* tensor) {
  return (size_t)tensor->elements * size_of(tensor->type);
}

/* Whether two tensors are equal. Pieces that are equal are paged out: of `b`, and of `a` where it lies in a file, too. */
static int are_equal(const Tensor* a, const Tensor* b, int in_file) {
  if (a->type != b->type || a->rank != b->rank || (a->rank && memcmp(a->dims, b->dims, a->rank * sizeof *a->dims)))
    return 0;
  const size_t bytes = bytes_of(a);
  for (size_t at = 0; at < bytes; at += PIECE) {
    char *x = (char*)a->data + at, *y = (char*)b->data + at;
    const size_t piece = bytes - at < PIECE ? bytes - at : PIECE;
    if (memcmp(x, y, piece)) return 0;
    if (in_file) page_out(x, piece);
    page_out(y, piece);
  }
  return 1;
}

/* An initializer where it came from; not present: the value is none, or may change. */
static Status* initializer_of(Api ort, const ValueInfo* value, Tensor* tensor) {
  const Value* found = NULL;
  _Bool is_constant = 0;
  *tensor = (Tensor){0};
  if (value) TRY(((Status * (*)(const ValueInfo*, _Bool*)) ort[VALUE_IS_CONSTANT])(value, &is_constant));
  if (is_constant) TRY(((Status * (*)(const ValueInfo*, const Value**)) ort[VALUE_INITIALIZER])(value, &found));
  return found ? describe(ort, found, tensor) : NULL;
}

/* Where an initializer lies in a file; `size` is 0 where it lies in none. */
static Status* place_of(Api ort, const ValueInfo* value, int64_t* offset, size_t* size) {
  External* external = NULL;
  *offset = 0, *size = 0;
  TRY(((Status * (*)(const ValueInfo*, External**)) ort[VALUE_EXTERNAL])(value, &external));
  if (!external) return NULL;
  *offset = ((int64_t (*)(const External*))ort[EXTERNAL_OFFSET])(external);
  *size = ((size_t (*)(const External*))ort[EXTERNAL_SIZE])(external);
  ((void (*)(External*))ort[RELEASE_EXTERNAL])(external);
  return NULL;
}

/* Leaves an initializer in the file. `constant` stays as it is where the initializer is not there, where kernels could not
   read it, or where it has less than a page: it is copied then. */
static Status* map_constant(Provider* p, const ValueInfo* value, const Tensor* from, Tensor* constant) {
  Api ort = p->factory->ort;
  const int64_t page = sysconf(_SC_PAGESIZE);
  int64_t offset;
  size_t size;
  struct stat file;
  TRY(place_of(ort, value, &offset, &size));
  if (size != bytes_of(from) || size < (size_t)page || offset < 0 || offset % CACHE_LINE) return NULL;
  if (fstat(p->file, &file) || file.st_size < offset || (uint64_t)(file.st_size - offset) < size)
    return failure(ort, ERROR_FAIL,
                   "the file of weights ends before its last expert"); /* to read there ends the process */
  Mapping* mapping = (Mapping*)take_memory(p, sizeof *mapping);
  const size_t dims_bytes = from->rank * sizeof *from->dims, skipped = (size_t)(offset % page);
  int64_t* dims = (int64_t*)take_memory(p, dims_bytes);
  if (!mapping || !dims) return out_of_memory(ort);
  char* memory = mmap(NULL, skipped + size, PROT_READ, MAP_SHARED, p->file, offset - (int64_t)skipped);
  if (memory == MAP_FAILED) return failure(ort, ERROR_FAIL, "the weights of experts cannot be mapped from their file");
  *mapping = (Mapping){p->mappings, memory, skipped + size};
  p->mappings = mapping;
  if (from->rank) memcpy(dims, from->dims, dims_bytes);
  *constant = *from;
  constant->dims = dims, constant->data = memory + skipped;
  return NULL;
}

/* `op`: that reads it, or NULL. */
static Status* keep_constant(Provider* p, const Op* op, const ValueInfo* value, Tensor* constant) {
  Api ort = p->factory->ort;
  Tensor from;
  TRY(initializer_of(ort, value, &from));
  if (!from.present) return NULL;
  if (p->file != NO_FILE && op && (op->compute == block_experts.compute || op->compute == experts.compute)) {
    TRY(map_constant(p, value, &from, constant));
    if (constant->present) return NULL;
  }
  const Copy* known = p->copies;
  while (known && !are_equal(&known->tensor, &from, 0)) known = known->next;
  if (known) {
    *constant = known->tensor;
    return NULL;
  }
  const size_t bytes = bytes_of(&from), dims_bytes = from.rank * sizeof *from.dims;
  Copy* copy = (Copy*)take_memory(p, sizeof *copy);
  int64_t* dims = (int64_t*)take_memory(p, dims_bytes);
  char* data = take_memory(p, bytes);
  if (!copy || !dims || !data) return out_of_memory(ort);
  if (from.rank) memcpy(dims, from.dims, dims_bytes);
  copy_and_page_out(data, from.data, bytes);
  *constant = from;
  constant->dims = dims, constant->data = data;
  *copy = (Copy){p->copies, *constant};
  p->copies = copy;
  return NULL;
}

/* Which nodes are taken. */

/* Whether a linear has the table of a BlockGather among its initializers. */
static Status* has_table(Api ort, const Node* linear, const Tensor* table, int* found) {
  const ValueInfo** values = NULL;
  size_t count = 0;
  Status* status = list_values(ort, linear, 0, &values, &count);
  for (size_t i = 0; !status && !*found && i < count; i++) {
    Tensor other;
    status = initializer_of(ort, values[i], &other);
    if (!status && other.present) *found = are_equal(table, &other, 1);
  }
  free(values);
  return status;
}

/* Whether the table of a BlockGather is in memory anyway, as that of a tied lm_head. */
static Status* is_tied(const Provider* p, const Node** nodes, size_t count, const Node* gather, int* tied) {
  Api ort = p->factory->ort;
  const ValueInfo** values = NULL;
  size_t inputs = 0;
  Tensor table = {0};
  Status* status = list_values(ort, gather, 0, &values, &inputs);
  if (!status && inputs > 1) status = initializer_of(ort, values[1], &table);
  free(values);
  for (size_t i = count; !status && table.present && !*tied && i-- > 0;) {
    const Op* op;
    status = operator_of(p, nodes[i], &op);
    if (!status && op && op->compute != block_gather.compute) status = has_table(ort, nodes[i], &table, tied);
  }
  return status;
}

/* The operator of a node that may be part of a step, or NULL. An embedding that is not tied is left to ONNX Runtime, which
   maps it from the file: a run reads a few rows of it, and a copy would hold all. */
static Status* part_operator(const Provider* p, const Node** nodes, size_t count, size_t number, const Op** found) {
  *found = NULL;
  if (number == count) return NULL;
  TRY(operator_of(p, nodes[number], found));
  if (!*found || (*found)->compute != block_gather.compute) return NULL;
  int tied = 0;
  TRY(is_tied(p, nodes, count, nodes[number], &tied));
  if (!tied) *found = NULL;
  return NULL;
}

static Status* add_steps(const Provider* p, const Node** nodes, size_t count, Support* support) {
  Api ort = p->factory->ort;
  const void* const* provider_api = ((const void* const* (*)(void))ort[PROVIDER_API])();
  const FusionOptions options = {API_VERSION, 1};
  const Op *op, *next;
  TRY(part_operator(p, nodes, count, 0, &next));
  for (size_t begin = 0, end = 0; end < count; end++) {
    op = next;
    TRY(part_operator(p, nodes, count, end + 1, &next));
    if (op && !next)
      TRY(((Status * (*)(Support*, const Node* const*, size_t, const FusionOptions*)) provider_api[ADD_NODES_TO_FUSE])(
          support, nodes + begin, end + 1 - begin, &options));
    if (!op || !next) begin = end + 1;
  }
  return NULL;
}

static Status* get_capability(Provider* p, const Graph* graph, Support* support) {
  const Node** nodes = NULL;
  size_t count = 0;
  Status* status = list_nodes(p->factory->ort, graph, &nodes, &count);
  if (!status) status = add_steps(p, nodes, count, support);
  free(nodes);
  return status;
}

/* Values by name, while a step is made. */
typedef struct {
  const char** names;
  size_t count, room;
} Names;

static Status* number_of(Api ort, Step* step, Names* names, const ValueInfo* value, int* number) {
  const char* name = "";
  *number = NONE;
  if (value) TRY(((Status * (*)(const ValueInfo*, const char**)) ort[VALUE_NAME])(value, &name));
  if (!*name) return NULL;
  for (size_t i = names->count; *number == NONE && i-- > 0;) /* most values are read soon after they are written */
    if (!strcmp(names->names[i], name)) *number = (int)i;
  if (*number != NONE) return NULL;
  if (names->count == names->room) {
    const size_t room = 2 * names->room + 64;
    const char** more_names = realloc(names->names, room * sizeof *more_names);
    if (more_names) names->names = more_names;
    Plan* more_values = more_names ? realloc(step->values, room * sizeof *more_values) : NULL;
    if (!more_values) return out_of_memory(ort);
    step->values = more_values, names->room = room;
  }
  step->values[names->count] = (Plan){0, NONE, {0}};
  names->names[names->count] = name;
  *number = (int)names->count++;
  return NULL;
}

/* The numbers of a node's inputs or outputs, in memory of the caller's. `op`: of ours that the node is, or NULL. */
static Status* number_values(Provider* p, Step* step, Names* names, const Node* node, const Op* op, int outputs,
                             int** numbers, size_t* count) {
  const ValueInfo** values = NULL;
  Status* status = list_values(step->ort, node, outputs, &values, count);
  if (!status && !(*numbers = calloc(*count + 1, sizeof **numbers))) status = out_of_memory(step->ort);
  for (size_t i = 0; !status && i < *count; i++) {
    status = number_of(step->ort, step, names, values[i], &(*numbers)[i]);
    if (status || (*numbers)[i] == NONE) continue;
    Plan* plan = &step->values[(*numbers)[i]];
    if (outputs)
      status = type_of(step->ort, values[i], &plan->type);
    else if (!plan->constant.present)
      status = keep_constant(p, op, values[i], &plan->constant);
  }
  free(values);
  return status;
}

static Status* make_part(Provider* p, Step* step, Names* names, const Node* node, Part* part) {
  TRY(operator_of(p, node, &part->op));
  if (!part->op) return failure(step->ort, ERROR_FAIL, "a step with a node of others");
  TRY(number_values(p, step, names, node, part->op, 0, &part->inputs, &part->input_count));
  TRY(number_values(p, step, names, node, part->op, 1, &part->outputs, &part->output_count));
  const Creation creation = {node, step, part};
  return part->op->create(part->op, p->factory->step_api, (const Info*)&creation, &part->kernel);
}

static Status* find_last_reads(Step* step) {
  int* last = malloc((step->value_count + 1) * sizeof *last); /* of each value: the part that reads or writes it last */
  if (!last) return out_of_memory(step->ort);
  for (size_t i = 0; i < step->part_count; i++) {
    const Part* part = &step->parts[i];
    for (size_t j = 0; j < part->input_count; j++)
      if (part->inputs[j] != NONE) last[part->inputs[j]] = (int)i;
    for (size_t j = 0; j < part->output_count; j++)
      if (part->outputs[j] != NONE) last[part->outputs[j]] = (int)i;
  }
  int failed = 0;
  for (size_t i = 0; !failed && i < step->part_count; i++) {
    Part* part = &step->parts[i];
    const size_t count = part->input_count + part->output_count;
    failed = !(part->last = malloc((count + 1) * sizeof *part->last));
    for (size_t j = 0; !failed && j < count; j++) {
      const int number = j < part->input_count ? part->inputs[j] : part->outputs[j - part->input_count];
      if (number != NONE && last[number] == (int)i) part->last[part->last_count++] = number;
    }
  }
  free(last);
  return failed ? out_of_memory(step->ort) : NULL;
}

static Status* make_step(Provider* p, const Graph* graph, const Node* fused, Step* step) {
  Names names = {0};
  const Node** nodes = NULL;
  int* outputs = NULL;
  size_t count = 0;
  Status* status = number_values(p, step, &names, fused, NULL, 0, &step->inputs, &step->input_count);
  if (!status) status = number_values(p, step, &names, fused, NULL, 1, &outputs, &count);
  for (size_t i = 0; !status && i < count; i++) step->values[outputs[i]].output = (int)i;
  if (!status) status = list_nodes(step->ort, graph, &nodes, &count);
  if (!status && !(step->parts = calloc(count + 1, sizeof *step->parts))) status = out_of_memory(step->ort);
  while (!status && step->part_count < count) {
    Part* part = &step->parts[step->part_count];
    status = make_part(p, step, &names, nodes[step->part_count++], part);
  }
  step->value_count = names.count;
  if (!status) status = find_last_reads(step);
  free(names.names);
  free(nodes);
  free(outputs);
  return status;
}

static Status* create_state(Compute* self, void* context, void** state) {
  (void)context;
  *state = self;
  return NULL;
}
static Status* compute(Compute* self, void* state, Context* context) {
  (void)state;
  return run_step(&self->step, context);
}
static void release_state(Compute* self, void* state) {
  (void)self, (void)state;
}

static void release_compute(Compute* c) {
  Step* step = &c->step;
  for (size_t i = 0; i < step->part_count; i++) {
    Part* part = &step->parts[i];
    if (part->kernel) part->op->destroy(part->kernel);
    free(part->inputs);
    free(part->outputs);
    free(part->last);
  }
  free_frames(step);
  free(step->parts);
  free(step->inputs);
  free(step->values);
  pthread_mutex_destroy(&step->lock);
  free(c);
}
static void release_computes(Provider* p, Compute** computes, size_t count) {
  (void)p;
  for (size_t i = 0; i < count; i++) {
    if (computes[i]) release_compute(computes[i]);
    computes[i] = NULL;
  }
}

/* By the linears of all steps. */
static Status* choose(Provider* p, Compute** computes, size_t count) {
  size_t most = 0, found = 0;
  for (size_t i = 0; i < count; i++) most += computes[i]->step.part_count;
  void** linears = malloc((most + 1) * sizeof *linears);
  if (!linears) return out_of_memory(p->factory->ort);
  for (size_t i = 0; i < count; i++) {
    const Step* step = &computes[i]->step;
    for (size_t j = 0; j < step->part_count; j++)
      if (step->parts[j].op->compute == block_linear.compute) linears[found++] = step->parts[j].kernel;
  }
  chosen_threads = choose_threads(p->threads, linears, found);
  free(linears);
  return NULL;
}

static Status* compile(Provider* p, const Graph** graphs, const Node** fused, size_t count, Compute** computes,
                       void** contexts) {
  (void)contexts;
  Status* status = NULL;
  for (size_t i = 0; i < count; i++) computes[i] = NULL;
  for (size_t i = 0; !status && i < count; i++) {
    Compute* c = computes[i] = calloc(1, sizeof *c);
    if (!c) {
      status = out_of_memory(p->factory->ort);
      break;
    }
    c->version = API_VERSION, c->create_state = create_state, c->compute = compute, c->release_state = release_state;
    c->step.ort = p->factory->ort, c->step.workspaces = &p->workspaces;
    pthread_mutex_init(&c->step.lock, NULL);
    status = make_step(p, graphs[i], fused[i], &c->step);
  }
  chosen_threads = 0;
  if (!status && p->threads && p->chooses) status = choose(p, computes, count);
  if (status) release_computes(p, computes, count); /* ONNX Runtime releases only what was compiled without an error */
  return status;
}

/* Of the options of a session; empty where there is no such entry, or no room for it. */
static void session_text(Api ort, const Options* options, const char* entry, char* text, size_t size) {
  Status* status =
      ((Status * (*)(const Options*, const char*, char*, size_t*)) ort[SESSION_ENTRY])(options, entry, text, &size);
  if (status) *text = 0;
  release_status(ort, status);
}

/* A number in them; 0 where there is no such entry. */
static size_t session_number(Api ort, const Options* options, const char* entry) {
  char text[16];
  session_text(ort, options, entry, text, sizeof text);
  const long count = strtol(text, NULL, 10);
  return count > 0 && count <= MOST_THREADS ? (size_t)count : 0;
}

static const char* provider_name(const Provider* p) {
  return p->factory->registered;
}

static void release_provider(Factory* factory, Provider* p) {
  (void)factory;
  for (const Mapping* m = p->mappings; m; m = m->next) munmap(m->memory, m->bytes);
  while (p->chunks) {
    Chunk* chunk = p->chunks;
    p->chunks = chunk->next;
    free(chunk->memory);
    free(chunk);
  }
  free_workspaces(&p->workspaces);
  pthread_mutex_destroy(&p->workspaces.lock);
  if (p->file != NO_FILE) close(p->file);
  free(p->threads);
  free(p->operators);
  free(p);
}

static Status* create_provider(Factory* factory, const Device* const* devices, const void* const* metadata,
                               size_t count, const Options* options, const void* logger, Provider** created) {
  (void)devices, (void)metadata, (void)count, (void)logger;
  const size_t threads = session_number(factory->ort, options, "tapeout.threads"); /* 0: those of ONNX Runtime */
  char path[PATH_BYTES];
  session_text(factory->ort, options, "tapeout.mapped_experts", path, sizeof path);
  Provider* p = calloc(1, sizeof *p);
  if (!p) return out_of_memory(factory->ort);
  pthread_mutex_init(&p->workspaces.lock, NULL);
  p->version = API_VERSION, p->name = provider_name, p->get_capability = get_capability, p->compile = compile;
  p->release_computes = release_computes, p->factory = factory;
  p->threads = threads ? create_threads(threads) : NULL;
  p->chooses = session_number(factory->ort, options, "tapeout.choose_threads") != 0;
  p->operators = create_operators(p->threads);
  p->file = *path ? open(path, O_RDONLY) : NO_FILE;
  if (*path && p->file == NO_FILE) {
    release_provider(factory, p);
    return failure(factory->ort, ERROR_FAIL, "the file of weights cannot be opened");
  }
  if ((threads && !p->threads) || !p->operators) {
    release_provider(factory, p);
    return out_of_memory(factory->ort);
  }
  *created = p;
  return NULL;
}

/* Where an execution provider has no memory, transfers or streams of its own. */
static Status* no_allocator(Factory* f, const void* memory, const void* options, void** allocator) {
  (void)f, (void)memory, (void)options;
  *allocator = NULL;
  return NULL;
}
static void release_allocator(Factory* f, void* allocator) {
  (void)f, (void)allocator;
}
static Status* no_transfer(Factory* f, void** transfer) {
  (void)f;
  *transfer = NULL;
  return NULL;
}
static _Bool has_streams(const Factory* f) {
  return (void)f, 0;
}

static const char* factory_name(const Factory* f) {
  return f->registered;
}
static const char* vendor(const Factory* f) {
  return (void)f, "Tapeout";
}
static uint32_t vendor_id(const Factory* f) {
  return (void)f, 0; /* of PCI: none */
}
static const char* library_version(const Factory* f) {
  return (void)f, "1.0.0"; /* ONNX Runtime wants a semantic version; a library is known by its hash */
}

/* The first processor. */
static Status* get_devices(Factory* f, const Device* const* devices, size_t count, ProviderDevice** found, size_t most,
                           size_t* found_count) {
  const void* const* provider_api = ((const void* const* (*)(void))f->ort[PROVIDER_API])();
  *found_count = 0;
  for (size_t i = 0; i < count && !*found_count && most; i++) {
    if (((int (*)(const Device*))f->ort[DEVICE_TYPE])(devices[i])) continue; /* OrtHardwareDeviceType_CPU is 0 */
    TRY(((Status * (*)(Factory*, const Device*, const void*, const void*, ProviderDevice**))
             provider_api[CREATE_DEVICE])(f, devices[i], NULL, NULL, found));
    *found_count = 1;
  }
  return NULL;
}

/* So that ONNX Runtime knows the operators of a graph before it asks for steps. */
static Status* count_domains(Factory* f, size_t* count) {
  (void)f;
  *count = 1;
  return NULL;
}
static Status* get_domains(Factory* f, Domain** domains, size_t count) {
  if (count) domains[0] = f->domain;
  return NULL;
}

static Status* create_domain(Factory* f) {
  if (!(f->operators = create_operators(NULL))) return out_of_memory(f->ort);
  TRY(((Status * (*)(const char*, Domain**)) f->ort[CREATE_DOMAIN])(OPERATOR_DOMAIN, &f->domain));
  for (size_t i = 0; i < operator_count; i++)
    TRY(((Status * (*)(Domain*, const Op*)) f->ort[DOMAIN_ADD])(f->domain, &f->operators[i].op));
  return NULL;
}

__attribute__((visibility("default"))) Status* ReleaseEpFactory(Factory* f) {
  if (f->domain) ((void (*)(Domain*))f->ort[RELEASE_DOMAIN])(f->domain);
  free(f->operators);
  free(f);
  return NULL;
}

__attribute__((visibility("default"))) Status* CreateEpFactories(const char* name, const ApiBase* base,
                                                                 const void* logger, Factory** factories, size_t most,
                                                                 size_t* count) {
  (void)logger;
  Api ort = base->get(API_VERSION);
  if (!ort)
    return failure(base->get(1), ERROR_FAIL, "this ONNX Runtime is older than 1.24, the first that the kernels run in");
  if (!has_scratch()) return failure(ort, ERROR_FAIL, "the process has no thread-specific keys left");
  if (!most || strlen(name) >= NAME_BYTES)
    return failure(ort, ERROR_ARGUMENT, "the name of the provider is longer than 63 characters");
  Factory* f = calloc(1, sizeof *f);
  if (!f) return out_of_memory(ort);
  *f = (Factory){.version = API_VERSION,
                 .name = factory_name,
                 .vendor = vendor,
                 .get_devices = get_devices,
                 .create = create_provider,
                 .release = release_provider,
                 .vendor_id = vendor_id,
                 .library_version = library_version,
                 .create_allocator = no_allocator,
                 .release_allocator = release_allocator,
                 .create_transfer = no_transfer,
                 .has_streams = has_streams,
                 .count_domains = count_domains,
                 .get_domains = get_domains,
                 .ort = ort};
  strcpy(f->registered, name);
  fill_step_api(ort, f->step_api);
  Status* status = create_domain(f);
  if (status) {
    ReleaseEpFactory(f);
    return status;
  }
  factories[0] = f, *count = 1;
  return NULL;
}
