/* A stand-in for ONNX Runtime: the entries of its API that the library uses, over tensors in heap blocks of their exact
   sizes, so that AddressSanitizer sees a read past any end. Any call can be made to fail. */
#ifndef TAPEOUT_RUNTIME_H
#define TAPEOUT_RUNTIME_H

#include "ort.h"

#define MOST_INPUTS     15
#define MOST_OUTPUTS    2
#define MOST_ATTRIBUTES 20

struct Value {
  int present, type;
  size_t rank;
  int64_t dims[9];
  void* block; /* the heap block that `data` lies in */
  void* data;
};

typedef struct {
  const char* name;
  int is_float;
  int64_t i;
  float f;
} Attribute;

struct Info {
  size_t count;
  Attribute attributes[MOST_ATTRIBUTES];
};

struct Context {
  size_t input_count;
  uint64_t written; /* a bit for each input that is written in place */
  Value inputs[MOST_INPUTS], outputs[MOST_OUTPUTS];
};

/* Of the level of the kernels: attention over codes rounds queries and weights to 16 bits; linears are computed by tiles. */
extern const int in_digits, in_tiles;

/* What the next calls do. */
extern int64_t fail_call;               /* the API call that fails, counted down; negative: none */
extern const char* failed_name;         /* of the attribute that the failing call was for, if any */
extern _Atomic int64_t fail_allocation; /* the same for allocations of the kernels */
extern int own_threads;                 /* what the session asks for; 0: nothing */
extern int choose_threads_at_start;     /* it asks for the faster of one thread and all */
extern int use_threads;                 /* a parallel for runs on threads, or on the calling one in a random order */
extern int runs;                        /* of a node; threads read ahead for the second and later ones */
extern int copies;                      /* how often a graph has the node */
extern uint64_t constant_inputs;        /* a bit for each input that is an initializer of the graph */
extern int64_t live_statuses, live_domains;

/* The operator of a name, from the library's own registration. */
const Op* find_op(const char* name);
/* Registers the library with an API of at most `version`. */
Status* register_library(uint32_t version);
void release_library(void);

const char* message_of(const Status* status);
void drop_status(Status* status);

int64_t elements_of(const Value* value);
void new_value(Value* value, int type, size_t rank, const int64_t* dims);
void release_value(Value* value);
void release_context(Context* context);

/* Makes a step of a graph with this node, as the library's execution provider does, runs it `runs` times and releases it. */
Status* run_node(const Op* op, const Info* info, Context* context);

uint64_t next_random(void);
int64_t random_int(int64_t first, int64_t last);
void seed_random(uint64_t seed);

_Noreturn void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

#endif
