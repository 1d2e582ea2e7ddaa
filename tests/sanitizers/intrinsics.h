/* Included before the kernels, and compiled once for all: the intrinsics of the machine. */
#ifndef TAPEOUT_INTRINSICS_H
#define TAPEOUT_INTRINSICS_H

#define _GNU_SOURCE /* as a file that includes this first may need it */
#ifdef __x86_64__
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif
#include <string.h>

#endif
