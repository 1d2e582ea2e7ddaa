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

/* One move at a time: the cores that a thread may run on are read, changed and set again, and of two moves of the same
   thread the second would read those of the first, and leave the thread on them for good. */
static pthread_mutex_t moving = PTHREAD_MUTEX_INITIALIZER;

/* The system moves a thread that may not be where it is. */
static void keep_for_a_moment(pthread_t thread, const cpu_set_t* cores, const cpu_set_t* allowed) {
  if (!pthread_setaffinity_np(thread, sizeof *cores, cores)) pthread_setaffinity_np(thread, sizeof *allowed, allowed);
}

/* To a core, or away from it. Not while another thread is moved: a move is only worth it at once. */
static void move(pthread_t thread, int core, int away) {
  cpu_set_t allowed, cores;
  if (core < 0 || core >= CPU_SETSIZE || pthread_mutex_trylock(&moving)) return;
  if (!pthread_getaffinity_np(thread, sizeof allowed, &allowed) && CPU_ISSET(core, &allowed)) {
    if (away) {
      cores = allowed;
      CPU_CLR(core, &cores);
    } else {
      CPU_ZERO(&cores);
      CPU_SET(core, &cores);
    }
    if (CPU_COUNT(&cores)) keep_for_a_moment(thread, &cores, &allowed);
  }
  pthread_mutex_unlock(&moving);
}

void move_to(pthread_t thread, int core) {
  move(thread, core, 0);
}

void move_away_from(pthread_t thread, int core) {
  move(thread, core, 1);
}
