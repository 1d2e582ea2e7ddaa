/* Chooses whether one thread computes or all, by measuring both when a session starts.

   Two processors of a virtual machine may be one core of the real one. Two threads are then no faster than one, and take
   the core from other processes. What is measured is one token, which memory limits, and several, which arithmetic does.
   Both ways take turns, and a way's time is that of its fastest turn: other processes only add to it. */
#define _GNU_SOURCE
#include "ort.h"

#include <time.h>

/* All threads must save some of the time, or one computes. */
static const double LARGEST_SHARE = 0.95;
enum { TURNS = 5, SEVERAL = 8 };
/* Whatever else has a core for some milliseconds makes one thread look as fast. So it must be so several times. */
enum { CONFIRMED = 4, PAUSE_NANOSECONDS = 50000000 };
/* Weights of a turn: about a millisecond for one thread. */
enum { BYTES_FOR_ONE = 16 << 20, BYTES_FOR_SEVERAL = 4 << 20 };

static double seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Seconds for linears with about so many bytes of weights; 0 if there are none, or no memory. */
static double time_linears(void* const* linears, size_t count, int64_t tokens, size_t bytes) {
  const double begin = seconds();
  size_t read = 0;
  for (size_t i = 0; i < count && read < bytes; i++) {
    const size_t some = linear_bytes(linears[i]);
    if (!some) continue;
    if (!compute_zeros(linears[i], tokens)) return 0;
    read += some;
  }
  return read ? seconds() - begin : 0;
}

/* The time of all threads as a share of one thread's; 0 if it cannot be measured. */
static double share_of_all(Threads* threads, void* const* linears, size_t count, int64_t tokens, size_t bytes) {
  double fastest[2] = {0, 0}; /* of all, of one */
  for (int turn = 0; turn < TURNS; turn++)
    for (int alone = 0; alone < 2; alone++) {
      compute_alone(threads, alone);
      const double taken = time_linears(linears, count, tokens, bytes);
      if (!(taken > 0)) return 0;
      if (!turn || taken < fastest[alone]) fastest[alone] = taken;
    }
  return fastest[0] / fastest[1];
}

static int is_one_as_fast(Threads* threads, void* const* linears, size_t count) {
  const double one = share_of_all(threads, linears, count, 1, BYTES_FOR_ONE);
  const double several = share_of_all(threads, linears, count, SEVERAL, BYTES_FOR_SEVERAL);
  return (one + several) / 2 > LARGEST_SHARE;
}

size_t choose_threads(Threads* threads, void* const* linears, size_t count) {
  int alone = is_one_as_fast(threads, linears, count);
  for (int again = 1; again < CONFIRMED && alone; again++) {
    nanosleep(&(struct timespec){0, PAUSE_NANOSECONDS}, NULL);
    alone = is_one_as_fast(threads, linears, count);
  }
  compute_alone(threads, alone);
  return alone ? 1 : count_threads(threads);
}
