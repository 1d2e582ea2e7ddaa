/* On which core a thread runs. Where other processes are busy, too, the system lets a thread wait for its core for some
   milliseconds, and does not move it to another, though every other thread of a job waits for it. */
#ifndef TAPEOUT_PLACEMENT_H
#define TAPEOUT_PLACEMENT_H

#include <pthread.h>

/* Of the calling thread; -1 if the system does not say. */
int current_core(void);

/* Nanoseconds that a thread has run, which stand still while another process has its core; 0 if the system does not say. */
long long run_time(pthread_t thread);

/* Moves a thread to a core, or away from it, where the cores that it may run on allow that. It may run on the same ones
   after. */
void move_to(pthread_t thread, int core);
void move_away_from(pthread_t thread, int core);

#endif
