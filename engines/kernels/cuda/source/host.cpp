/* Runs kernels on the calling thread: blocks one after the other, the threads of a block as fibers.

   Fibers take turns in one of three orders, so that a barrier that is missing shows whichever thread runs first; blocks in
   one of two. Block memory is filled with NaNs; a block whose threads wait for each other for ever ends with an error. What
   kernels before write can be NaNs until a thread waits for these kernels. */
#include "host.h"
#include "launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
extern "C" void __sanitizer_start_switch_fiber(void** saved, const void* bottom, size_t bytes);
extern "C" void __sanitizer_finish_switch_fiber(void* saved, const void** bottom, size_t* bytes);
#define SANITIZED 1
#endif
#endif

/* void switch_stack(void** from, void* to): keeps what a function must keep on its own stack, and goes on in another. */
extern "C" void switch_stack(void** from, void* to);
#ifdef __x86_64__
asm(R"(
.text
.type switch_stack, @function
switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size switch_stack, . - switch_stack
)");
enum { KEPT = 6, RETURN = 6, FRAME = 8 }; /* words: registers, where the address of return is, all, 16-byte aligned */
#else
asm(R"(
.text
.type switch_stack, %function
switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size switch_stack, . - switch_stack
)");
enum { RETURN = 11, FRAME = 20 };
#endif

enum { MOST_THREADS = 1024, LANES = 32, STACK_BYTES = 256 << 10, MOST_COPIES = 128 };

enum State { READY, AT_BARRIER, AT_MEETING, DONE };

/* A copy to shared memory that its thread has not waited for. */
struct Copy {
  void* to;
  const void* from;
  uint32_t bytes, group;
  uint4 begun; /* what was to be copied then: a GPU may read it at any time */
};

struct Fiber {
  void* stack; /* where it goes on */
  char* memory;
  unsigned index;
  State state;
  void* shadow; /* the sanitizer's */
  Copy copies[MOST_COPIES];
  uint32_t copy_count, group; /* group: of copies that begin now */
};

struct WarpState {
  Lane lanes[LANES];
  Meeting meeting;
  unsigned arrived;
};

/* All of a thread that launches kernels. */
struct Scheduler {
  Fiber fibers[MOST_THREADS];
  WarpState warps[MOST_THREADS / LANES];
  unsigned order[MOST_THREADS];
  void* stack;
  void* shadow;
  const void* bottom;
  size_t bytes;
  Fiber* running;
  unsigned threads, at_barrier, done;
  const Registration* kernel;
  const void* parameters;
  void* memory;
  const char* error;
};

thread_local Index threadIdx, blockIdx, blockDim, gridDim;
static thread_local Scheduler* scheduler;
static Registration* registered;

Registration::Registration(const char* name, void (*run)(const void*), unsigned threads, unsigned bytes)
    : name(name), run(run), threads(threads), bytes(bytes), next(registered) {
  registered = this;
}

static void enter(Fiber* fiber) {
  Scheduler* s = scheduler;
  s->running = fiber;
  threadIdx.x = fiber->index;
#ifdef SANITIZED
  __sanitizer_start_switch_fiber(&s->shadow, fiber->memory, STACK_BYTES);
#endif
  switch_stack(&s->stack, fiber->stack);
#ifdef SANITIZED
  __sanitizer_finish_switch_fiber(s->shadow, nullptr, nullptr);
#endif
}

static void leave(State state) {
  Scheduler* s = scheduler;
  Fiber* fiber = s->running;
  fiber->state = state;
#ifdef SANITIZED
  __sanitizer_start_switch_fiber(&fiber->shadow, s->bottom, s->bytes);
#endif
  switch_stack(&fiber->stack, s->stack);
#ifdef SANITIZED
  __sanitizer_finish_switch_fiber(fiber->shadow, &s->bottom, &s->bytes);
#endif
}

/* A fiber computes a thread of one block after another. */
static void run_fiber() {
#ifdef SANITIZED
  __sanitizer_finish_switch_fiber(nullptr, &scheduler->bottom, &scheduler->bytes);
#endif
  for (;;) {
    scheduler->kernel->run(scheduler->parameters);
    scheduler->done++;
    leave(DONE);
  }
}

static bool start(Fiber* fiber, unsigned index) {
  fiber->index = index;
  void* memory = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return false;
  fiber->memory = static_cast<char*>(memory);
  void** top = reinterpret_cast<void**>(fiber->memory + STACK_BYTES) - FRAME;
  top[RETURN] = reinterpret_cast<void*>(run_fiber);
  fiber->stack = top;
  return true;
}

static void release(State state, unsigned first, unsigned count) {
  for (unsigned i = first; i < first + count; i++)
    if (scheduler->fibers[i].state == state) scheduler->fibers[i].state = READY;
}

void __syncthreads() {
  Scheduler* s = scheduler;
  if (++s->at_barrier < s->threads) {
    leave(AT_BARRIER);
    return;
  }
  s->at_barrier = 0;
  release(AT_BARRIER, 0, s->threads);
}

Lane* meet(Meeting meeting, const void* in, size_t bytes) {
  Scheduler* s = scheduler;
  const unsigned index = threadIdx.x, first = index / LANES * LANES;
  WarpState* warp = &s->warps[index / LANES];
  Lane* lane = &warp->lanes[index % LANES];
  if (warp->arrived && warp->meeting != meeting) s->error = "lanes of a warp meet at different instructions";
  warp->meeting = meeting;
  if (bytes) memcpy(lane->in, in, bytes);
  if (++warp->arrived < LANES) {
    leave(AT_MEETING);
    return lane;
  }
  warp->arrived = 0;
  meeting(warp->lanes);
  release(AT_MEETING, first, LANES);
  return lane;
}

void copy_async(void* shared, const void* from, uint32_t bytes, bool here) {
  Fiber* fiber = scheduler->running;
  if (fiber->copy_count == MOST_COPIES) {
    scheduler->error = "a thread has begun too many copies";
    return;
  }
  memset(shared, 0xff, bytes);
  Copy* copy = &fiber->copies[fiber->copy_count++];
  *copy = {shared, here ? from : nullptr, bytes, fiber->group, {}};
  if (here) memcpy(&copy->begun, from, bytes);
}
void end_of_copies() {
  scheduler->running->group++;
}
void wait_for_copies(unsigned later) {
  Fiber* fiber = scheduler->running;
  uint32_t kept = 0;
  for (uint32_t i = 0; i < fiber->copy_count; i++) {
    const Copy one = fiber->copies[i];
    if (one.group + later >= fiber->group) {
      fiber->copies[kept++] = one;
    } else if (one.from) {
      if (memcmp(&one.begun, one.from, one.bytes)) scheduler->error = "what is copied changes meanwhile";
      memcpy(one.to, one.from, one.bytes);
    } else {
      memset(one.to, 0, one.bytes);
    }
  }
  fiber->copy_count = kept;
}

void* block_memory() {
  return scheduler->memory;
}

void meet_nothing(Lane*) {}

void meet_shuffle(Lane* lanes) {
  for (int i = 0; i < LANES; i++) lanes[i].out[0] = lanes[lanes[i].in[1]].in[0];
}

/* Products are exact and sums are rounded to float one after the other, channel by channel. A tensor core adds in another
   order, and truncates. */
void meet_mma_f16(Lane* lanes) {
  float a[16][16], b[16][8];
  for (int i = 0; i < LANES; i++) {
    const int group = i / 4, pair = i % 4 * 2;
    for (int j = 0; j < 8; j++)
      a[group + j / 2 % 2 * 8][pair + j % 2 + j / 4 * 8] = f16_to_float((uint16_t)(lanes[i].in[j / 2] >> 16 * (j % 2)));
    for (int j = 0; j < 4; j++)
      b[pair + j % 2 + j / 2 * 8][group] = f16_to_float((uint16_t)(lanes[i].in[4 + j / 2] >> 16 * (j % 2)));
  }
  for (int row = 0; row < 16; row++) {
    float c[8];
    for (int n = 0; n < 8; n++) c[n] = __uint_as_float(lanes[row % 8 * 4 + n / 2].in[6 + row / 8 * 2 + n % 2]);
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++) c[n] += a[row][k] * b[k][n];
    for (int n = 0; n < 8; n++) lanes[row % 8 * 4 + n / 2].out[row / 8 * 2 + n % 2] = __float_as_uint(c[n]);
  }
}

/* The same of 32 channels in bytes. */
static float e4m3_to_float(uint32_t code) {
  const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float magnitude = ldexpf((float)(exponent ? 8 + mantissa : mantissa), (exponent ? (int)exponent : 1) - 10);
  return code & 128 ? -magnitude : magnitude;
}
void meet_mma_e4m3(Lane* lanes) {
  float a[16][32], b[32][8];
  for (int i = 0; i < LANES; i++) {
    const int group = i / 4, four = i % 4 * 4;
    for (int j = 0; j < 16; j++)
      a[group + j / 4 % 2 * 8][four + j % 4 + j / 8 * 16] = e4m3_to_float(lanes[i].in[j / 4] >> 8 * (j % 4) & 255);
    for (int j = 0; j < 8; j++)
      b[four + j % 4 + j / 4 * 16][group] = e4m3_to_float(lanes[i].in[4 + j / 4] >> 8 * (j % 4) & 255);
  }
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < 4; j++) {
      const int row = i / 4 + j / 2 * 8, n = i % 4 * 2 + j % 2;
      float c = __uint_as_float(lanes[i].in[6 + j]);
      for (int k = 0; k < 32; k++) c += a[row][k] * b[k][n];
      lanes[i].out[j] = __float_as_uint(c);
    }
}

/* order: 0 first thread first, 1 last first, else shuffled by this number. */
static void set_order(unsigned order) {
  Scheduler* s = scheduler;
  uint64_t random = order;
  for (unsigned i = 0; i < s->threads; i++) s->order[i] = order == 1 ? s->threads - 1 - i : i;
  if (order < 2) return;
  for (unsigned i = s->threads - 1; i > 0; i--) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    const unsigned other = (unsigned)((random >> 33) % (i + 1)), kept = s->order[i];
    s->order[i] = s->order[other], s->order[other] = kept;
  }
}

static void run_block() {
  Scheduler* s = scheduler;
  s->at_barrier = s->done = 0;
  for (unsigned i = 0; i < s->threads; i++) {
    Fiber* fiber = &s->fibers[i];
    fiber->state = READY, fiber->copy_count = fiber->group = 0;
  }
  for (unsigned i = 0; i < s->threads / LANES; i++) s->warps[i].arrived = 0;
  while (s->done < s->threads && !s->error) {
    bool any = false;
    for (unsigned i = 0; i < s->threads; i++) {
      Fiber* fiber = &s->fibers[s->order[i]];
      if (fiber->state != READY) continue;
      any = true;
      enter(fiber);
    }
    if (!any) s->error = "threads of a block wait for others that do not come";
  }
}

static bool prepare(unsigned threads) {
  if (!scheduler) scheduler = static_cast<Scheduler*>(calloc(1, sizeof(Scheduler)));
  if (!scheduler) return false;
  for (unsigned i = 0; i < threads; i++)
    if (!scheduler->fibers[i].memory && !start(&scheduler->fibers[i], i)) return false;
  return true;
}

const Registration* find_kernel(const char* name) {
  const Registration* kernel = registered;
  while (kernel && strcmp(kernel->name, name)) kernel = kernel->next;
  return kernel;
}

const char* run_kernel(const Registration* kernel, const void* parameters, const uint32_t grid[3], uint32_t threads,
                       uint32_t shared_bytes, unsigned order) {
  if (!threads || threads % LANES || threads > kernel->threads) return "a block of so many threads";
  if (!prepare(threads)) return "out of memory";
  Scheduler* s = scheduler;
  void* memory = nullptr;
  if (shared_bytes && posix_memalign(&memory, 16, shared_bytes)) return "out of memory";
  s->threads = threads, s->kernel = kernel, s->parameters = parameters, s->memory = memory;
  s->error = nullptr;
  set_order(order);
  blockDim = {threads, 1, 1};
  gridDim = {grid[0], grid[1], grid[2]};
  const unsigned blocks = grid[0] * grid[1] * grid[2];
  for (unsigned i = 0; i < blocks && !s->error; i++) {
    const unsigned at = blocks - 1 - i; /* last first: those of one x follow each other, else those of one z */
    blockIdx = order == 1 ? Index{at / (grid[1] * grid[2]), at / grid[2] % grid[1], at % grid[2]}
                          : Index{i % grid[0], i / grid[0] % grid[1], i / (grid[0] * grid[1])};
    if (memory) memset(memory, 0xff, shared_bytes);
    run_block();
  }
  free(memory);
  if (s->error) scheduler = nullptr; /* threads are in the middle of a kernel: their stacks are abandoned */
  return s->error;
}

/* Runs a launch; NULL, or why it failed. */
extern "C" EXPORTED const char* tapeout_cuda_launch(const Launch* launch, unsigned order) {
  const Registration* kernel = find_kernel(launch->kernel);
  if (!kernel) return "no kernel of this name";
  return run_kernel(kernel, launch->parameters, launch->grid, launch->threads, launch->shared_bytes, order);
}
