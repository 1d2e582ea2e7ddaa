/* What a program asks of an engine: to open a plan of operations, and to run steps. All functions are C. */
#ifndef TAPEOUT_ENGINE_HPP
#define TAPEOUT_ENGINE_HPP

#include "launch.h"

/* Why something failed. */
enum Failure { NO_DRIVER = 1, OLD_DRIVER, NO_GPU, NO_MACHINE_CODE, NO_MEMORY, DRIVER_ERROR, WRONG_PLAN, OVERWRITTEN };

enum Kind { GATHER, NORM, GATED, LINEAR, ATTENTION, CHOOSE, QUANTIZE, FINITE };

/* An operation, which launches one kernel or a few. Pointers of its parameters are offsets in the arena, and 0 is none;
   counts of tokens and inputs of the step are set when it runs. wanted: it has tokens whose results are wanted. */
typedef struct {
  int32_t kind, wanted;
  union {
    BlockGather gather;
    Norm norm;
    Gated gated;
    BlockLinear linear;
    Attention attention;
    Choose choose;
    Quantize quantize;
    Finite finite;
  };
} Operation;

/* A part of the arena. Between two of them are GUARD bytes, which nobody writes. */
typedef struct {
  char name[48];
  uint64_t offset, bytes;
} Piece;
enum { GUARD = 256, GUARD_BYTE = 0xa5 };

/* Bytes that are copied to a part of the arena when it is opened. */
typedef struct {
  const void* from;
  uint64_t offset, bytes;
} Upload;

/* A tensor of the KV cache: [blocks, heads, 64, bytes of a token]. */
typedef struct {
  uint64_t offset, heads, token_bytes;
} CacheTensor;

typedef struct {
  const char* driver;       /* a library; NULL: the stand-in */
  const void* machine_code; /* of this GPU; NULL at level host */
  const Operation* operations;
  const Piece* pieces;
  const Upload* uploads;
  const CacheTensor* cache;
  const int32_t* buckets; /* numbers of sequences that decode together in one graph, ascending */
  uint64_t arena_bytes;
  uint64_t inputs, inputs_bytes;    /* where a step's inputs lie */
  uint64_t tokens, logits, ranking; /* where its results lie: chosen tokens, logits, and what is wanted beside; behind
                                       the tokens a byte of each token of the step that says whether it is finite */
  uint64_t result_bytes;            /* of a step, at most */
  uint64_t activations, activations_end; /* pieces from here to there start as NaNs */
  uint64_t zeros, zeros_bytes;           /* but for these */
  int32_t operation_count, piece_count, upload_count, cache_count, bucket_count;
  int32_t columns;    /* of a block table */
  int32_t vocabulary; /* logits of a token */
} Settings;

/* A step of B sequences with M new tokens, P of them with results. In a bucket each sequence has one token, with a
   result. */
typedef struct {
  const int64_t* ids;                      /* [M] */
  const int64_t* rows;                     /* [P] tokens with results */
  const Draw* draws;                       /* [P]; NULL: all are greedy */
  const int32_t *offsets, *starts, *table; /* [B + 1], [B], [B, columns] */
  int32_t M, B, P;
  int32_t bucket; /* 0: its operations are launched one by one */
  int32_t keys;   /* of the longest sequence */
  int32_t few_tokens, most_tokens;
  int32_t ranking, logits; /* whether these are wanted beside tokens */
} StepInputs;

#endif
