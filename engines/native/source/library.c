/* The operators of this library, their registration with ONNX Runtime, and scratch memory. */
#include "ort.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { CACHE_LINE = 64, MOST_THREADS = 1024 };

/* Each with its kind, where several share a description. */
static const struct {
  const Op* op;
  int kind;
} OPERATORS[] = {{&block_gather_op, 0},
                 {&cached_attention_float_op, 0},
                 {&cached_attention_int8_op, 0},
                 {&linear_op, 0},
                 {&linear_op, 1},
                 {&linear_op, 2},
                 {&linear_op, 3},
                 {&linear_op, 4},
                 {&quantize_activations_op, 0}};
enum { OPERATOR_COUNT = sizeof OPERATORS / sizeof *OPERATORS };

static pthread_key_t keys[SCRATCHES];
static int keys_created; /* the first so many of `keys` */

/* The destructor of a thread's memory is the C library's own `free`: this library may be unloaded before the thread
   ends. */
__attribute__((constructor)) static void create_keys(void) {
  while (keys_created < SCRATCHES && !pthread_key_create(&keys[keys_created], free)) keys_created++;
}

__attribute__((destructor)) static void delete_keys(void) {
  while (keys_created > 0) {
    pthread_key_t key = keys[--keys_created];
    free(pthread_getspecific(key));
    pthread_key_delete(key);
  }
}

/* Says that this library starts threads where a session asks for them. */
__attribute__((visibility("default"))) const char tapeout_threads = 1;

/* The number of threads that native operators start, from the options of a session; 0 where they use ONNX Runtime's. */
static size_t thread_count(Api api, const Options* options) {
  char text[16] = "0";
  size_t size = sizeof text;
  Status* status = ((Status * (*)(const Options*, const char*, char*, size_t*)) api[SESSION_ENTRY])(
      options, "tapeout.threads", text, &size);
  release_status(api, status); /* there is no such entry */
  const long count = status ? 0 : strtol(text, NULL, 10);
  return count > 0 && count <= MOST_THREADS ? (size_t)count : 0;
}

/* What a session was given. It stays: ONNX Runtime does not say when a session no longer needs it. */
typedef struct Registered Registered;
struct Registered {
  Registered* next;
  Threads* threads;
  Operator operators[OPERATOR_COUNT];
};
static _Atomic(Registered*) sessions;

static void keep(Registered* session) {
  session->next = sessions;
  while (!atomic_compare_exchange_weak(&sessions, &session->next, session)) {
  }
}

static Registered* create_operators(Threads* threads) {
  Registered* session = calloc(1, sizeof *session);
  if (!session) return NULL;
  session->threads = threads;
  for (size_t i = 0; i < OPERATOR_COUNT; i++)
    session->operators[i] = (Operator){*OPERATORS[i].op, OPERATORS[i].kind, threads};
  return session;
}

__attribute__((visibility("default"))) Status* RegisterCustomOps(Options* options, const ApiBase* base) {
  Api api = base->get(API_VERSION);
  if (!api) {
    Api oldest = base->get(1);
    return failure(oldest, ERROR_FAIL, "this ONNX Runtime is older than 1.24, the first that the kernels run in");
  }
  if (keys_created < SCRATCHES) return failure(api, ERROR_FAIL, "the process has no thread-specific keys left");
  Domain* domain = NULL;
  TRY(((Status * (*)(const char*, Domain**)) api[CREATE_DOMAIN])("tapeout.kernels", &domain));
  const size_t count = thread_count(api, options);
  Threads* threads = count ? create_threads(count) : NULL;
  Registered* session = create_operators(threads);
  Status* status = NULL;
  if (!session || (count && !threads)) status = failure(api, ERROR_FAIL, "out of memory");
  for (size_t i = 0; !status && i < OPERATOR_COUNT; i++)
    status = ((Status * (*)(Domain*, const Op*)) api[DOMAIN_ADD])(domain, &session->operators[i].op);
  if (!status) status = ((Status * (*)(Options*, Domain*)) api[ADD_DOMAIN])(options, domain);
  if (status) {
    ((void (*)(Domain*))api[RELEASE_DOMAIN])(domain);
    free(session);
    free(threads);
  } else {
    keep(session);
  }
  return status;
}

/* A block begins with a cache line that holds the number of bytes after it. */
void* scratch(int which, size_t bytes) {
  size_t* block = pthread_getspecific(keys[which]);
  if (!block || *block < bytes) {
    if (pthread_setspecific(keys[which], NULL)) return NULL;
    free(block);
    if (bytes > PTRDIFF_MAX - 2 * CACHE_LINE) return NULL;
    size_t rounded = CACHE_LINE + (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    block = aligned_alloc(CACHE_LINE, rounded);
    if (!block) return NULL;
    *block = rounded - CACHE_LINE;
    if (pthread_setspecific(keys[which], block)) {
      free(block);
      return NULL;
    }
  }
  return (char*)block + CACHE_LINE;
}

void release_scratch(int which) {
  size_t* block = pthread_getspecific(keys[which]);
  if (block && *block > SCRATCH_KEPT && !pthread_setspecific(keys[which], NULL)) free(block);
}
