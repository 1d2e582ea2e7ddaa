/* Codes of weights as engines/passes/onnxruntime/block_linears.py packs them. A tile is 16 output channels, the lanes of a vector; a
   step is 4 input channels, which a lane sums at once. A step of a tile is 64 codes, lane by lane. Tiles come in pairs. */
#ifndef TAPEOUT_CODES_H
#define TAPEOUT_CODES_H

#include <stdint.h>

enum { TILE = 16, STEP = 4 };
enum { LARGEST_N = 1 << 28, LARGEST_K = 1 << 24 }; /* sizes in bytes fit 64 bits, and columns 32 */

/* Steps whose codes lie together in whole vectors of 64 bytes. Each block has a multiple of them. */
static inline int joined_steps(const int bits) {
  return bits == 5 ? 8 : 4;
}

/* Whether there are kernels for a weight `[N, K]` in blocks of codes of `bits` bits. */
static inline int is_supported(int64_t N, int64_t K, int64_t block, int64_t bits) {
  return N >= 1 && N <= LARGEST_N && K >= 1 && K <= LARGEST_K && (bits == 4 || bits == 5 || bits == 6 || bits == 8) &&
         block >= 1 && block % (STEP * joined_steps((int)bits)) == 0 && K % block == 0;
}

#endif
