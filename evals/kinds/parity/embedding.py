"""Every row of the embedding and of the output head compared, and not only those of tokens that a text contains.

V  vocabulary size     H  hidden size
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engines.protocol import FloatArray
from evals.kinds.parity import TableError
from evals.text import BLOCK_ROWS, Float64Array
from tapeout.errors import EvidenceError


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


def embedding_error(actual: Iterable[FloatArray], expected: FloatArray) -> TableError:
    """Of each token's embedding. ``actual``: some rows at a time, in order. ``expected``: ``[V, H]``.

    :class:`EvidenceError` for tables of different shapes.
    """
    off, size, at = np.empty(len(expected)), np.empty(len(expected)), 0
    for rows in actual:
        part = expected[at : at + len(rows)]
        if rows.shape != part.shape:
            raise _other_shape(f"{at + len(rows)} embeddings or more of size {rows.shape[1]}", expected)
        off[at : at + len(rows)] = np.square(rows - part, dtype=np.float64).sum(axis=1)
        size[at : at + len(rows)] = np.square(part, dtype=np.float64).sum(axis=1)
        at += len(rows)
    if at < len(expected):
        raise _other_shape(f"{at} embeddings", expected)
    return _table_error(off, size)


def _other_shape(found: str, expected: FloatArray) -> EvidenceError:
    return EvidenceError(
        f"{found} from the engine, {expected.shape} from the reference",
        expected="one row per token",
        remedy="build the engine from the quantized model it is compared with",
    )


def _table_error(off: Float64Array, size: Float64Array) -> TableError:
    """From squares by row. A row that is almost zero is compared with a thousandth of a usual one.

    The usual one is the median, so that one huge row does not hide the others.
    """
    usual = float(np.median(size[size > 0])) if size.any() else 0.0
    errors = np.sqrt(off / np.maximum(size, max(1e-6 * usual, 1e-30)))
    return TableError(rows=len(errors), error=float(errors.max()), worst=int(errors.argmax()))
