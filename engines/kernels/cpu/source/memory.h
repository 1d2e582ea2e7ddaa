/* Huge pages and prefetches. With pages of 4 KiB a processor that reads memory in order looks up an address after every
   64 lines, in a virtual machine through two trees of tables. */
#ifndef TAPEOUT_MEMORY_H
#define TAPEOUT_MEMORY_H

#include <stddef.h>
#include <stdint.h>

enum { HUGE_PAGE = 2 << 20 };
/* Of linux/mman.h, from the kernels 2.6.38 and 5.4; a kernel refuses what it does not know, and pages stay small. */
enum { ADVICE_HUGE_PAGE = 14, ADVICE_PAGE_OUT = 21 };
int madvise(void* address, size_t bytes, int advice);

/* Brings a cache line to all levels of the cache, or to all but the first. Any address will do. */
static inline void prefetch_l1(const void* line) {
  __builtin_prefetch(line, 0, 3);
}
static inline void prefetch_l2(const void* line) {
  __builtin_prefetch(line, 0, 2);
}

/* Memory from `at` to `end` that is prefetched while something else is computed, `lines` lines at a time: a core waits for
   a few dozen lines at once, and a prefetch beyond them holds up every other load. */
typedef struct {
  const char *at, *end;
  int64_t lines;
} Ahead;

static inline void prefetch_some(Ahead* ahead) {
  for (int64_t i = 0; i < ahead->lines && ahead->at < ahead->end; i++, ahead->at += 64) prefetch_l2(ahead->at);
}

#endif
