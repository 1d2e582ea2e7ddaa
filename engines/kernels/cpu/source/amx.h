/* Tiles of Intel AMX: eight registers of up to 16 rows of 64 bytes. What uses them is compiled where AMX is 1, and must also
   compute without them, where Linux does not let this process use them: the same bits, by vectors.

   A thread configures its tiles before it uses them and releases them when it has finished a part of the work. Registers in
   use make the system save 8 KB at each switch of threads, and keep the core from sleeping deeply. */
#ifndef TAPEOUT_AMX_H
#define TAPEOUT_AMX_H

#if defined(__AMX_INT8__) && defined(__linux__)
#define AMX 1
#else
#define AMX 0
#endif

#if AMX
#include <immintrin.h>
#include <stdint.h>

enum { TILE_REGISTERS = 8, TILE_ROWS = 16, TILE_ROW_BYTES = 64, TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES };

/* What LDTILECFG reads: the rows of each register, and the bytes of a row. */
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileShapes;
_Static_assert(sizeof(TileShapes) == 64, "LDTILECFG reads 64 bytes");

/* Whether this process may use tiles. Linux is asked once: it refuses before version 5.16, and where a thread has an alternate
   signal stack that is too small to save them. Processes that are forked inherit the permission. */
int has_tiles(void);

/* Registers `first` to `end` of `rows` rows, 1 to 16, of `bytes` bytes, a multiple of 4 up to 64. */
static inline void shape_tiles(TileShapes* shapes, int first, int end, int rows, int bytes) {
  shapes->palette = 1;
  for (int i = first; i < end; i++) shapes->rows[i] = (uint8_t)rows, shapes->row_bytes[i] = (uint16_t)bytes;
}
#endif

#endif
