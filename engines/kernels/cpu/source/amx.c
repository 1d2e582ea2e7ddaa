#define _GNU_SOURCE
#include "amx.h"

#if AMX
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Of Linux' asm/prctl.h and asm/fpu/types.h. */
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
enum { NOT_ASKED, GRANTED, REFUSED };

int has_tiles(void) {
  static _Atomic int answer;
  int known = atomic_load_explicit(&answer, memory_order_relaxed);
  if (known == NOT_ASKED) {
    known = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? REFUSED : GRANTED;
    atomic_store_explicit(&answer, known, memory_order_relaxed);
  }
  return known == GRANTED;
}
#endif
