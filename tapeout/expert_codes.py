"""How a checkpoint holds the codes of experts that differ in bits: what all experts have alike is one tensor.

E  experts      N  output channels      K  input channels      G  groups of input channels

``weight_packed``      int32 words of the codes of one expert after the other, each ``[N, K words]`` in its own bits
``weight_bits``        uint8 ``[E]``
``weight_scale``, ``weight_shape``, ``weight_zero_point``
                       as of experts of the same bits, zero points packed in the bits of the widest
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tapeout.errors import QuantizationError
from tapeout.formats import formats
from tapeout.integers import Integers
from tapeout.number_format import AnyArray, Coded, Tensors
from tapeout.packed_codes import PACKED
from tapeout.quantized import QuantizedWeight

LAYOUT = f"expert-{PACKED}"  # as config.json calls it: no other tool knows it, and none takes it for one that it knows
BITS = "weight_bits"


def encode(weight: QuantizedWeight) -> dict[str, AnyArray]:
    """The stored tensors of experts ``[E, N, K]`` whose scheme has ``expert_bits``."""
    experts = (weight.part(expert) for expert in range(len(weight.codes)))
    words = [_integers(part.scheme.bits).words(part.codes).reshape(-1) for part in experts]
    own = {"weight_packed": np.concatenate(words), BITS: np.array(weight.scheme.expert_bits, np.uint8)}
    return own | _integers(weight.scheme.bits).encode_grid(weight.coded)


def decode(tensors: Tensors) -> Coded:
    """Codes of the widest; the inverse of :func:`encode`."""
    bits: list[int] = tensors[BITS].tolist()
    rows, columns = (int(size) for size in tensors["weight_shape"][-2:])
    wide = _integers(max(bits))
    coded = wide.on_grid(np.empty((len(bits), rows, columns), np.uint8), tensors)
    at = 0
    for own, codes in zip(map(_integers, bits), coded.codes, strict=True):
        count = rows * own.words_of(columns)
        words: NDArray[np.int32] = tensors["weight_packed"][at : at + count].reshape(rows, -1)
        codes[:] = own.codes(words, columns)
        codes += np.uint8(wide.midpoint - own.midpoint if coded.zero_points is None else 0)
        at += count
    return coded


def words_of_experts(bits: list[int], rows: int, columns: int) -> int:
    """32-bit words that the codes of experts of so many bits fill. :class:`QuantizationError` for unknown bits."""
    return sum(rows * _integers(own).words_of(columns) for own in bits)


def _integers(bits: int) -> Integers:
    found = formats().get(f"int{bits}")
    if not isinstance(found, Integers):
        raise QuantizationError(
            f"an expert in {bits} bits",
            expected="bits that integers have",
            remedy="restore the checkpoint, or run `dvc repro quantize`",
        )
    return found
