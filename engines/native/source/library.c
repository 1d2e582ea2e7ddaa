/* The operators of this library, their registration with ONNX Runtime, and scratch memory. */
#include "ort.h"

#include <pthread.h>
#include <stdlib.h>

enum { CACHE_LINE = 64 };

static Op* const OPERATORS[] = {&block_gather_op,
                                &cached_attention_float_op,
                                &cached_attention_int8_op,
                                &linear_ops[0],
                                &linear_ops[1],
                                &linear_ops[2],
                                &linear_ops[3],
                                &linear_ops[4]};

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

__attribute__((visibility("default"))) Status* RegisterCustomOps(Options* options, const ApiBase* base) {
  Api api = base->get(API_VERSION);
  if (!api) {
    Api oldest = base->get(1);
    return failure(oldest, ERROR_FAIL, "this ONNX Runtime is older than 1.24, the first that the kernels run in");
  }
  if (keys_created < SCRATCHES) return failure(api, ERROR_FAIL, "the process has no thread-specific keys left");
  Domain* domain = NULL;
  TRY(((Status * (*)(const char*, Domain**)) api[CREATE_DOMAIN])("tapeout.kernels", &domain));
  Status* status = NULL;
  for (size_t i = 0; !status && i < sizeof OPERATORS / sizeof *OPERATORS; i++)
    status = ((Status * (*)(Domain*, const Op*)) api[DOMAIN_ADD])(domain, OPERATORS[i]);
  if (!status) status = ((Status * (*)(Options*, Domain*)) api[ADD_DOMAIN])(options, domain);
  if (status) ((void (*)(Domain*))api[RELEASE_DOMAIN])(domain);
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
