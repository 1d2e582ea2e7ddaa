/* Included before the kernels in a sanitizer build, for the intrinsics that AddressSanitizer does not check: a prefetch
   becomes a read, masked loads and stores of AVX2 access their lanes one by one, and rows of tiles are accessed byte by byte
   before they are loaded or stored. */
#ifndef TAPEOUT_CHECKED_INTRINSICS_H
#define TAPEOUT_CHECKED_INTRINSICS_H

#include "intrinsics.h"

static inline void checked_prefetch(const void* at) {
  (void)*(const volatile char*)at;
}

static inline __m256i checked_load(const void* from, __m256i mask) {
  int selected[8], lanes[8] = {0};
  __m256i loaded;
  memcpy(selected, &mask, sizeof mask);
  for (int i = 0; i < 8; i++)
    if (selected[i] < 0) memcpy(&lanes[i], (const char*)from + 4 * i, 4);
  memcpy(&loaded, lanes, sizeof loaded);
  return loaded;
}

static inline void checked_store(void* to, __m256i mask, __m256 x) {
  int selected[8], lanes[8];
  memcpy(selected, &mask, sizeof mask);
  memcpy(lanes, &x, sizeof x);
  for (int i = 0; i < 8; i++)
    if (selected[i] < 0) memcpy((char*)to + 4 * i, &lanes[i], 4);
}

#ifdef __AMX_TILE__
/* As STTILECFG tells them. */
typedef struct {
  unsigned char begin[16];
  unsigned short row_bytes[16];
  unsigned char rows[16];
} CheckedShapes;

static inline const void* checked_rows(int tile, const void* from, long stride) {
  CheckedShapes shapes;
  _tile_storeconfig(&shapes);
  for (int row = 0; row < shapes.rows[tile]; row++)
    for (int byte = 0; byte < shapes.row_bytes[tile]; byte++) (void)*((const volatile char*)from + row * stride + byte);
  return from;
}

#undef _tile_loadd
#undef _tile_stored
#define _tile_loadd(tile, from, stride) __builtin_ia32_tileloadd64(tile, checked_rows(tile, from, stride), stride)
#define _tile_stored(tile, to, stride)  __builtin_ia32_tilestored64(tile, (void*)checked_rows(tile, to, stride), stride)
#endif

#define __builtin_prefetch(at, ...)       checked_prefetch(at)
#define _mm256_maskload_ps(from, mask)    _mm256_castsi256_ps(checked_load(from, mask))
#define _mm256_maskload_epi32(from, mask) checked_load(from, mask)
#define _mm256_maskstore_ps(to, mask, x)  checked_store(to, mask, x)

#endif
