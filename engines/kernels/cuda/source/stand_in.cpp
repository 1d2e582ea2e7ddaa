/* Stands in for a GPU's driver on the CPU: device memory is the process's, kernels run as fibers on the calling thread
   (host.cpp), a captured stream is a list of launches with their parameters copied.

   It refuses what a driver refuses or would do at a cost: launches of more shared memory than was asked for, memory that
   was not allocated, and whatever may not happen while a stream is captured. A copy from pinned memory may read it until
   somebody has waited for the copy: where it has changed by then, the wait fails. It counts calls, so that tests know what
   a step does, and it can be told to be another device or to fail. */
#include "driver.hpp"
#include "host.h"
#include "launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

/* A launch of a graph. */
struct Node {
  const Registration* kernel;
  uint32_t grid[3], threads, shared_bytes;
  void* parameters;
};
struct Graph {
  Node* nodes;
  size_t count, room;
};
struct Stream {
  Graph* captured; /* NULL: nothing is captured */
};
struct Allocation {
  char* memory;
  size_t bytes;
  Allocation* next;
};
/* A copy from pinned memory that nobody has waited for, with what it was to copy. */
struct UnendedCopy {
  const char* from;
  char* content;
  size_t bytes;
  uint64_t number;
  UnendedCopy* next;
};
/* Copies of a stream up to a number. */
struct Event {
  void* stream;
  uint64_t number;
};
/* Functions that may have more shared memory. */
struct Limit {
  const Registration* kernel;
  int bytes;
  Limit* next;
};

/* What a test reads, and sets. */
struct Counts {
  int64_t allocations, copies_up, copies_down, copies, launches, graph_launches, waits;
};
struct Device {
  int32_t version, major, minor;
  uint32_t order;                               /* of fibers */
  int64_t bytes;                                /* of memory */
  int64_t fail_at, error;                       /* the launch with this number from now on fails so; 0: none */
  int32_t init_error, memory_error, wait_error; /* of cuInit, of every allocation, of every wait; 0: none */
};
static Counts counts;
static Device device = {13000, 9, 0, 0, (int64_t)1 << 40, 0, 0, 0, 0, 0};
static Allocation *allocations, *pinned;
static UnendedCopy* copies;
static uint64_t copy_number;
static Limit* limits;
static size_t allocated;
static const char* launch_error;

extern "C" EXPORTED void tapeout_stand_in_counts(Counts* to) {
  *to = counts;
}
extern "C" EXPORTED void tapeout_stand_in_set(const Device* to) {
  device = *to;
}

static bool is_in(const Allocation* one, DevicePointer at, size_t bytes) {
  for (; one; one = one->next) {
    const DevicePointer first = (DevicePointer)one->memory;
    if (at >= first && at <= first + one->bytes && bytes <= first + one->bytes - at) return true;
  }
  return false;
}
static bool is_live(DevicePointer at, size_t bytes) {
  return is_in(allocations, at, bytes);
}

/* Copies up to a number have ended. */
static int end_copies(uint64_t number) {
  bool changed = false;
  for (UnendedCopy** at = &copies; *at;) {
    UnendedCopy* one = *at;
    if (one->number > number) {
      at = &one->next;
      continue;
    }
    changed |= memcmp(one->from, one->content, one->bytes) != 0;
    *at = one->next;
    free(one->content), free(one);
  }
  if (!changed) return SUCCESS;
  launch_error = "pinned memory was written before it was copied";
  return LAUNCH_FAILED;
}

extern "C" {
int cuInit(unsigned) {
  return device.init_error ? device.init_error : device.major ? SUCCESS : NO_DEVICE;
}
int cuDriverGetVersion(int* version) {
  *version = device.version;
  return SUCCESS;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == LAUNCH_FAILED && launch_error ? launch_error
          : error == LAUNCH_FAILED               ? "unspecified launch failure"
          : error == OUT_OF_MEMORY               ? "out of memory"
          : error == 214                         ? "uncorrectable ECC error encountered"
                                                 : "an error of the stand-in for a driver";
  return SUCCESS;
}
int cuDeviceGetCount(int* count) {
  *count = 1;
  return SUCCESS;
}
int cuDeviceGet(int* number, int) {
  *number = 0;
  return SUCCESS;
}
int cuDeviceGetName(char* name, int length, int) {
  snprintf(name, (size_t)length, "stand-in for a GPU");
  return SUCCESS;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == MAJOR ? device.major : attribute == MINOR ? device.minor : 8;
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &device;
  return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int) {
  return SUCCESS;
}
int cuCtxSetCurrent(void*) {
  return SUCCESS;
}
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  *total = (size_t)device.bytes;
  *free = *total > allocated ? *total - allocated : 0;
  return SUCCESS;
}

int cuMemAlloc_v2(DevicePointer* memory, size_t bytes) {
  counts.allocations++;
  if (device.memory_error) return device.memory_error;
  if (!bytes || bytes > (size_t)device.bytes - allocated) return OUT_OF_MEMORY;
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return OUT_OF_MEMORY;
  Allocation* one = static_cast<Allocation*>(malloc(sizeof *one));
  if (!one) return munmap(pages, bytes), OUT_OF_MEMORY;
  *one = {static_cast<char*>(pages), bytes, allocations};
  allocations = one, allocated += bytes;
  *memory = (DevicePointer)pages;
  return SUCCESS;
}
int cuMemFree_v2(DevicePointer memory) {
  for (Allocation** at = &allocations; *at; at = &(*at)->next) {
    Allocation* one = *at;
    if ((DevicePointer)one->memory != memory) continue;
    *at = one->next, allocated -= one->bytes;
    munmap(one->memory, one->bytes);
    free(one);
    return SUCCESS;
  }
  return INVALID_VALUE;
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  counts.allocations++;
  *memory = malloc(bytes);
  Allocation* one = static_cast<Allocation*>(malloc(sizeof *one));
  if (!*memory || !one) return free(*memory), free(one), OUT_OF_MEMORY;
  *one = {static_cast<char*>(*memory), bytes, pinned};
  pinned = one;
  return SUCCESS;
}
int cuMemFreeHost(void* memory) {
  end_copies(copy_number);
  for (Allocation** at = &pinned; *at; at = &(*at)->next) {
    Allocation* one = *at;
    if (one->memory != memory) continue;
    *at = one->next;
    free(one), free(memory);
    return SUCCESS;
  }
  return INVALID_VALUE;
}

int cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, size_t bytes, void* stream) {
  counts.copies_up++;
  if (static_cast<Stream*>(stream)->captured) return CAPTURE_UNSUPPORTED;
  if (!is_live(to, bytes)) return INVALID_VALUE;
  memcpy((void*)to, from, bytes);
  if (!is_in(pinned, (DevicePointer)from, bytes)) return SUCCESS;
  UnendedCopy* one = static_cast<UnendedCopy*>(malloc(sizeof *one));
  char* content = static_cast<char*>(malloc(bytes));
  if (!one || !content) return free(one), free(content), OUT_OF_MEMORY;
  memcpy(content, from, bytes);
  *one = {static_cast<const char*>(from), content, bytes, ++copy_number, copies};
  copies = one;
  return SUCCESS;
}
int cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, size_t bytes, void* stream) {
  counts.copies_down++;
  if (static_cast<Stream*>(stream)->captured) return CAPTURE_UNSUPPORTED;
  if (!is_live(from, bytes)) return INVALID_VALUE;
  memcpy(to, (const void*)from, bytes);
  return SUCCESS;
}
int cuMemcpy2DAsync_v2(const Copy2D* copy, void* stream) {
  counts.copies++;
  if (static_cast<Stream*>(stream)->captured) return CAPTURE_UNSUPPORTED;
  for (size_t row = 0; row < copy->height; row++) {
    const DevicePointer from = copy->source + row * copy->source_pitch, to = copy->target + row * copy->target_pitch;
    if (!is_live(from, copy->width) || !is_live(to, copy->width)) return INVALID_VALUE;
    memcpy((void*)to, (const void*)from, copy->width);
  }
  return SUCCESS;
}
int cuMemsetD8Async(DevicePointer to, unsigned char value, size_t bytes, void* stream) {
  if (static_cast<Stream*>(stream)->captured) return CAPTURE_UNSUPPORTED;
  if (!is_live(to, bytes)) return INVALID_VALUE;
  memset((void*)to, value, bytes);
  return SUCCESS;
}

/* All machine code is for GPUs from 8.0 on. */
int cuModuleLoadData(void** module, const void* image) {
  if (image && device.major < 8) return NO_BINARY_FOR_GPU;
  *module = const_cast<void*>(image ? image : &device);
  return SUCCESS;
}
int cuModuleUnload(void*) {
  return SUCCESS;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
  counts.allocations++; /* a kernel is loaded when it is first asked for */
  *function = const_cast<Registration*>(find_kernel(name));
  return *function ? SUCCESS : NOT_FOUND;
}
int cuFuncSetAttribute(void* function, int, int value) {
  Limit* limit = static_cast<Limit*>(malloc(sizeof *limit));
  if (!limit) return OUT_OF_MEMORY;
  *limit = {static_cast<const Registration*>(function), value, limits};
  limits = limit;
  return SUCCESS;
}

static int run_node(const Node* node) {
  counts.launches++;
  if (device.fail_at && !--device.fail_at) return launch_error = nullptr, (int)device.error;
  launch_error =
      run_kernel(node->kernel, node->parameters, node->grid, node->threads, node->shared_bytes, device.order);
  return launch_error ? LAUNCH_FAILED : SUCCESS;
}

int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                   unsigned shared_bytes, void* stream, void** parameters, void**) {
  Node node = {static_cast<const Registration*>(function), {x, y, z}, threads, shared_bytes, parameters[0]};
  int most = PLAIN_SHARED_BYTES;
  for (const Limit* limit = limits; limit; limit = limit->next)
    if (limit->kernel == node.kernel && limit->bytes > most) most = limit->bytes;
  if (!x || !y || !z || y > 65535 || z > 65535 || (int)shared_bytes > most) return INVALID_VALUE;
  Graph* graph = static_cast<Stream*>(stream)->captured;
  if (!graph) return run_node(&node);
  if (graph->count == graph->room) {
    graph->room = graph->room ? 2 * graph->room : 64;
    void* more = realloc(graph->nodes, graph->room * sizeof(Node));
    if (!more) return OUT_OF_MEMORY;
    graph->nodes = static_cast<Node*>(more);
  }
  node.parameters = malloc(node.kernel->bytes);
  if (!node.parameters) return OUT_OF_MEMORY;
  memcpy(node.parameters, parameters[0], node.kernel->bytes);
  graph->nodes[graph->count++] = node;
  return SUCCESS;
}

int cuStreamCreate(void** stream, unsigned) {
  *stream = calloc(1, sizeof(Stream));
  return *stream ? SUCCESS : OUT_OF_MEMORY;
}
int cuStreamDestroy_v2(void* stream) {
  free(stream);
  return SUCCESS;
}
int cuStreamSynchronize(void* stream) {
  counts.waits++;
  return static_cast<Stream*>(stream)->captured ? CAPTURE_UNSUPPORTED : end_copies(copy_number);
}
int cuEventCreate(void** event, unsigned) {
  *event = calloc(1, sizeof(Event));
  return *event ? SUCCESS : OUT_OF_MEMORY;
}
int cuEventDestroy_v2(void* event) {
  free(event);
  return SUCCESS;
}
int cuEventRecord(void* event, void* stream) {
  if (static_cast<Stream*>(stream)->captured) return CAPTURE_UNSUPPORTED;
  *static_cast<Event*>(event) = {stream, copy_number};
  return SUCCESS;
}
int cuEventSynchronize(void* event) {
  counts.waits++;
  const Event* found = static_cast<const Event*>(event);
  if (device.wait_error) return device.wait_error;
  return found->stream ? end_copies(found->number) : INVALID_VALUE;
}
int cuStreamBeginCapture_v2(void* stream, int) {
  Graph** captured = &static_cast<Stream*>(stream)->captured;
  if (*captured) return INVALID_VALUE;
  *captured = static_cast<Graph*>(calloc(1, sizeof(Graph)));
  return *captured ? SUCCESS : OUT_OF_MEMORY;
}
int cuStreamEndCapture(void* stream, void** graph) {
  *graph = static_cast<Stream*>(stream)->captured;
  static_cast<Stream*>(stream)->captured = nullptr;
  return *graph ? SUCCESS : INVALID_VALUE;
}
/* The executable is the graph itself. */
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  *executable = graph;
  return SUCCESS;
}
int cuGraphLaunch(void* executable, void* stream) {
  counts.graph_launches++;
  if (static_cast<Stream*>(stream)->captured) return CAPTURE_UNSUPPORTED;
  const Graph* graph = static_cast<const Graph*>(executable);
  int error = SUCCESS;
  for (size_t i = 0; i < graph->count && !error; i++) error = run_node(&graph->nodes[i]);
  return error;
}
int cuGraphDestroy(void*) {
  return SUCCESS;
}
int cuGraphExecDestroy(void* executable) {
  Graph* graph = static_cast<Graph*>(executable);
  for (size_t i = 0; i < graph->count; i++) free(graph->nodes[i].parameters);
  free(graph->nodes);
  free(graph);
  return SUCCESS;
}
}
