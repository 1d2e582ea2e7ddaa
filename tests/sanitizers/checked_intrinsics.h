/* Included before the kernels in a sanitizer build, for the intrinsics that AddressSanitizer does not check: a prefetch
   becomes a read, and masked loads and stores of AVX2 access their lanes one by one. */
#ifndef TAPEOUT_CHECKED_INTRINSICS_H
#define TAPEOUT_CHECKED_INTRINSICS_H

#define _GNU_SOURCE /* as a file that includes this first may need it */
#include <immintrin.h>
#include <string.h>

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

#define __builtin_prefetch(at, ...)       checked_prefetch(at)
#define _mm256_maskload_ps(from, mask)    _mm256_castsi256_ps(checked_load(from, mask))
#define _mm256_maskload_epi32(from, mask) checked_load(from, mask)
#define _mm256_maskstore_ps(to, mask, x)  checked_store(to, mask, x)

#endif
