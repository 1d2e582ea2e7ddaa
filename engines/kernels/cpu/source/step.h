/* A step: operators of a graph that run one after another, as one node of ONNX Runtime. */
#ifndef TAPEOUT_STEP_H
#define TAPEOUT_STEP_H

#include "ort.h"

#include <pthread.h>

enum { NONE = -1 };

/* An operator of a step. Values are numbers; NONE: an optional one that is absent. */
typedef struct {
  const Op* op;
  void* kernel;
  size_t input_count, output_count, last_count;
  int *inputs, *outputs, *last; /* last: values that no later operator reads */
} Part;

/* What is known of a value before a run. */
typedef struct {
  int type, output; /* which output of the node it is, or NONE */
  Tensor constant;
} Plan;

/* Memory of what lies between operators. The steps of a session run one after another and share it: where each kept its
   own, 20 steps of Qwen3.5-0.8B held 385 MB after a prompt of 256 tokens, and share 20. Runs that go on at once have a
   workspace each. */
typedef struct Workspace Workspace;
typedef struct {
  pthread_mutex_t lock;
  Workspace* idle; /* of runs that have ended */
} Workspaces;

typedef struct Frame Frame;
typedef struct {
  Api ort; /* ONNX Runtime's functions */
  Workspaces* workspaces;
  size_t input_count, value_count, part_count;
  int* inputs; /* of the node: values */
  Plan* values;
  Part* parts;
  pthread_mutex_t lock;
  Frame* idle; /* of runs that have ended */
} Step;

/* What the kernels of a step are given in place of ONNX Runtime's functions, all entries up to the last of ort.h. Of a
   kernel that is created the Info is a Creation. */
typedef struct {
  const void* node; /* in ONNX Runtime's graph */
  const Step* step;
  const Part* part;
} Creation;
enum { API_ENTRIES = TENSOR_TYPE_SHAPE + 1 };
void fill_step_api(Api ort, const void** table);

Status* run_step(Step* step, Context* context);
void free_frames(Step* step);
void free_workspaces(Workspaces* of);

#endif
