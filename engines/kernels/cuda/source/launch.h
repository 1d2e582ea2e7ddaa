/* What the host's side sees of kernels: their parameters, and how an operator is launched (launch.cpp).

   M  tokens     N  output channels     K  input channels     All pointers are of device memory. */
#ifndef TAPEOUT_LAUNCH_H
#define TAPEOUT_LAUNCH_H

#include "parameters.h"

#define EXPORTED __attribute__((visibility("default")))

typedef struct {
  char kernel[56];
  const void* parameters; /* of the caller's, until the launch */
  uint32_t grid[3], threads, shared_bytes;
} Launch;

#endif
