/* The functions of NVIDIA's driver that an engine calls, by their names in its library.

   At levels of GPUs they are those of libcuda.so.1, which is opened when an engine is; at level `host` those of
   stand_in.cpp. Neither headers nor libraries of CUDA are needed to build or to run. */
#ifndef TAPEOUT_DRIVER_HPP
#define TAPEOUT_DRIVER_HPP

#include <stddef.h>
#include <stdint.h>

typedef uint64_t DevicePointer;
typedef struct Copy2D Copy2D;
enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_IMAGE = 200,
  NO_BINARY_FOR_GPU = 209,
  NOT_FOUND = 500,
  LAUNCH_FAILED = 719,
  CAPTURE_UNSUPPORTED = 900
};
enum { MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76 }; /* attributes of a device */
enum { MOST_SHARED_BYTES = 8 };                        /* attribute of a function */
enum { PLAIN_SHARED_BYTES = 48 << 10 };                /* what a launch may have without it */
enum { CAPTURE_THIS_THREAD = 1, NON_BLOCKING = 1, NO_TIMING = 2 };

/* Rows of `width` bytes from one place of device memory to another. The names and order are CUDA_MEMCPY2D's. */
struct Copy2D {
  size_t source_x, source_y;
  unsigned source_type;
  const void* source_host;
  DevicePointer source;
  void* source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  unsigned target_type;
  void* target_host;
  DevicePointer target;
  void* target_array;
  size_t target_pitch, width, height;
};
enum { DEVICE_MEMORY = 2 };

#define DRIVER_FUNCTIONS(F)                                                                                     \
  F(cuInit, (unsigned flags))                                                                                   \
  F(cuDriverGetVersion, (int* version))                                                                         \
  F(cuGetErrorString, (int error, const char** text))                                                           \
  F(cuDeviceGetCount, (int* count))                                                                             \
  F(cuDeviceGet, (int* device, int ordinal))                                                                    \
  F(cuDeviceGetName, (char* name, int length, int device))                                                      \
  F(cuDeviceGetAttribute, (int* value, int attribute, int device))                                              \
  F(cuDevicePrimaryCtxRetain, (void** context, int device))                                                     \
  F(cuDevicePrimaryCtxRelease_v2, (int device))                                                                 \
  F(cuCtxSetCurrent, (void* context))                                                                           \
  F(cuMemGetInfo_v2, (size_t* free, size_t* total))                                                             \
  F(cuMemAlloc_v2, (DevicePointer * memory, size_t bytes))                                                      \
  F(cuMemFree_v2, (DevicePointer memory))                                                                       \
  F(cuMemHostAlloc, (void** memory, size_t bytes, unsigned flags))                                              \
  F(cuMemFreeHost, (void* memory))                                                                              \
  F(cuMemcpyHtoDAsync_v2, (DevicePointer to, const void* from, size_t bytes, void* stream))                     \
  F(cuMemcpyDtoHAsync_v2, (void* to, DevicePointer from, size_t bytes, void* stream))                           \
  F(cuMemcpy2DAsync_v2, (const Copy2D* copy, void* stream))                                                     \
  F(cuMemsetD8Async, (DevicePointer to, unsigned char value, size_t bytes, void* stream))                       \
  F(cuModuleLoadData, (void** module, const void* image))                                                       \
  F(cuModuleUnload, (void* module))                                                                             \
  F(cuModuleGetFunction, (void** function, void* module, const char* name))                                     \
  F(cuFuncSetAttribute, (void* function, int attribute, int value))                                             \
  F(cuLaunchKernel,                                                                                             \
    (void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads_x, unsigned threads_y, \
     unsigned threads_z, unsigned shared_bytes, void* stream, void** parameters, void** extra))                 \
  F(cuStreamCreate, (void** stream, unsigned flags))                                                            \
  F(cuStreamDestroy_v2, (void* stream))                                                                         \
  F(cuStreamSynchronize, (void* stream))                                                                        \
  F(cuEventCreate, (void** event, unsigned flags))                                                              \
  F(cuEventDestroy_v2, (void* event))                                                                           \
  F(cuEventRecord, (void* event, void* stream))                                                                 \
  F(cuEventSynchronize, (void* event))                                                                          \
  F(cuStreamBeginCapture_v2, (void* stream, int mode))                                                          \
  F(cuStreamEndCapture, (void* stream, void** graph))                                                           \
  F(cuGraphInstantiateWithFlags, (void** executable, void* graph, unsigned long long flags))                    \
  F(cuGraphLaunch, (void* executable, void* stream))                                                            \
  F(cuGraphDestroy, (void* graph))                                                                              \
  F(cuGraphExecDestroy, (void* executable))

/* The stand-in's, under the names of the driver: its library can be opened in place of libcuda.so.1. Protected: what
   else the process has loaded does not replace them. */
#define DECLARED(name, arguments) extern "C" __attribute__((visibility("protected"))) int name arguments;
DRIVER_FUNCTIONS(DECLARED)
#undef DECLARED

#define FIELD(name, arguments) int(*name) arguments;
typedef struct {
  DRIVER_FUNCTIONS(FIELD)
} Driver;
#undef FIELD

#endif
