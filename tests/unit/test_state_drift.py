"""Recurrent state of long texts: its error after 4,096 tokens, and that it grows no further up to 32,768."""

from __future__ import annotations

import numpy as np
import pytest

from engines.kernels import cpu as native
from tests.unit.test_native_recurrence import DEFINITIONS, SLOTS, Double, Shape, drawn, run, session

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
SHAPE = Shape(heads=2, groups=1, keys=16, values=16)
LENGTHS = (512, 4096, 32768)
BOUND = 1e-4  # relative
PIECE = 512  # tokens fed at once


@pytest.mark.parametrize("operator", DEFINITIONS)
def test_the_error_of_a_state_does_not_grow_with_the_text(operator: str) -> None:
    """Against float64. Decays as of a head that forgets within a few tokens, and of one that remembers thousands."""
    tokens = drawn(operator, SHAPE, LENGTHS[-1], 7)
    by_head = tokens["decay"].reshape(LENGTHS[-1], SHAPE.heads, -1)
    by_head *= np.array([[1.0], [1e-3]], np.float32)
    state, kept, errors = np.zeros((SLOTS, *SHAPE.state), np.float32), None, list[float]()
    for begin in range(0, LENGTHS[-1], PIECE):
        piece = {name: array[begin : begin + PIECE] for name, array in tokens.items()}
        run(session(operator, SHAPE), piece, state, [PIECE], [begin], [2])
        _, kept = DEFINITIONS[operator](**piece, state=kept)
        if begin + PIECE in LENGTHS:
            errors.append(relative_error(state[2].astype(np.float64), kept))
    assert len(errors) == len(LENGTHS) and max(errors) < BOUND, errors
    assert errors[2] < 4 * errors[1] + 1e-6, errors


def relative_error(found: Double, expected: Double) -> float:
    """Of the worst head."""
    off = np.square(found - expected).sum(axis=(1, 2)) / np.square(expected).sum(axis=(1, 2))
    return float(np.sqrt(off.max()))
