/* The part of ONNX Runtime's C interface that a custom operator needs.

   The interface is a table of function pointers that only ever grows at its end, so an entry's place is part of the
   interface (onnxruntime_c_api.h, "struct OrtApi"). Places are given here by number, which spares a build the headers,
   which ONNX Runtime's wheels do not hold. API version 17 is the first with all of them. */
#ifndef TAPEOUT_ORT_H
#define TAPEOUT_ORT_H

#include <stddef.h>
#include <stdint.h>

#define ORT_VERSION 17

typedef struct Status Status;   /* NULL: no error */
typedef struct Value Value;     /* a tensor */
typedef struct Shape Shape;     /* a tensor's shape and type */
typedef struct Info Info;       /* a node's attributes, while its kernel is made */
typedef struct Context Context; /* a node's inputs and outputs, while its kernel runs */
typedef struct Options Options;
typedef struct Domain Domain;
typedef const void* const* Api;

typedef struct {
  Api (*get)(uint32_t version);
  const char* (*version)(void);
} ApiBase;

enum { ERROR_FAIL = 1, ERROR_ARGUMENT = 2 };
enum { ANY = 0, FLOAT = 1, UINT8 = 2, INT8 = 3, INT32 = 6, INT64 = 7, BOOL = 9, HALF = 10 }; /* element types */
enum { REQUIRED = 0, OPTIONAL = 1 };

enum {
  CREATE_STATUS = 0,
  CREATE_DOMAIN = 26,
  DOMAIN_ADD = 27,
  ADD_DOMAIN = 28,
  TENSOR_DATA = 51,
  ELEMENT_TYPE = 60,
  DIMENSION_COUNT = 61,
  DIMENSIONS = 62,
  TENSOR_SHAPE = 65,
  ATTRIBUTE_FLOAT = 85,
  ATTRIBUTE_INT = 86,
  GET_INPUT = 90,
  GET_OUTPUT = 91,
  RELEASE_STATUS = 93,
  RELEASE_SHAPE = 99,
  PARALLEL_FOR = 274,
};

/* The first fields of an operator's description, all that version 17 reads. */
typedef struct Op Op;
struct Op {
  uint32_t version;
  void* (*create_v1)(const Op*, Api, const Info*);
  const char* (*name)(const Op*);
  const char* (*provider)(const Op*);
  int (*input_type)(const Op*, size_t);
  size_t (*input_count)(const Op*);
  int (*output_type)(const Op*, size_t);
  size_t (*output_count)(const Op*);
  void (*compute_v1)(void*, Context*);
  void (*destroy)(void*);
  int (*input_presence)(const Op*, size_t);
  int (*output_presence)(const Op*, size_t);
  int (*input_memory)(const Op*, size_t);
  int (*variadic_input_arity)(const Op*);
  int (*variadic_input_homogeneity)(const Op*);
  int (*variadic_output_arity)(const Op*);
  int (*variadic_output_homogeneity)(const Op*);
  Status* (*create)(const Op*, Api, const Info*, void**);
  Status* (*compute)(void*, Context*);
  Status* (*infer_shape)(const Op*, void*);
  int (*start_version)(const Op*);
  int (*end_version)(const Op*);
};

static inline Status* failure(Api api, int code, const char* message) {
  return ((Status * (*)(int, const char*)) api[CREATE_STATUS])(code, message);
}

/* Whether there was an error; it is let go. */
static inline int failed(Api api, Status* status) {
  if (status) ((void (*)(Status*))api[RELEASE_STATUS])(status);
  return status != NULL;
}

static inline int64_t attribute_int(Api api, const Info* info, const char* name, int64_t otherwise) {
  int64_t value = otherwise;
  return failed(api, ((Status * (*)(const Info*, const char*, int64_t*)) api[ATTRIBUTE_INT])(info, name, &value))
             ? otherwise
             : value;
}

static inline float attribute_float(Api api, const Info* info, const char* name, float otherwise) {
  float value = otherwise;
  return failed(api, ((Status * (*)(const Info*, const char*, float*)) api[ATTRIBUTE_FLOAT])(info, name, &value))
             ? otherwise
             : value;
}

/* The input, or NULL where an optional one is left away. */
static inline const Value* input(Api api, const Context* context, size_t index) {
  const Value* value = NULL;
  ((Status * (*)(const Context*, size_t, const Value**)) api[GET_INPUT])(context, index, &value);
  return value;
}

static inline void* data_of(Api api, const Value* value) {
  void* data = NULL;
  if (value) ((Status * (*)(const Value*, void**)) api[TENSOR_DATA])(value, &data);
  return data;
}

/* Writes the dimensions to `dims`, of which there is room for 8, and returns how many there are. */
static inline size_t dimensions(Api api, const Value* value, int64_t* dims, int* type) {
  Shape* shape = NULL;
  size_t count = 0;
  ((Status * (*)(const Value*, Shape**)) api[TENSOR_SHAPE])(value, &shape);
  ((Status * (*)(const Shape*, size_t*)) api[DIMENSION_COUNT])(shape, &count);
  if (count > 8) count = 8;
  ((Status * (*)(const Shape*, int64_t*, size_t)) api[DIMENSIONS])(shape, dims, count);
  if (type) ((Status * (*)(const Shape*, int*)) api[ELEMENT_TYPE])(shape, type);
  ((void (*)(Shape*))api[RELEASE_SHAPE])(shape);
  return count;
}

/* Whether a tensor has so many elements; what a kernel reads without looking. */
static inline int holds(Api api, const Value* value, int64_t elements) {
  int64_t dims[8], found = 1;
  size_t count = value ? dimensions(api, value, dims, NULL) : 0;
  for (size_t i = 0; i < count; i++) found *= dims[i];
  return value && found == elements;
}

/* Where the output goes, in `data`: memory bound by the caller, which must be of this shape, or a new tensor. */
static inline Status* output(Api api, Context* context, size_t index, const int64_t* dims, size_t count, void* data) {
  Value* value = NULL;
  Status* status = ((Status * (*)(Context*, size_t, const int64_t*, size_t, Value**)) api[GET_OUTPUT])(
      context, index, dims, count, &value);
  *(void**)data = status ? NULL : data_of(api, value);
  return status;
}

/* `work(state, i)` for i in 0 .. total-1 on the session's own threads. */
static inline Status* parallel(Api api, const Context* context, void (*work)(void*, size_t), size_t total,
                               void* state) {
  if (total == 1) {
    work(state, 0);
    return NULL;
  }
  return ((Status * (*)(const Context*, void (*)(void*, size_t), size_t, size_t, void*)) api[PARALLEL_FOR])(
      context, work, total, 0, state);
}

/* Ends a kernel with an error, if there is one. */
#define TRY(expression)             \
  do {                              \
    Status* status_ = (expression); \
    if (status_) return status_;    \
  } while (0)

/* Memory of the calling thread, at least `bytes` of it; what lay there before is lost. Runs of a session on several
   threads do not share it. Aligned to a cache line. NULL where there is no more. It ends with its thread. */
void* scratch(int which, size_t bytes);
enum { SCRATCH_LINEAR, SCRATCH_ROW, SCRATCH_ATTENTION, SCRATCHES };

/* What all operators of this library answer alike, for their descriptions. */
static inline const char* default_provider(const Op* op) {
  return (void)op, NULL;
}
static inline int default_memory(const Op* op, size_t i) {
  return (void)op, (void)i, 0;
}
static inline int always(const Op* op, size_t i) {
  return (void)op, (void)i, REQUIRED;
}
static inline size_t one(const Op* op) {
  return (void)op, 1;
}
static inline int first_version(const Op* op) {
  return (void)op, 1;
}
static inline int last_version(const Op* op) {
  return (void)op, INT32_MAX;
}

#define OPERATOR(NAME, INPUTS, INPUT_TYPE, INPUT_PRESENCE, OUTPUTS, OUTPUT_TYPE, CREATE, COMPUTE) \
  {.version = ORT_VERSION,                                                                        \
   .name = NAME,                                                                                  \
   .provider = default_provider,                                                                  \
   .input_count = INPUTS,                                                                         \
   .input_type = INPUT_TYPE,                                                                      \
   .input_presence = INPUT_PRESENCE,                                                              \
   .input_memory = default_memory,                                                                \
   .output_count = OUTPUTS,                                                                       \
   .output_type = OUTPUT_TYPE,                                                                    \
   .output_presence = always,                                                                     \
   .create = CREATE,                                                                              \
   .compute = COMPUTE,                                                                            \
   .destroy = free,                                                                               \
   .start_version = first_version,                                                                \
   .end_version = last_version}

extern Op block_gather_op, cached_attention_floats_op, cached_attention_codes_op, linear_ops[5];

#endif
