/* The part of ONNX Runtime's C API that custom operators and an execution provider of them need.

   The API is a table of function pointers that only grows at its end, so the index of an entry is part of the interface
   (onnxruntime_c_api.h, "struct OrtApi"; onnxruntime_ep_c_api.h, "struct OrtEpApi"). ONNX Runtime's wheels bring no
   headers, so the indexes stand here. API version 24 is the first that has all of them. */
#ifndef TAPEOUT_ORT_H
#define TAPEOUT_ORT_H

#include <stddef.h>
#include <stdint.h>

#define API_VERSION 24
#define OP_VERSION  17 /* of the operator description: ONNX Runtime reads the fields of `Op` up to this version */

typedef struct Status Status;   /* NULL: no error */
typedef struct Value Value;     /* OrtValue, here always a tensor */
typedef struct Info Info;       /* OrtKernelInfo: the attributes of a node, while its kernel is created */
typedef struct Context Context; /* OrtKernelContext: the inputs and outputs of a node, while its kernel runs */
typedef struct Options Options;
typedef struct Domain Domain;
typedef const void* const* Api;

typedef struct {
  Api (*get)(uint32_t version);
  const char* (*version)(void);
} ApiBase;

enum { ERROR_FAIL = 1, ERROR_ARGUMENT = 2 };
/* Element types. */
enum { ANY = 0, FLOAT = 1, UINT8 = 2, INT8 = 3, INT32 = 6, INT64 = 7, BOOL = 9, HALF = 10, BFLOAT16 = 16 };
enum { REQUIRED = 0, OPTIONAL = 1 };

enum {
  CREATE_STATUS = 0,       /* CreateStatus */
  CREATE_DOMAIN = 26,      /* CreateCustomOpDomain */
  DOMAIN_ADD = 27,         /* CustomOpDomain_Add */
  TENSOR_DATA = 51,        /* GetTensorMutableData */
  TYPE_TENSOR = 55,        /* CastTypeInfoToTensorInfo */
  TENSOR_ELEMENT = 60,     /* GetTensorElementType */
  ATTRIBUTE_FLOAT = 85,    /* KernelInfoGetAttribute_float */
  ATTRIBUTE_INT = 86,      /* KernelInfoGetAttribute_int64 */
  GET_INPUT = 90,          /* KernelContext_GetInput */
  GET_OUTPUT = 91,         /* KernelContext_GetOutput */
  RELEASE_STATUS = 93,     /* ReleaseStatus */
  RELEASE_DOMAIN = 101,    /* ReleaseCustomOpDomain */
  SESSION_ENTRY = 238,     /* GetSessionConfigEntry */
  CONSTANT_INPUT = 249,    /* KernelInfoGetConstantInput_tensor */
  READ_ATTRIBUTE = 272,    /* ReadOpAttr */
  PARALLEL_FOR = 274,      /* KernelContext_ParallelFor */
  VALUE_NAME = 289,        /* GetValueInfoName */
  VALUE_TYPE = 290,        /* GetValueInfoTypeInfo */
  DEVICE_TYPE = 307,       /* HardwareDevice_Type */
  PROVIDER_API = 317,      /* GetEpApi */
  VALUE_INITIALIZER = 326, /* ValueInfo_GetInitializerValue */
  VALUE_EXTERNAL = 327,    /* ValueInfo_GetExternalInitializerInfo */
  VALUE_IS_CONSTANT = 331, /* ValueInfo_IsConstantInitializer */
  GRAPH_NODE_COUNT = 344,  /* Graph_GetNumNodes */
  GRAPH_NODES = 345,       /* Graph_GetNodes */
  NODE_TYPE = 350,         /* Node_GetOperatorType */
  NODE_DOMAIN = 351,       /* Node_GetDomain */
  NODE_INPUT_COUNT = 353,  /* Node_GetNumInputs */
  NODE_INPUTS = 354,       /* Node_GetInputs */
  NODE_OUTPUT_COUNT = 355, /* Node_GetNumOutputs */
  NODE_OUTPUTS = 356,      /* Node_GetOutputs */
  NODE_ATTRIBUTE = 361,    /* Node_GetAttributeByName */
  RELEASE_EXTERNAL = 369,  /* ReleaseExternalInitializerInfo */
  EXTERNAL_OFFSET = 371,   /* ExternalInitializerInfo_GetFileOffset */
  EXTERNAL_SIZE = 372,     /* ExternalInitializerInfo_GetByteSize */
  TENSOR_TYPE_SHAPE = 414, /* GetTensorElementTypeAndShapeDataReference */
};
/* Of OrtEpApi. */
enum {
  CREATE_DEVICE = 0,     /* CreateEpDevice */
  ADD_NODES_TO_FUSE = 2, /* EpGraphSupportInfo_AddNodesToFuse */
};
enum { NODE_INT = 1, NODE_FLOAT = 3 }; /* OrtOpAttrType */

/* The first fields of OrtCustomOp, all that version 17 reads. */
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

/* Returns from a function where `expression` is an error. */
#define TRY(expression)             \
  do {                              \
    Status* status_ = (expression); \
    if (status_) return status_;    \
  } while (0)

static inline Status* failure(Api api, int code, const char* message) {
  return ((Status * (*)(int, const char*)) api[CREATE_STATUS])(code, message);
}

static inline void release_status(Api api, Status* status) {
  if (status) ((void (*)(Status*))api[RELEASE_STATUS])(status);
}

static inline Status* attribute_int(Api api, const Info* info, const char* name, int64_t* value) {
  return ((Status * (*)(const Info*, const char*, int64_t*)) api[ATTRIBUTE_INT])(info, name, value);
}

static inline Status* attribute_float(Api api, const Info* info, const char* name, float* value) {
  return ((Status * (*)(const Info*, const char*, float*)) api[ATTRIBUTE_FLOAT])(info, name, value);
}

/* An optional attribute. The API does not tell an absent attribute from one of another type. */
static inline int64_t optional_int(Api api, const Info* info, const char* name, int64_t otherwise) {
  int64_t value = otherwise;
  Status* status = attribute_int(api, info, name, &value);
  release_status(api, status);
  return status ? otherwise : value;
}

static inline float optional_float(Api api, const Info* info, const char* name, float otherwise) {
  float value = otherwise;
  Status* status = attribute_float(api, info, name, &value);
  release_status(api, status);
  return status ? otherwise : value;
}

/* An input as one run has it. An absent optional input has `present` 0 and no elements. `dims` is ONNX Runtime's memory
   and lives as long as the tensor. */
typedef struct {
  int present, type;
  size_t rank;
  const int64_t* dims;
  int64_t elements;
  void* data;
} Tensor;

static inline size_t size_of(int type) {
  return type == FLOAT || type == INT32 ? 4 : type == INT64 ? 8 : type == HALF || type == BFLOAT16 ? 2 : 1;
}

static inline Status* data_of(Api api, const Value* value, void** data) {
  return ((Status * (*)(const Value*, void**)) api[TENSOR_DATA])(value, data);
}

static inline Status* describe(Api api, const Value* value, Tensor* tensor) {
  TRY(((Status * (*)(const Value*, int*, const int64_t**, size_t*)) api[TENSOR_TYPE_SHAPE])(
      value, &tensor->type, &tensor->dims, &tensor->rank));
  int64_t elements = 1;
  for (size_t i = 0; i < tensor->rank; i++)
    if (tensor->dims[i] < 0 || __builtin_mul_overflow(elements, tensor->dims[i], &elements))
      return failure(api, ERROR_ARGUMENT, "an input has an invalid shape");
  TRY(data_of(api, value, &tensor->data));
  if (elements && (!tensor->data || (uintptr_t)tensor->data % size_of(tensor->type)))
    return failure(api, ERROR_ARGUMENT, "the data of an input is missing or not aligned to its type");
  tensor->present = 1;
  tensor->elements = elements;
  return NULL;
}

/* An initializer, while a kernel is created: it is the same in all runs. Anything else has `present` 0. */
static inline Status* constant_input(Api api, const Info* info, size_t index, Tensor* tensor) {
  const Value* value = NULL;
  int constant = 0;
  *tensor = (Tensor){0};
  TRY(((Status * (*)(const Info*, size_t, int*, const Value**)) api[CONSTANT_INPUT])(info, index, &constant, &value));
  return constant && value ? describe(api, value, tensor) : NULL;
}

/* `constant`: of `constant_input`, or NULL. To ask for constants in each run took 2 to 3 % of a decode step. */
static inline Status* input(Api api, const Context* context, size_t index, const Tensor* constant, Tensor* tensor) {
  const Value* value = NULL;
  *tensor = constant ? *constant : (Tensor){0};
  if (tensor->present) return NULL;
  TRY(((Status * (*)(const Context*, size_t, const Value**)) api[GET_INPUT])(context, index, &value));
  return value ? describe(api, value, tensor) : NULL;
}

/* Whether an input is present, of this type and of this many elements. */
static inline int holds(const Tensor* tensor, int type, int64_t elements) {
  return tensor->present && tensor->type == type && tensor->elements == elements;
}

/* Where the output goes, in `data`: memory that the caller bound, which must have this shape, or a new tensor. */
static inline Status* output(Api api, Context* context, size_t index, const int64_t* dims, size_t rank, void* data) {
  Value* value = NULL;
  void* memory = NULL;
  int empty = 0;
  for (size_t i = 0; i < rank; i++) empty |= !dims[i];
  TRY(((Status * (*)(Context*, size_t, const int64_t*, size_t, Value**)) api[GET_OUTPUT])(context, index, dims, rank,
                                                                                          &value));
  if (!value) return failure(api, ERROR_ARGUMENT, "an output is missing");
  TRY(data_of(api, value, &memory));
  if (!empty && !memory) return failure(api, ERROR_FAIL, "an output has no memory");
  *(void**)data = memory;
  return NULL;
}

typedef struct Threads Threads;

/* How the kernels of one file are made and run. A kernel begins with its `Base`. */
typedef struct {
  Status* (*create)(const Op*, Api, const Info*, void**);
  Status* (*compute)(void*, Context*);
} Implementation;
typedef struct {
  Api api;
  Threads* threads; /* NULL: those of ONNX Runtime */
} Base;

/* An operator as engines/kernels/operators.py declares it, and which of those of its implementation it is. */
enum { MOST_INPUTS = 15, MOST_OUTPUTS = 2 };
typedef struct {
  const char* name;
  const Implementation* implementation;
  int variant;
  size_t input_count, output_count;
  struct {
    int type, presence;
  } inputs[MOST_INPUTS];
  int outputs[MOST_OUTPUTS];
} Declaration;
extern const Declaration declarations[];
extern const size_t operator_count;
extern const Implementation block_experts, block_gather, block_linear, experts;

/* An operator of a session: what ONNX Runtime reads, and the session's threads. */
typedef struct {
  Op op;
  const Declaration* declared;
  Threads* threads;
} Operator;

static inline const Declaration* declaration_of(const Op* op) {
  return ((const Operator*)op)->declared;
}
static inline Threads* threads_of(const Op* op) {
  return ((const Operator*)op)->threads;
}

/* All operators of this library, in memory of the caller's; NULL if there is none. */
Operator* create_operators(Threads* threads);
/* A copy of a kernel, which holds its threads until `destroy` of its operator. */
Status* keep_kernel(const void* kernel, size_t bytes, void** kept);

/* What the jobs of a kernel read from memory, each range of their indexes a range of the bytes; and what the next job
   reads. */
typedef struct Stream Stream;
struct Stream {
  const char* data;
  size_t bytes;
  _Atomic(Stream*) next;
  Stream* other; /* of the same threads */
};

/* `count` threads with the caller's; NULL if there is no memory. They run while a kernel holds them; 0: they do not. */
Threads* create_threads(size_t count);
size_t count_threads(const Threads* threads);
int hold_threads(Threads* threads);
void release_threads(Threads* threads);
/* Of the threads, which read it until they end; so `data` must live as long. NULL if there is no memory. */
Stream* create_stream(Threads* threads, const void* data, size_t bytes);
void run_on(Threads* threads, void (*work)(void*, size_t), size_t total, void* state, Stream* stream);
/* From now on the caller computes alone, or with all threads. Not during a run. */
void compute_alone(Threads* threads, int alone);

/* Chooses between the two by computing linears of a session, kernels of block_linear.c. Returns how many threads compute. */
size_t choose_threads(Threads* threads, void* const* linears, size_t count);
/* Of a linear whose weights are constant: their bytes, and a run over tokens of zeros, which fails where there is no
   memory. */
size_t linear_bytes(const void* linear);
int compute_zeros(void* linear, int64_t tokens);

/* `work(state, i)` for i in 0 .. total-1 on the session's threads. `stream` may be NULL. */
static inline Status* parallel(Api api, const Context* context, Threads* threads, void (*work)(void*, size_t),
                               size_t total, void* state, Stream* stream) {
  if (total == 1) {
    work(state, 0);
    return NULL;
  }
  if (threads) {
    run_on(threads, work, total, state, stream);
    return NULL;
  }
  return ((Status * (*)(const Context*, void (*)(void*, size_t), size_t, size_t, void*)) api[PARALLEL_FOR])(
      context, work, total, 0, state);
}

/* Memory of the calling thread, at least `bytes` of it, uninitialized, aligned to a cache line; NULL if there is none.
   A thread keeps up to SCRATCH_KEPT bytes of each kind until it ends; `release_scratch` frees what is larger. */
enum { SCRATCH_LINEAR, SCRATCH_ROW, SCRATCH_ATTENTION, SCRATCH_EXPERTS, SCRATCH_TILES, SCRATCHES };
enum { SCRATCH_KEPT = 4 << 20 };
void* scratch(int which, size_t bytes);
void release_scratch(int which);
int has_scratch(void); /* whether the process had keys for it */

#endif
