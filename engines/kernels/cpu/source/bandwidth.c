/* The read bandwidth of the memory: what every share of the roofline is relative to, so no kernel may read faster.

   Each thread reads a contiguous part of one buffer, as the threads of a linear do. The distance of the prefetch that is
   fastest differs by processor and by what its neighbours do, so several are tried. The buffer has huge pages, as weights
   have (threads.c). */
#include "memory.h"
#include "vector.h"

#include <pthread.h>
#include <stdlib.h>
#include <threads.h>
#include <time.h>

enum { MOST_THREADS = 1024, LINE = 64, STRIDE = 8 * LINE, REST_NS = 2000000 };
static const int64_t PREFETCH_BYTES[] = {0, 1 << 10, 2 << 10, 4 << 10, 8 << 10};

typedef struct {
  const char* data;
  int64_t bytes, prefetch;
  double start, end;
  int32_t sum; /* is used, so that the loads are not removed */
} Reader;

static double now(void) {
  struct timespec time;
  timespec_get(&time, TIME_UTC);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void* read_part(void* state) {
  Reader* r = state;
  I32x16 sums[STRIDE / LINE] = {{0}};
  r->start = now();
  for (int64_t at = 0; at < r->bytes; at += STRIDE)
    EACH (int i = 0; i < STRIDE / LINE; i++) {
      const char* line = r->data + at + i * LINE;
      if (r->prefetch && at + r->prefetch < r->bytes) prefetch_l1(line + r->prefetch);
      sums[i] ^= load_int(line);
    }
  r->end = now();
  EACH (int i = 1; i < STRIDE / LINE; i++) sums[0] ^= sums[i];
  r->sum = reduce_min_int(sums[0]);
  return NULL;
}

/* Bytes per second of one read of `bytes` bytes by `threads` threads, from the first's start to the last's end; 0 if a
   thread cannot be started. Threads do not spin until all are there: the system would interrupt those that spun. */
static double sweep(const char* data, int64_t bytes, int64_t threads, int64_t prefetch) {
  pthread_t started[MOST_THREADS];
  Reader readers[MOST_THREADS];
  const int64_t part = bytes / threads / STRIDE * STRIDE;
  thrd_sleep(&(struct timespec){.tv_nsec = REST_NS}, NULL);
  for (int64_t i = 0; i < threads; i++)
    readers[i] = (Reader){.data = data + i * part, .bytes = part, .prefetch = prefetch};
  int64_t running = 1;
  while (running < threads && !pthread_create(&started[running], NULL, read_part, &readers[running])) running++;
  read_part(&readers[0]);
  double start = readers[0].start, end = readers[0].end;
  for (int64_t i = 1; i < running; i++) {
    pthread_join(started[i], NULL);
    if (readers[i].start < start) start = readers[i].start;
    if (readers[i].end > end) end = readers[i].end;
  }
  return running == threads ? (double)(part * threads) / (end - start) : 0;
}

/* The best of `trials` sweeps for each distance, in bytes per second; 0 if there is no memory or thread for it. */
__attribute__((visibility("default"))) double tapeout_read_bandwidth(int64_t bytes, int64_t threads, int64_t trials) {
  if (threads < 1 || threads > MOST_THREADS || bytes < threads * STRIDE || bytes > PTRDIFF_MAX - HUGE_PAGE) return 0;
  const int64_t rounded = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  char* data = aligned_alloc(HUGE_PAGE, rounded);
  if (!data) return 0;
  madvise(data, rounded, ADVICE_HUGE_PAGE);
  memset(data, 1, rounded);
  double best = 0;
  for (int64_t trial = 0; trial < trials; trial++)
    for (size_t i = 0; i < sizeof PREFETCH_BYTES / sizeof *PREFETCH_BYTES; i++) {
      const double speed = sweep(data, bytes, threads, PREFETCH_BYTES[i]);
      if (speed > best) best = speed;
    }
  free(data);
  return best;
}
