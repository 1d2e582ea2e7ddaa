/* See placement.h. Systems with more than CPU_SETSIZE cores answer with an error: threads then stay where they are. */
#define _GNU_SOURCE
#include "placement.h"

#include <sched.h>
#include <time.h>

int current_core(void) {
  return sched_getcpu();
}

long long run_time(pthread_t thread) {
  clockid_t clock;
  struct timespec time;
  if (pthread_getcpuclockid(thread, &clock) || clock_gettime(clock, &time)) return 0;
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* The system moves a thread that may not be where it is. */
static void keep_for_a_moment(pthread_t thread, const cpu_set_t* cores, const cpu_set_t* allowed) {
  if (!pthread_setaffinity_np(thread, sizeof *cores, cores)) pthread_setaffinity_np(thread, sizeof *allowed, allowed);
}

void move_to(pthread_t thread, int core) {
  cpu_set_t allowed, only;
  if (core < 0 || core >= CPU_SETSIZE || pthread_getaffinity_np(thread, sizeof allowed, &allowed)) return;
  if (!CPU_ISSET(core, &allowed)) return;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  keep_for_a_moment(thread, &only, &allowed);
}

void move_away_from(pthread_t thread, int core) {
  cpu_set_t allowed, others;
  if (core < 0 || core >= CPU_SETSIZE || pthread_getaffinity_np(thread, sizeof allowed, &allowed)) return;
  others = allowed;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others)) keep_for_a_moment(thread, &others, &allowed);
}
