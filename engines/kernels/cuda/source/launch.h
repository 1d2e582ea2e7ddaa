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

/* launch.cpp: how many launches an operator needs, which they fill. */
#ifdef __cplusplus
extern "C" {
#endif
EXPORTED int tapeout_cuda_block_linear(const BlockLinear* p, uint32_t many_blocks, Launch* launch);
EXPORTED int tapeout_cuda_norm(const Norm* p, Launch* launch);
EXPORTED int tapeout_cuda_quantize(const Quantize* p, Launch* launch);
EXPORTED int tapeout_cuda_finite(const Finite* p, Launch* launch);
EXPORTED int tapeout_cuda_gated(const Gated* p, Launch* launch);
EXPORTED int tapeout_cuda_block_gather(const BlockGather* p, Launch* launch);
EXPORTED int tapeout_cuda_choose(const Choose* p, Launch* launches);
EXPORTED int tapeout_cuda_attention(const Attention* p, uint32_t multiprocessors, Launch* launches);
#ifdef __cplusplus
}
#endif

#endif
