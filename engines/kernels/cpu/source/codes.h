/* Codes of weights as engines/passes/onnxruntime/block_linears.py packs them. A tile is 16 output channels, the lanes of a vector; a
   step is 4 input channels, which a lane sums at once. A step of a tile is 64 codes, lane by lane. Tiles come in pairs. */
#ifndef TAPEOUT_CODES_H
#define TAPEOUT_CODES_H

#include <stdint.h>

enum { TILE = 16, STEP = 4 };
enum { LARGEST_N = 1 << 28, LARGEST_K = 1 << 24 }; /* sizes in bytes fit 64 bits, and columns 32 */

/* Codes of 4 bits may be floats, E2M1 of the Microscaling formats: twice their values are these integers, as codes of 5
   bits. The scales of such codes are bytes, E8M0: 2^(byte - 127). */
enum { E2M1_BITS = 5 };
static const uint8_t E2M1_CODES[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

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
