"""The structs of ``source/parameters.h`` and ``source/engine.hpp``, field by field."""

from __future__ import annotations

import ctypes

import numpy as np

P, I32, F32, U64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64


class Weight(ctypes.Structure):
    _fields_ = (("codes", P), ("scales", P), ("zero_points", P), ("N", I32), ("K", I32), ("bits", I32),
                ("group_shift", I32), ("half_scales", I32), ("e4m3", I32))  # fmt: skip


class BlockLinear(ctypes.Structure):
    _fields_ = (("weight", Weight), ("x", P), ("x_scales", P), ("bias", P), ("y", P), ("sums", P),
                ("ended", P), ("M", I32))  # fmt: skip


class QuantizeRows(ctypes.Structure):
    _fields_ = (("x", P), ("y", P), ("scales", P), ("M", I32), ("K", I32))


class Finite(ctypes.Structure):
    _fields_ = (("a", P), ("b", P), ("y", P), ("M", I32), ("K", I32))


class Norm(ctypes.Structure):
    _fields_ = (("a", P), ("b", P), ("weight", P), ("rows", P), ("sum", P), ("y", P), ("scales", P),
                ("count", I32), ("M", I32), ("K", I32), ("epsilon", F32))  # fmt: skip


class Gated(ctypes.Structure):
    _fields_ = (("x", P), ("y", P), ("scales", P), ("M", I32), ("K", I32))


class BlockGather(ctypes.Structure):
    _fields_ = (("weight", Weight), ("ids", P), ("chosen", P), ("y", P), ("M", I32))


class Choose(ctypes.Structure):
    _fields_ = (("logits", P), ("part_max", P), ("part_index", P), ("draws", P), ("ranking", P), ("y", P),
                ("M", I32), ("N", I32))  # fmt: skip


class PagedAttention(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("qkv", "cosines", "sines", "key_cache", "value_cache", "key_scales", "value_scales")),
        *((name, P) for name in ("offsets", "starts", "table", "query", "part_sums", "part_rows", "ended", "y")),
        *((name, P) for name in ("query_norm", "key_norm")),
        *((name, I32) for name in ("M", "B", "columns", "H", "KV", "D", "fp8")),
        *((name, I32) for name in ("interleaved", "window", "parts")),
        *((name, I32) for name in ("few_tokens", "most_tokens")),
        *((name, F32) for name in ("scale", "softcap", "epsilon")),
    )


KINDS: tuple[tuple[str, type[ctypes.Structure]], ...] = (  # in the order of enum Kind
    ("gather", BlockGather),
    ("norm", Norm),
    ("gated", Gated),
    ("linear", BlockLinear),
    ("attention", PagedAttention),
    ("choose", Choose),
    ("quantize", QuantizeRows),
    ("finite", Finite),
)
ARGMAX_PARTS, ATTENTION_BLOCK, ATTENTION_PART = 32, 64, 512
MOST_TOP = 128
LINEAR_SLICES, LINEAR_PLACES = 4, 256
LINEAR_SUMS = LINEAR_PLACES * LINEAR_SLICES * 128 * 64
DRAW = np.dtype([("random", "u8"), ("top_p", "f8"), ("scale", "f4"), ("top_k", "i4"), ("least", "i4"), ("top", "i4")])
RANKING = np.dtype(
    [("total", "i8"), ("max", "f4"), ("logit", "f4"), ("tokens", "i4", MOST_TOP), ("logits", "f4", MOST_TOP)]
)


class _AnyParameters(ctypes.Union):
    _fields_ = KINDS


class Operation(ctypes.Structure):
    _fields_ = (("kind", I32), ("wanted", I32), ("parameters", _AnyParameters))


class ArenaPiece(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 48), ("offset", U64), ("bytes", U64))


class Upload(ctypes.Structure):
    _fields_ = (("source", P), ("offset", U64), ("bytes", U64))


class CacheTensor(ctypes.Structure):
    _fields_ = (("offset", U64), ("heads", U64), ("token_bytes", U64))


class Settings(ctypes.Structure):
    _fields_ = (
        *(("driver", ctypes.c_char_p), ("machine_code", P)),
        *((name, P) for name in ("operations", "pieces", "uploads", "cache", "buckets")),
        *(
            (name, U64)
            for name in ("arena_bytes", "inputs", "inputs_bytes", "tokens", "logits", "ranking", "result_bytes")
        ),
        *((name, U64) for name in ("activations", "activations_end", "zeros", "zeros_bytes")),
        *((name, I32) for name in ("operation_count", "piece_count", "upload_count", "cache_count", "bucket_count")),
        *((name, I32) for name in ("columns", "vocabulary")),
    )


class StepInputs(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("ids", "rows", "draws", "offsets", "starts", "table")),
        *((name, I32) for name in ("M", "B", "P", "bucket", "keys", "few_tokens", "most_tokens", "ranking", "logits")),
    )
