// A stand-in for CUDA's libraries, as far as ONNX Runtime's CUDA provider calls them.
//
// Memory of the device is memory of the process. Kernels and libraries' functions do nothing: their names are counted.
// Copies and fills are done, and counted by kind. While a stream is captured, launches and copies are kept in the
// graph, and whatever a capture must not do (allocate, free, wait, copy without a stream) is a violation. A replay
// counts its launches. The counts are written as lines "count kind name" by standin_report.

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS        16384
#define DEVICE_BYTES ((size_t)16 << 30)

typedef struct {
  unsigned x, y, z;
} Dim3;

typedef struct {
  const void* key;
  const char* name;
} Kernel;

typedef struct {
  char* name;
  long count;
} Count;

typedef struct {
  void* start;
  size_t size;
  int type;  // 1: of the host, 2: of the device
} Block;

typedef struct {
  long kernels, copies;
} Graph;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Kernel kernels[SLOTS];
static Count counts[SLOTS];
static Block blocks[SLOTS];
static size_t block_count;
static void* capturing;
static Graph* recorded;
static __thread struct {
  Dim3 grid, block;
  size_t shared;
  void* stream;
} pushed;

static size_t hash(const char* text) {
  size_t value = 1469598103934665603u;
  for (; *text; text++) value = (value ^ (unsigned char)*text) * 1099511628211u;
  return value;
}

static void count(const char* kind, const char* name) {
  char line[512];
  snprintf(line, sizeof line, "%s %s", kind, name);
  pthread_mutex_lock(&lock);
  size_t at = hash(line) % SLOTS;
  while (counts[at].name && strcmp(counts[at].name, line)) at = (at + 1) % SLOTS;
  if (!counts[at].name) counts[at].name = strdup(line);
  counts[at].count++;
  pthread_mutex_unlock(&lock);
}

static const char* name_of(const void* function) {
  size_t at = (size_t)function / 16 % SLOTS;
  while (kernels[at].key && kernels[at].key != function) at = (at + 1) % SLOTS;
  return kernels[at].key ? kernels[at].name : "unknown";
}

// What must not happen while a stream is captured.
static void outside_capture(const char* name) {
  if (capturing) count("violation", name);
}

static int launched(const void* function) {
  if (capturing && recorded) recorded->kernels++;
  count(capturing ? "captured" : "kernel", name_of(function));
  return 0;
}

// Of a function of a library: it launches kernels of its own.
static int library(const char* name) {
  if (capturing && recorded) recorded->kernels++;
  count(capturing ? "captured" : "kernel", name);
  return 0;
}

static int allocated(void** result, size_t size, int type, const char* name) {
  outside_capture(name);
  if (posix_memalign(result, 4096, size ? size : 1)) return 2;
  memset(*result, type == 2 ? 0xFF : 0, size);  // NaN in every float type
  pthread_mutex_lock(&lock);
  blocks[block_count++ % SLOTS] = (Block){*result, size, type};
  pthread_mutex_unlock(&lock);
  count("call", name);
  return 0;
}

static int freed(void* address, const char* name) {
  outside_capture(name);
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < block_count && i < SLOTS; i++)
    if (blocks[i].start == address) blocks[i] = (Block){0};
  pthread_mutex_unlock(&lock);
  free(address);
  return 0;
}

static int type_of(const void* address) {
  int type = 0;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < block_count && i < SLOTS; i++) {
    const char* start = blocks[i].start;
    if (start && (const char*)address >= start && (const char*)address < start + blocks[i].size) type = blocks[i].type;
  }
  pthread_mutex_unlock(&lock);
  return type;
}

static const char* kind_of(void* target, const void* source) {
  int to = type_of(target) == 2, from = type_of(source) == 2;
  return to ? from ? "within" : "up" : from ? "down" : "host";
}

static int copied(void* target, const void* source, size_t size, int streamed) {
  if (!streamed) outside_capture("cudaMemcpy");
  if (capturing && recorded) recorded->copies++;
  count(capturing ? "captured-copy" : "copy", kind_of(target, source));
  if (!capturing) memmove(target, source, size);
  return 0;
}

// -- What tests read.

void standin_reset(void) {
  for (size_t i = 0; i < SLOTS; i++) counts[i].count = 0;
}

int standin_report(const char* path) {
  FILE* file = fopen(path, "w");
  if (!file) return 1;
  for (size_t i = 0; i < SLOTS; i++)
    if (counts[i].name && counts[i].count) fprintf(file, "%ld %s\n", counts[i].count, counts[i].name);
  return fclose(file);
}

// -- libcudart

void** __cudaRegisterFatBinary(void* code) {
  (void)code;
  return malloc(8);
}
void __cudaRegisterFatBinaryEnd(void** handle) {
  (void)handle;
}
void __cudaUnregisterFatBinary(void** handle) {
  (void)handle;
}
void __cudaRegisterVar(void) {}
void __cudaRegisterFunction(void** handle, const char* host, char* device, const char* name) {
  (void)handle, (void)device;
  size_t at = (size_t)host / 16 % SLOTS;
  while (kernels[at].key && kernels[at].key != host) at = (at + 1) % SLOTS;
  kernels[at] = (Kernel){host, name};
}
int __cudaGetKernel(void** kernel, const void* entry) {
  *kernel = (void*)entry;
  return 0;
}
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void** stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
  return 0;
}
int __cudaLaunchKernel(const void* kernel) {
  return launched(kernel);
}
int cudaLaunchKernel(const void* function) {
  return launched(function);
}
int cudaLaunchCooperativeKernel(const void* function) {
  return launched(function);
}
int cudaLaunchKernelExC(const void* config, const void* function) {
  (void)config;
  return launched(function);
}
int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  (void)stream;
  outside_capture("cudaLaunchHostFunc");
  function(data);
  return 0;
}

int cudaMalloc(void** result, size_t size) {
  return allocated(result, size, 2, "cudaMalloc");
}
int cudaMallocFromPoolAsync(void** result, size_t size) {
  return allocated(result, size, 2, "cudaMallocFromPoolAsync");
}
int cudaMallocHost(void** result, size_t size) {
  return allocated(result, size, 1, "cudaMallocHost");
}
int cudaHostAlloc(void** result, size_t size) {
  return allocated(result, size, 1, "cudaHostAlloc");
}
int cudaFree(void* address) {
  return freed(address, "cudaFree");
}
int cudaFreeAsync(void* address) {
  return freed(address, "cudaFreeAsync");
}
int cudaFreeHost(void* address) {
  return freed(address, "cudaFreeHost");
}
int cudaMemGetInfo(size_t* unused, size_t* total) {
  *unused = *total = DEVICE_BYTES;
  return 0;
}
int cudaMemcpy(void* target, const void* source, size_t size) {
  return copied(target, source, size, 0);
}
int cudaMemcpyAsync(void* target, const void* source, size_t size, int kind, void* stream) {
  (void)kind;
  return copied(target, source, size, stream != 0);
}
int cudaMemcpy2DAsync(void* target, size_t pitch, const void* source, size_t from, size_t width, size_t height) {
  for (size_t row = 0; row < height && !capturing; row++)
    memmove((char*)target + row * pitch, (const char*)source + row * from, width);
  if (capturing && recorded) recorded->copies++;
  count(capturing ? "captured-copy" : "copy", kind_of(target, source));
  return 0;
}
int cudaMemcpyFromSymbol(void* target, const void* symbol, size_t size) {
  (void)symbol;
  memset(target, 0, size);
  return 0;
}
int cudaMemset(void* target, int value, size_t size) {
  outside_capture("cudaMemset");
  memset(target, value, size);
  count("fill", "cudaMemset");
  return 0;
}
int cudaMemsetAsync(void* target, int value, size_t size) {
  if (!capturing) memset(target, value, size);
  count(capturing ? "captured-fill" : "fill", "cudaMemsetAsync");
  return 0;
}
int cudaPointerGetAttributes(int* result, const void* address) {
  memset(result, 0, 24 + 64);
  result[0] = type_of(address);
  ((const void**)result)[1] = ((const void**)result)[2] = address;
  return 0;
}
int cudaMemPoolCreate(void** pool) {
  *pool = malloc(8);
  return 0;
}
int cudaMemPoolGetAttribute(void* pool, int attribute, size_t* value) {
  (void)pool, (void)attribute;
  *value = 0;
  return 0;
}

static void* handle(void) {
  return calloc(1, 64);
}
int cudaStreamCreate(void** stream) {
  return *stream = handle(), 0;
}
int cudaStreamCreateWithFlags(void** stream) {
  return *stream = handle(), 0;
}
int cudaStreamSynchronize(void* stream) {
  (void)stream;
  outside_capture("cudaStreamSynchronize");
  count("call", "cudaStreamSynchronize");
  return 0;
}
int cudaDeviceSynchronize(void) {
  outside_capture("cudaDeviceSynchronize");
  count("call", "cudaDeviceSynchronize");
  return 0;
}
int cudaEventSynchronize(void* event) {
  (void)event;
  outside_capture("cudaEventSynchronize");
  return 0;
}
int cudaEventCreate(void** event) {
  return *event = handle(), 0;
}
int cudaEventCreateWithFlags(void** event) {
  return *event = handle(), 0;
}
int cudaEventElapsedTime(float* milliseconds) {
  return *milliseconds = 1, 0;
}

int cudaStreamBeginCapture(void* stream) {
  capturing = stream;
  recorded = handle();
  count("call", "cudaStreamBeginCapture");
  return 0;
}
int cudaStreamEndCapture(void* stream, void** graph) {
  if (stream != capturing) count("violation", "cudaStreamEndCapture of another stream");
  *graph = recorded;
  capturing = recorded = NULL;
  return 0;
}
int cudaStreamIsCapturing(void* stream, int* status) {
  *status = capturing && stream == capturing;
  return 0;
}
int cudaGraphInstantiate(void** executable, void* graph) {
  *executable = handle();
  memcpy(*executable, graph, sizeof(Graph));
  return 0;
}
int cudaGraphLaunch(void* executable) {
  Graph* graph = executable;
  count("call", "cudaGraphLaunch");
  for (long i = 0; i < graph->kernels; i++) count("call", "replayed kernel");
  return 0;
}

int cudaGetDeviceCount(int* found) {
  return *found = 1, 0;
}
int cudaGetDevice(int* found) {
  return *found = 0, 0;
}
int cudaDriverGetVersion(int* version) {
  return *version = 13000, 0;
}
int cudaRuntimeGetVersion(int* version) {
  return *version = 13000, 0;
}
const char* cudaGetErrorName(int code) {
  return code ? "cudaErrorOfStandIn" : "cudaSuccess";
}
const char* cudaGetErrorString(int code) {
  return code ? "an error of the stand-in" : "no error";
}

// Of an H100: processors, shared memory, capability. The numbers are those of cudaDeviceAttr.
int cudaDeviceGetAttribute(int* value, int attribute) {
  static const int known[][2] = {{1, 1024},  {2, 1024},    {3, 1024}, {4, 64},     {5, 2147483647}, {6, 65535},
                                 {7, 65535}, {8, 49152},   {10, 32},  {12, 65536}, {16, 132},       {38, 52428800},
                                 {39, 2048}, {41, 1},      {75, 9},   {76, 0},     {81, 233472},    {82, 65536},
                                 {95, 1},    {97, 232448}, {106, 32}};
  *value = 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i][0] == attribute) *value = known[i][1];
  return 0;
}
typedef struct {
  char name[256], uuid[16], luid[8];
  unsigned mask;
  size_t global, shared;
  int registers, warp;
  size_t pitch;
  int threads, dimensions[3], grid[3];
  size_t constant;
  int major, minor;
  size_t alignment, pitch_alignment;
  int processors;
  int before_surface_alignment[45];
  size_t surface_alignment;
  int concurrent, ecc, bus, device, domain, tcc, engines, unified, bus_width, l2, persisting, threads_each;
  int priorities, l1[2];
  size_t shared_each;
  int registers_each, managed[8], cooperative;
  size_t shared_optin;
  int rest[96];
} Properties;  // cudaDeviceProp of CUDA 13, up to what is filled in
int cudaGetDeviceProperties(Properties* found) {
  memset(found, 0, offsetof(Properties, rest));
  strcpy(found->name, "stand-in");
  found->global = DEVICE_BYTES, found->shared = 49152, found->registers = 65536, found->warp = 32;
  found->threads = 1024, found->constant = 65536, found->major = 9, found->processors = 132;
  for (int i = 0; i < 3; i++) found->dimensions[i] = 1024, found->grid[i] = 65535;
  found->l2 = 52428800, found->threads_each = 2048, found->shared_each = 233472;
  found->registers_each = 65536, found->cooperative = 1, found->shared_optin = 232448;
  return 0;
}
int cudaFuncGetAttributes(size_t* found) {
  memset(found, 0, 3 * sizeof(size_t) + 28 * sizeof(int));
  int* numbers = (int*)(found + 3);
  numbers[0] = 1024, numbers[1] = 64, numbers[2] = 90, numbers[3] = 90, numbers[5] = 232448;
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks_each) {
  return *blocks_each = 2, 0;
}
int cudaLibraryLoadData(void** loaded) {
  return *loaded = handle(), 0;
}
int cudaLibraryGetKernel(void** kernel, void* loaded, const char* name) {
  (void)loaded;
  *kernel = handle();
  __cudaRegisterFunction(NULL, *kernel, NULL, strdup(name));
  return 0;
}

static int nothing(void) {
  return 0;
}
int cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned v, unsigned long long f,
                                     int* status) {
  (void)v, (void)f;
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (!*function) *function = (void*)nothing;
  if (status) *status = 0;
  return 0;
}

#define NOTHING(name) \
  int name(void) {    \
    return 0;         \
  }
NOTHING(cudaEventDestroy)
NOTHING(cudaEventRecord)
NOTHING(cudaEventRecordWithFlags)
NOTHING(cudaFuncSetAttribute)
NOTHING(cudaGetLastError)
NOTHING(cudaGraphDestroy)
NOTHING(cudaGraphExecDestroy)
NOTHING(cudaKernelSetAttributeForDevice)
NOTHING(cudaLibraryUnload)
NOTHING(cudaMemPoolDestroy)
NOTHING(cudaMemPoolSetAttribute)
NOTHING(cudaMemPoolTrimTo)
NOTHING(cudaPeekAtLastError)
NOTHING(cudaSetDevice)
NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamWaitEvent)

// -- libcuda

NOTHING(cuInit)
NOTHING(cuTensorMapEncodeTiled)
int cuDriverGetVersion(int* version) {
  return *version = 13000, 0;
}
int cuDeviceGetCount(int* found) {
  return *found = 1, 0;
}
int cuDeviceGet(int* device) {
  return *device = 0, 0;
}
int cuDeviceGetAttribute(int* value, int attribute) {
  return cudaDeviceGetAttribute(value, attribute);
}

// -- libcublas, libcublasLt and what the provider looks up in libcudnn

int cublasCreate_v2(void** found) {
  return *found = handle(), 0;
}
int cublasLtCreate(void** found) {
  return *found = handle(), 0;
}
int cudnnCreate(void** found) {
  return *found = handle(), 0;
}
int cublasGetMathMode(void* blas, int* mode) {
  (void)blas;
  return *mode = 0, 0;
}
const char* cublasGetStatusName(int code) {
  return code ? "CUBLAS_STATUS_OF_STAND_IN" : "CUBLAS_STATUS_SUCCESS";
}
const char* cublasGetStatusString(int code) {
  return cublasGetStatusName(code);
}
const char* cudnnGetErrorString(int code) {
  return code ? "an error of the stand-in" : "CUDNN_STATUS_SUCCESS";
}
size_t cudnnGetVersion(void) {
  return 91000;
}
int cublasLtMatmulDescCreate(void** found) {
  return *found = handle(), 0;
}
int cublasLtMatrixLayoutCreate(void** found) {
  return *found = handle(), 0;
}
int cublasLtMatmulPreferenceCreate(void** found) {
  return *found = handle(), 0;
}
int cublasLtMatrixTransformDescCreate(void** found) {
  return *found = handle(), 0;
}
int cublasLtMatmulAlgoGetHeuristic(void* lt, void* d, void* a, void* b, void* c, void* e, void* p, int asked,
                                   char* found, int* count_found) {
  (void)lt, (void)d, (void)a, (void)b, (void)c, (void)e, (void)p;
  memset(found, 0, (size_t)asked * 96);
  *count_found = 1;
  return 0;
}
#define COUNTED(name)      \
  int name(void) {         \
    return library(#name); \
  }
COUNTED(cublasDgeam)
COUNTED(cublasDgemmBatched)
COUNTED(cublasDgemmStridedBatched)
COUNTED(cublasDgemm_v2)
COUNTED(cublasDgetrfBatched)
COUNTED(cublasDgetriBatched)
COUNTED(cublasGemmBatchedEx)
COUNTED(cublasGemmEx)
COUNTED(cublasGemmStridedBatchedEx)
COUNTED(cublasLtMatmul)
COUNTED(cublasLtMatrixTransform)
COUNTED(cublasScopy_v2)
COUNTED(cublasSgeam)
COUNTED(cublasSgemmBatched)
COUNTED(cublasSgemmStridedBatched)
COUNTED(cublasSgemm_v2)
COUNTED(cublasSgetrfBatched)
COUNTED(cublasSgetriBatched)
COUNTED(cublasSscal_v2)
NOTHING(cublasDestroy_v2)
NOTHING(cublasLtDestroy)
NOTHING(cublasLtMatmulAlgoConfigSetAttribute)
NOTHING(cublasLtMatmulAlgoInit)
NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cublasLtMatrixTransformDescDestroy)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetStream_v2)
NOTHING(cudnnDestroy)
NOTHING(cudnnSetStream)
