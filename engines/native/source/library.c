/* The operators of this library, and how ONNX Runtime finds them. */
#include "ort.h"

#include <stdlib.h>

static Op* const OPERATORS[] = {&block_gather_op, &cached_attention_floats_op, &cached_attention_codes_op,
                                &linear_ops[0], &linear_ops[1], &linear_ops[2], &linear_ops[3], &linear_ops[4]};

__attribute__((visibility("default"))) Status* RegisterCustomOps(Options* options, const ApiBase* base) {
  Api api = base->get(ORT_VERSION);
  Domain* domain = NULL;
  Status* status = ((Status * (*)(const char*, Domain**)) api[CREATE_DOMAIN])("tapeout.kernels", &domain);
  for (size_t i = 0; !status && i < sizeof OPERATORS / sizeof *OPERATORS; i++)
    status = ((Status * (*)(Domain*, const Op*)) api[DOMAIN_ADD])(domain, OPERATORS[i]);
  if (!status) status = ((Status * (*)(Options*, Domain*)) api[ADD_DOMAIN])(options, domain);
  return status;
}

void* scratch(int which, size_t bytes) {
  static _Thread_local struct {
    void* memory;
    size_t bytes;
  } held[SCRATCHES];
  if (held[which].bytes < bytes) {
    free(held[which].memory);
    size_t rounded = (bytes + 4095) / 4096 * 4096;
    held[which].memory = aligned_alloc(64, rounded);
    held[which].bytes = held[which].memory ? rounded : 0;
  }
  return held[which].memory;
}
