/* Included before the kernels in a sanitizer build: a prefetch becomes a read, so that an address beyond a tensor is an
   error. */
#ifndef TAPEOUT_CHECKED_PREFETCH_H
#define TAPEOUT_CHECKED_PREFETCH_H

#include <immintrin.h>
#undef _mm_prefetch

static inline void checked_prefetch(const void* at) {
  (void)*(const volatile char*)at;
}
#define _mm_prefetch(at, hint) checked_prefetch(at)

#endif
