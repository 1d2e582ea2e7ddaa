/* The operators of this library, and scratch memory. */
#include "ort.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { CACHE_LINE = 64 };

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

static const char* name(const Op* op) {
  return declaration_of(op)->name;
}
static size_t input_count(const Op* op) {
  return declaration_of(op)->input_count;
}
static int input_type(const Op* op, size_t i) {
  return declaration_of(op)->inputs[i].type;
}
static int input_presence(const Op* op, size_t i) {
  return declaration_of(op)->inputs[i].presence;
}
static size_t output_count(const Op* op) {
  return declaration_of(op)->output_count;
}
static int output_type(const Op* op, size_t i) {
  return declaration_of(op)->outputs[i];
}
static int always_required(const Op* op, size_t i) {
  return (void)op, (void)i, REQUIRED;
}
static const char* default_provider(const Op* op) {
  return (void)op, NULL;
}
static int default_memory(const Op* op, size_t i) {
  return (void)op, (void)i, 0;
}
static int first_version(const Op* op) {
  return (void)op, 1;
}
static int last_version(const Op* op) {
  return (void)op, INT32_MAX;
}

static void destroy(void* kernel) {
  release_threads(((Base*)kernel)->threads);
  free(kernel);
}

Operator* create_operators(Threads* threads) {
  Operator* list = calloc(operator_count, sizeof *list);
  for (size_t i = 0; list && i < operator_count; i++)
    list[i] = (Operator){{.version = OP_VERSION,
                          .name = name,
                          .provider = default_provider,
                          .input_count = input_count,
                          .input_type = input_type,
                          .input_presence = input_presence,
                          .input_memory = default_memory,
                          .output_count = output_count,
                          .output_type = output_type,
                          .output_presence = always_required,
                          .create = declarations[i].implementation->create,
                          .compute = declarations[i].implementation->compute,
                          .destroy = destroy,
                          .start_version = first_version,
                          .end_version = last_version},
                         &declarations[i],
                         threads};
  return list;
}

Status* keep_kernel(const void* kernel, size_t bytes, void** kept) {
  const Base* base = kernel;
  void* copy = malloc(bytes);
  if (!copy || !hold_threads(base->threads)) {
    free(copy);
    return failure(base->api, ERROR_FAIL, "no memory or threads for a kernel");
  }
  memcpy(copy, kernel, bytes);
  *kept = copy;
  return NULL;
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
