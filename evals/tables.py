"""Every row of the embedding and of the output head compared, and not only those of tokens that a text contains.

V  vocabulary size     H  hidden size
"""

from __future__ import annotations

import numpy as np

from engines.protocol import FloatArray
from evals.kinds.parity import TableError
from evals.text import BLOCK_ROWS, Float64Array
from tapeout.errors import EvidenceError

EMBEDDING_ROWS = 4096  # compared at a time


class HeadRows:
    """Error of each row of the output head over many positions: a wrong row is wrong in the same logit everywhere."""

    def __init__(self) -> None:
        self._off: Float64Array | None = None
        self._size: Float64Array | None = None

    def add(self, expected: FloatArray, actual: FloatArray) -> None:
        if self._off is None or self._size is None:
            self._off, self._size = np.zeros(expected.shape[1]), np.zeros(expected.shape[1])
        for begin in range(0, len(expected), BLOCK_ROWS):
            part = slice(begin, begin + BLOCK_ROWS)
            self._off += np.square(actual[part] - expected[part]).sum(axis=0)
            self._size += np.square(expected[part]).sum(axis=0)

    @property
    def vocabulary(self) -> int:
        return 0 if self._off is None else len(self._off)

    def error(self) -> TableError:
        assert self._off is not None and self._size is not None
        return _table_error(self._off, self._size)


def embedding_error(actual: FloatArray, expected: FloatArray) -> TableError:
    """Of each token's embedding. :class:`EvidenceError` for tables of different shapes."""
    if actual.shape != expected.shape:
        raise EvidenceError(
            f"{actual.shape} embeddings from the engine, {expected.shape} from the reference",
            expected="one row per token",
            remedy="build the engine from the quantized model it is compared with",
        )
    parts = [slice(begin, begin + EMBEDDING_ROWS) for begin in range(0, len(expected), EMBEDDING_ROWS)]
    off = [np.square(actual[part] - expected[part]).sum(axis=1) for part in parts]
    return _table_error(np.concatenate(off), np.concatenate([np.square(expected[p]).sum(axis=1) for p in parts]))


def _table_error(off: Float64Array, size: Float64Array) -> TableError:
    """From squares by row. A row that is almost zero is compared with a thousandth of a usual one."""
    errors = np.sqrt(off / np.maximum(size, max(1e-6 * float(size.mean()), 1e-30)))
    return TableError(rows=len(errors), error=float(errors.max()), worst=int(errors.argmax()))
