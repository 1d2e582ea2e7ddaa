/* Runs a step.

   ONNX Runtime looks up what a node needs each time that it runs it, in memory that weights have driven out of the caches.
   A step asks for its inputs once, keeps what lies between its operators in memory that it is lent, and calls one operator
   after another: a decode step of the default model (150 nodes) is 1.07 times as fast at one stream, and 1.03 times at
   8 and 32.

   An operator does not notice: it is given a table of functions like ONNX Runtime's, in which those that it calls are
   replaced. Several runs may go on at once; each has a frame and a workspace. */
#include "step.h"

#include "memory.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_RANK = 8, CACHE_LINE = 64 };

/* A value in a run. Its memory is the node's (an input or an output), or a buffer of the workspace. */
typedef struct {
  Tensor tensor;
  int64_t dims[MAX_RANK];
  int buffer; /* or NONE */
} Held;

typedef struct {
  void* memory;
  size_t bytes;
  int used;
} Buffer;

struct Workspace {
  Workspace* next;
  size_t count, room;
  Buffer* buffers;
};

struct Frame {
  Frame* next;
  const Step* step;
  Context* context; /* ONNX Runtime's */
  const Part* part; /* that runs */
  Workspace* workspace;
  Held values[];
};

/* What an operator calls. Its Context is a frame, its Values are `Held`. */

static Status* get_input(const Context* context, size_t index, const Value** value) {
  const Frame* f = (const Frame*)context;
  const int number = index < f->part->input_count ? f->part->inputs[index] : NONE;
  *value = number == NONE || !f->values[number].tensor.present ? NULL : (const Value*)&f->values[number];
  return NULL;
}

static Status* tensor_data(const Value* value, void** data) {
  *data = ((const Held*)value)->tensor.data;
  return NULL;
}

static Status* tensor_type_shape(const Value* value, int* type, const int64_t** dims, size_t* rank) {
  const Tensor* tensor = &((const Held*)value)->tensor;
  *type = tensor->type, *dims = tensor->dims, *rank = tensor->rank;
  return NULL;
}

/* Of the buffers that are free the smallest that is large enough, else the largest, else a new one; NONE: no memory. */
static int find_buffer(Workspace* w, size_t bytes) {
  int found = NONE;
  for (size_t i = 0; i < w->count; i++) {
    if (w->buffers[i].used) continue;
    const size_t here = w->buffers[i].bytes, best = found == NONE ? 0 : w->buffers[found].bytes;
    if (found == NONE || (here >= bytes ? best < bytes || here < best : here > best)) found = (int)i;
  }
  if (found != NONE) return found;
  if (w->count == w->room) {
    const size_t room = 2 * w->room + 16;
    Buffer* more = realloc(w->buffers, room * sizeof *more);
    if (!more) return NONE;
    w->buffers = more, w->room = room;
  }
  w->buffers[w->count] = (Buffer){0};
  return (int)w->count++;
}

/* NONE if there is no memory. */
static int take_buffer(Workspace* w, size_t bytes) {
  const int found = find_buffer(w, bytes);
  if (found == NONE) return NONE;
  Buffer* b = &w->buffers[found];
  if (b->bytes < bytes || !b->memory) {
    free(b->memory);
    *b = (Buffer){0};
    if (bytes > PTRDIFF_MAX - HUGE_PAGE) return NONE;
    /* A tile of a linear writes as many rows as there are tokens, each to another page where pages are small. */
    const size_t unit = bytes > HUGE_PAGE / 4 ? HUGE_PAGE : CACHE_LINE;
    const size_t rounded = bytes ? (bytes + unit - 1) / unit * unit : unit;
    if (!(b->memory = aligned_alloc(unit, rounded))) return NONE;
    if (unit == HUGE_PAGE) madvise(b->memory, rounded, ADVICE_HUGE_PAGE);
    b->bytes = rounded;
  }
  b->used = 1;
  return found;
}

static void give_back(Frame* f, int number) {
  Held* value = &f->values[number];
  if (value->buffer != NONE) f->workspace->buffers[value->buffer].used = 0;
  value->buffer = NONE;
}

static Status* get_output(Context* context, size_t index, const int64_t* dims, size_t rank, Value** result) {
  Frame* f = (Frame*)context;
  Api ort = f->step->ort;
  const int number = index < f->part->output_count ? f->part->outputs[index] : NONE;
  *result = NULL;
  if (number == NONE) return NULL;
  Held* value = &f->values[number];
  const Plan* plan = &f->step->values[number];
  if (rank > MAX_RANK) return failure(ort, ERROR_ARGUMENT, "an output has too many dimensions");
  int64_t bytes = (int64_t)size_of(plan->type), elements = 1;
  for (size_t i = 0; i < rank; i++) {
    if (dims[i] < 0 || __builtin_mul_overflow(bytes, dims[i], &bytes))
      return failure(ort, ERROR_ARGUMENT, "an output has an invalid shape");
    elements *= value->dims[i] = dims[i];
  }
  value->tensor = (Tensor){1, plan->type, rank, value->dims, elements, NULL};
  if (plan->output != NONE) {
    Value* outer = NULL;
    TRY(((Status * (*)(Context*, size_t, const int64_t*, size_t, Value**)) ort[GET_OUTPUT])(
        f->context, (size_t)plan->output, dims, rank, &outer));
    if (outer) TRY(data_of(ort, outer, &value->tensor.data));
    *result = outer ? (Value*)value : NULL;
    return NULL;
  }
  value->buffer = take_buffer(f->workspace, (size_t)bytes);
  if (value->buffer == NONE) return failure(ort, ERROR_FAIL, "out of memory");
  value->tensor.data = f->workspace->buffers[value->buffer].memory;
  *result = (Value*)value;
  return NULL;
}

static Status* parallel_for(const Context* context, void (*work)(void*, size_t), size_t total, size_t batches,
                            void* state) {
  const Frame* f = (const Frame*)context;
  return ((Status * (*)(const Context*, void (*)(void*, size_t), size_t, size_t, void*)) f->step->ort[PARALLEL_FOR])(
      f->context, work, total, batches, state);
}

static Status* attribute(const Info* info, const char* name, int type, void* value, size_t bytes) {
  const Creation* of = (const Creation*)info;
  Api ort = of->step->ort;
  const void* found = NULL;
  TRY(((Status * (*)(const void*, const char*, const void**)) ort[NODE_ATTRIBUTE])(of->node, name, &found));
  if (!found) return failure(ort, ERROR_ARGUMENT, name);
  return ((Status * (*)(const void*, int, void*, size_t, size_t*)) ort[READ_ATTRIBUTE])(found, type, value, bytes,
                                                                                        &bytes);
}
static Status* int_attribute(const Info* info, const char* name, int64_t* value) {
  return attribute(info, name, NODE_INT, value, sizeof *value);
}
static Status* float_attribute(const Info* info, const char* name, float* value) {
  return attribute(info, name, NODE_FLOAT, value, sizeof *value);
}

static Status* constant_value(const Info* info, size_t index, int* constant, const Value** value) {
  const Creation* of = (const Creation*)info;
  const int number = index < of->part->input_count ? of->part->inputs[index] : NONE;
  const Tensor* found = number == NONE ? NULL : &of->step->values[number].constant;
  *constant = found && found->present;
  *value = *constant ? (const Value*)found : NULL; /* a Held begins with its tensor */
  return NULL;
}

void fill_step_api(Api ort, const void** table) {
  memcpy(table, ort, API_ENTRIES * sizeof *table);
  table[GET_INPUT] = (const void*)get_input;
  table[GET_OUTPUT] = (const void*)get_output;
  table[TENSOR_DATA] = (const void*)tensor_data;
  table[TENSOR_TYPE_SHAPE] = (const void*)tensor_type_shape;
  table[PARALLEL_FOR] = (const void*)parallel_for;
  table[ATTRIBUTE_INT] = (const void*)int_attribute;
  table[ATTRIBUTE_FLOAT] = (const void*)float_attribute;
  table[CONSTANT_INPUT] = (const void*)constant_value;
}

static Frame* take_frame(Step* step) {
  pthread_mutex_lock(&step->lock);
  Frame* f = step->idle;
  if (f) step->idle = f->next;
  pthread_mutex_unlock(&step->lock);
  if (f || !(f = calloc(1, sizeof *f + step->value_count * sizeof *f->values))) return f;
  f->step = step;
  for (size_t i = 0; i < step->value_count; i++) f->values[i] = (Held){step->values[i].constant, {0}, NONE};
  return f;
}

static void end_frame(Step* step, Frame* f) {
  pthread_mutex_lock(&step->lock);
  f->next = step->idle, step->idle = f;
  pthread_mutex_unlock(&step->lock);
}

static Workspace* take_workspace(Workspaces* of) {
  pthread_mutex_lock(&of->lock);
  Workspace* w = of->idle;
  if (w) of->idle = w->next;
  pthread_mutex_unlock(&of->lock);
  return w ? w : calloc(1, sizeof *w);
}

static void end_workspace(Workspaces* of, Workspace* w) {
  pthread_mutex_lock(&of->lock);
  w->next = of->idle, of->idle = w;
  pthread_mutex_unlock(&of->lock);
}

void free_frames(Step* step) {
  while (step->idle) {
    Frame* f = step->idle;
    step->idle = f->next;
    free(f);
  }
}

void free_workspaces(Workspaces* of) {
  while (of->idle) {
    Workspace* w = of->idle;
    of->idle = w->next;
    for (size_t i = 0; i < w->count; i++) free(w->buffers[i].memory);
    free(w->buffers);
    free(w);
  }
}

static Status* run_parts(Frame* f) {
  const Step* step = f->step;
  for (size_t i = 0; i < step->input_count; i++) {
    const Value* outer = NULL;
    Tensor* tensor = &f->values[step->inputs[i]].tensor;
    *tensor = (Tensor){0};
    TRY(((Status * (*)(const Context*, size_t, const Value**)) step->ort[GET_INPUT])(f->context, i, &outer));
    if (outer) TRY(describe(step->ort, outer, tensor));
  }
  for (size_t i = 0; i < step->part_count; i++) {
    const Part* part = f->part = &step->parts[i];
    TRY(part->op->compute(part->kernel, (Context*)f));
    for (size_t j = 0; j < part->last_count; j++) give_back(f, part->last[j]);
  }
  return NULL;
}

Status* run_step(Step* step, Context* context) {
  Frame* f = take_frame(step);
  if (!f) return failure(step->ort, ERROR_FAIL, "out of memory");
  f->context = context, f->workspace = take_workspace(step->workspaces);
  Status* status = f->workspace ? run_parts(f) : failure(step->ort, ERROR_FAIL, "out of memory");
  for (size_t i = 0; status && i < step->value_count; i++) give_back(f, (int)i);
  if (f->workspace) end_workspace(step->workspaces, f->workspace);
  end_frame(step, f);
  return status;
}
