/* The operators of this library, and how ONNX Runtime finds them. */
#include "ort.h"

#include <pthread.h>
#include <stdlib.h>

enum { LINE = 64 };

static Op* const OPERATORS[] = {&block_gather_op,
                                &cached_attention_floats_op,
                                &cached_attention_codes_op,
                                &linear_ops[0],
                                &linear_ops[1],
                                &linear_ops[2],
                                &linear_ops[3],
                                &linear_ops[4]};

__attribute__((visibility("default"))) Status* RegisterCustomOps(Options* options, const ApiBase* base) {
  Api api = base->get(ORT_VERSION);
  if (!api) return failure(base->get(1), ERROR_FAIL, "this ONNX Runtime is older than 1.17");
  Domain* domain = NULL;
  Status* status = ((Status * (*)(const char*, Domain**)) api[CREATE_DOMAIN])("tapeout.kernels", &domain);
  for (size_t i = 0; !status && i < sizeof OPERATORS / sizeof *OPERATORS; i++)
    status = ((Status * (*)(Domain*, const Op*)) api[DOMAIN_ADD])(domain, OPERATORS[i]);
  if (!status) status = ((Status * (*)(Options*, Domain*)) api[ADD_DOMAIN])(options, domain);
  return status;
}

static pthread_key_t keys[SCRATCHES];

/* What a thread holds is given back by the C library's own `free`, which is there when this library is no more. */
__attribute__((constructor)) static void begin(void) {
  for (int which = 0; which < SCRATCHES; which++) pthread_key_create(&keys[which], free);
}

__attribute__((destructor)) static void end(void) {
  for (int which = 0; which < SCRATCHES; which++) {
    free(pthread_getspecific(keys[which]));
    pthread_key_delete(keys[which]);
  }
}

void* scratch(int which, size_t bytes) {
  size_t* held = pthread_getspecific(keys[which]); /* a line that says how much follows it */
  if (!held || *held < bytes) {
    free(held);
    size_t rounded = (LINE + bytes + 4095) / 4096 * 4096;
    held = aligned_alloc(LINE, rounded);
    if (held) *held = rounded - LINE;
    pthread_setspecific(keys[which], held);
  }
  return held ? (char*)held + LINE : NULL;
}
