/* What the host needs to know of the level of the kernels: only this file of it is compiled for each. */
#include "runtime.h"

#ifdef __AVX512VNNI__
const int in_digits = 1;
#else
const int in_digits = 0;
#endif

#ifdef __AMX_INT8__
const int in_tiles = 1;
#else
const int in_tiles = 0;
#endif
