/* The threads of a session's native operators: they stay from node to node, and a node costs a cache line each way.

   A job is cut into ranges, one for each thread. A thread takes the indexes of its own range in order and then what is
   left of the others'. So the same thread reads the same weights in every step, nobody waits for a thread that sleeps or
   was interrupted before its first index, and the caller alone can do it all.

   Between jobs a thread reads the weights of the linears that come next, so that caches have them, then spins, then
   sleeps. Which linear is next is learned from the step before: nodes run in the same order in each. A wrong guess costs
   bandwidth alone. Between two nodes there is time for a hundred kilobytes, between two steps for the first layers of the
   next.

   Beside other processes a thread may lose its core in the middle of a job, and the system leaves it waiting for some
   milliseconds while the others wait for it. So whoever waits looks whether it runs, and lends it a core: a caller that
   waits for a thread moves it to its own core and sleeps; a thread that waits for a caller changes places with it. A
   thread on the caller's core goes to another. Nobody is bound to a core.

   Memory order. Processors with 64-bit ARM reorder more than x86, so what follows is argued from C11 alone, where an
   atomic access is sequentially consistent unless it says otherwise:
   - The job's plain fields (`work`, `state`, the ends of ranges) are written before `open` = 1 and read after `open` was
     read as 1: the store releases them, the load acquires them.
   - They are written again only when no thread reads them. A thread stores `active` = 1, then loads `open`; the caller
     stores `open` = 0, then loads `active`. In the one order of all these accesses either the thread sees 0 and stays
     away, or the caller sees 1 and waits. Weaker orders would let both loads come before both stores.
   - What a thread wrote in a job it releases by `active` = 0, which the caller acquires.
   - `jobs` and `sleeping` are such a pair, too: a thread that goes to sleep sees the job, or its caller sees the sleeper.
     So are `active` and `caller_sleeps`: the caller sees that a thread has left, or the thread sees that the caller sleeps.
   - The relaxed load of `next` saves an atomic addition where a range is empty. It reads this job's value or a later one,
     since `open` came between, and only the addition gives an index away. */
#include "ort.h"
#include "placement.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { CACHE_LINE = 64 };
/* About half a millisecond on AMD, three times as long on Intel: longer than what lies between the steps of a decode. */
enum { SPINS = 1 << 15 };
/* Some 40 microseconds: a wait at the end of a job, unless a thread was interrupted. Then its run time is looked at twice,
   some 5 microseconds apart. */
enum { END_SPINS = 1 << 11, PROBE_SPINS = 1 << 8, PROBE_NANOSECONDS = 1000 };
/* A thread that has missed so many jobs may be waiting for the caller's core. */
enum { MISSED = 16 };
/* What a thread reads ahead of its own ranges, and of the caller's: half of a second-level cache of 1 MiB of the next
   linear, and then as much as a third-level cache keeps. */
enum { AHEAD_BYTES = 4 << 20, AHEAD_FOR_CALLER = 1 << 18, AHEAD_SLICE = 1 << 10 };

typedef struct {
  _Alignas(CACHE_LINE) _Atomic size_t next; /* index */
  size_t end;
  _Alignas(CACHE_LINE) _Atomic int active; /* the thread may use the job */
  _Atomic uint32_t seen;                   /* the last job that the thread knows of */
} Range;

typedef struct {
  Threads* threads;
  size_t number;
} Helper;

struct Threads {
  _Alignas(CACHE_LINE) _Atomic uint32_t jobs; /* counts them; waiting threads read nothing else */
  _Atomic int ending;
  /* The job, written by the caller while no thread is active. */
  _Alignas(CACHE_LINE) _Atomic int open;
  void (*work)(void*, size_t);
  void* state;
  _Atomic(Stream*) ahead; /* what the next job reads */
  pthread_t caller;
  _Atomic int core; /* where the caller runs */

  _Alignas(CACHE_LINE) size_t count; /* threads, the caller's too; started when the first kernel is created */
  int alone;                         /* the caller computes without the others */
  atomic_flag busy;
  Stream* last;
  Range* ranges;
  Helper* helpers;
  pthread_t* started;
  pthread_mutex_t lock; /* of what follows */
  pthread_cond_t wake, done;
  _Atomic int sleeping, caller_sleeps;
  int kernels;
  Stream* streams; /* all of them */
};

/* Between two looks of a thread that spins. On ARM `isb` takes about as long as x86's `pause`; `yield` takes no time. */
static void pause_spin(void) {
#ifdef __x86_64__
  __builtin_ia32_pause();
#else
  __asm__ volatile("isb" ::: "memory");
#endif
}

static void take_part(Threads* t, size_t number) {
  for (size_t i = 0; i < t->count; i++) {
    Range* range = &t->ranges[(number + i) % t->count];
    while (atomic_load_explicit(&range->next, memory_order_relaxed) < range->end) {
      const size_t index = range->next++;
      if (index < range->end) t->work(t->state, index);
    }
  }
}

static void read_slice(const char* data) {
  for (size_t i = 0; i < AHEAD_SLICE; i += CACHE_LINE) (void)*(const volatile char*)(data + i);
}

/* Reads weights until a job comes or there is enough. Not with prefetch instructions: where a core waits for as many lines
   as it can, it drops them. A Zen 4 took 120 GB/s of them, of which a quarter arrived; it reads 30 GB/s. */
static void read_ahead(Threads* t, size_t number, uint32_t seen) {
  size_t left = AHEAD_BYTES / (t->count - 1), for_caller = number == 1 ? AHEAD_FOR_CALLER : 0;
  for (const Stream* stream = t->ahead; stream && left; stream = stream->next) {
    const size_t part = stream->bytes / t->count / AHEAD_SLICE * AHEAD_SLICE, most = part < left ? part : left;
    const char* own = stream->data + stream->bytes / t->count * number;
    if (!most) return;
    for (size_t at = 0; at < most; at += AHEAD_SLICE) {
      if (t->jobs != seen) return;
      read_slice(own + at);
      if (at < for_caller) read_slice(stream->data + at);
    }
    left -= most, for_caller = 0;
  }
}

/* The thread uses the job no more. */
static void leave(Threads* t, Range* own) {
  own->active = 0;
  if (!t->caller_sleeps) return;
  pthread_mutex_lock(&t->lock);
  pthread_cond_signal(&t->done);
  pthread_mutex_unlock(&t->lock);
}

/* Whether another process has the core of a thread, while that `works`. */
static int is_interrupted(pthread_t thread, const _Atomic int* works) {
  const long long before = run_time(thread);
  for (int i = 0; i < PROBE_SPINS; i++) {
    if (!*works) return 0;
    pause_spin();
  }
  return run_time(thread) - before < PROBE_NANOSECONDS && *works;
}

/* The caller has not ended a job of which nothing is left: if another process has its core, it gets this thread's, and the
   thread goes where the caller was. */
static void help_caller(Threads* t, Range* own) {
  own->active = 1; /* the caller stays in the job */
  if (t->open && is_interrupted(t->caller, &t->open)) {
    const int core = current_core();
    move_to(t->caller, core);
    move_away_from(pthread_self(), core);
  }
  leave(t, own);
}

/* Until there is a job after `seen`. */
static void wait_for_job(Threads* t, Range* own, uint32_t seen) {
  for (int i = 1; i <= SPINS; i++) {
    if (t->jobs != seen) return;
    if (i % END_SPINS == 0 && t->open) help_caller(t, own);
    pause_spin();
  }
  pthread_mutex_lock(&t->lock);
  t->sleeping++;
  while (t->jobs == seen && !t->ending) pthread_cond_wait(&t->wake, &t->lock);
  t->sleeping--;
  pthread_mutex_unlock(&t->lock);
}

static int anyone_active(const Threads* t) {
  for (size_t i = 1; i < t->count; i++)
    if (t->ranges[i].active) return 1;
  return 0;
}

/* Threads that were interrupted in the middle of a job get the caller's core. */
static void give_core(Threads* t) {
  for (size_t i = 1; i < t->count; i++)
    if (is_interrupted(t->started[i], &t->ranges[i].active)) move_to(t->started[i], current_core());
}

/* Until no thread uses the job. Where that takes long, the caller sleeps: another may need its core. */
static void wait_for_helpers(Threads* t) {
  for (int i = 0; i < END_SPINS; i++) {
    if (!anyone_active(t)) return;
    pause_spin();
  }
  give_core(t);
  pthread_mutex_lock(&t->lock);
  t->caller_sleeps = 1;
  while (anyone_active(t)) pthread_cond_wait(&t->done, &t->lock);
  t->caller_sleeps = 0;
  pthread_mutex_unlock(&t->lock);
}

/* To the caller, if it is the caller's. */
static void leave_core(Threads* t) {
  const int core = current_core();
  if (core == t->core) move_away_from(pthread_self(), core);
}

static void* help(void* self) {
  const Helper* helper = self;
  Threads* t = helper->threads;
  Range* own = &t->ranges[helper->number];
  uint32_t seen = 0;
  while (!t->ending) {
    wait_for_job(t, own, seen);
    leave_core(t);
    own->active = 1; /* before `open` is read: the caller closes the job before it reads `active` */
    own->seen = seen = t->jobs;
    if (t->open) take_part(t, helper->number);
    leave(t, own);
    leave_core(t); /* the caller may have slept for this thread, and waits for its core now */
    read_ahead(t, helper->number, seen);
  }
  return NULL;
}

/* Threads that wait for the caller's core get another. */
static void keep_core(Threads* t) {
  for (size_t i = 1; i < t->count; i++)
    if ((t->jobs - t->ranges[i].seen) % MISSED == MISSED - 1) move_away_from(t->started[i], t->core);
}

static void announce(Threads* t) {
  t->jobs++;
  if (!t->sleeping) return;
  pthread_mutex_lock(&t->lock);
  pthread_cond_broadcast(&t->wake);
  pthread_mutex_unlock(&t->lock);
}

Threads* create_threads(size_t count) {
  Threads* t = aligned_alloc(CACHE_LINE, sizeof *t);
  if (!t) return NULL;
  *t = (Threads){.count = count, .busy = ATOMIC_FLAG_INIT};
  pthread_mutex_init(&t->lock, NULL);
  pthread_cond_init(&t->wake, NULL);
  pthread_cond_init(&t->done, NULL);
  return t;
}

size_t count_threads(const Threads* t) {
  return t->count;
}

void compute_alone(Threads* t, int alone) {
  t->alone = alone;
}

static void end_helpers(Threads* t, size_t running) {
  t->ending = 1;
  announce(t);
  for (size_t i = 1; i < running; i++) pthread_join(t->started[i], NULL);
  free(t->ranges);
  free(t->helpers);
  free(t->started);
  while (t->streams) {
    Stream* stream = t->streams;
    t->streams = stream->other;
    free(stream);
  }
  t->ranges = NULL, t->helpers = NULL, t->started = NULL, t->last = NULL;
  t->ahead = NULL, t->ending = 0;
}

int hold_threads(Threads* t) {
  if (!t || t->kernels++) return 1;
  t->ranges = aligned_alloc(CACHE_LINE, t->count * sizeof *t->ranges);
  t->helpers = malloc(t->count * sizeof *t->helpers);
  t->started = malloc(t->count * sizeof *t->started);
  size_t running = 1;
  if (t->ranges && t->helpers && t->started) {
    for (size_t i = 0; i < t->count; i++) t->ranges[i] = (Range){0}, t->helpers[i] = (Helper){t, i};
    while (running < t->count && !pthread_create(&t->started[running], NULL, help, &t->helpers[running])) running++;
  }
  if (running == t->count && t->ranges && t->helpers && t->started) return 1;
  end_helpers(t, running);
  t->kernels = 0;
  return 0;
}

Stream* create_stream(Threads* t, const void* data, size_t bytes) {
  Stream* stream = calloc(1, sizeof *stream);
  if (!stream) return NULL;
  stream->data = data, stream->bytes = bytes, stream->other = t->streams;
  return t->streams = stream;
}

void release_threads(Threads* t) {
  if (t && !--t->kernels) end_helpers(t, t->count);
}

void run_on(Threads* t, void (*work)(void*, size_t), size_t total, void* state, Stream* stream) {
  if (t->alone || atomic_flag_test_and_set(&t->busy)) { /* another run of the session has the threads */
    for (size_t i = 0; i < total; i++) work(state, i);
    return;
  }
  if (stream) {
    if (t->last && t->last->next != stream) t->last->next = stream;
    t->last = stream;
    t->ahead = stream->next;
  }
  t->work = work, t->state = state, t->caller = pthread_self();
  for (size_t i = 0; i < t->count; i++) {
    t->ranges[i].next = total * i / t->count;
    t->ranges[i].end = total * (i + 1) / t->count;
  }
  t->open = 1;
  t->core = current_core();
  keep_core(t);
  announce(t);
  take_part(t, 0);
  t->open = 0;
  wait_for_helpers(t);
  atomic_flag_clear(&t->busy);
}
