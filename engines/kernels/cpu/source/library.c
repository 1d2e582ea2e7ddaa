/* The operators of this library, and scratch memory. */
#include "ort.h"

#include <pthread.h>
#include <stdlib.h>

enum { CACHE_LINE = 64 };

/* Each with its kind, where several share a description. */
static const struct {
  const Op* op;
  int kind;
} OPERATORS[] = {{&block_gather_op, 0},
                 {&cached_attention_float_op, 0},
                 {&cached_attention_int8_op, 0},
                 {&cached_attention_int4_op, 0},
                 {&linear_op, 0},
                 {&linear_op, 1},
                 {&linear_op, 2},
                 {&linear_op, 3},
                 {&linear_op, 4},
                 {&norm_rows_op, 0},
                 {&quantize_activations_op, 0}};
enum { OPERATOR_COUNT = sizeof OPERATORS / sizeof *OPERATORS };
const size_t operator_count = OPERATOR_COUNT;

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

Operator* create_operators(Threads* threads) {
  Operator* list = calloc(OPERATOR_COUNT, sizeof *list);
  for (size_t i = 0; list && i < OPERATOR_COUNT; i++)
    list[i] = (Operator){*OPERATORS[i].op, OPERATORS[i].kind, threads};
  return list;
}

int has_scratch(void) {
  return keys_created == SCRATCHES;
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
