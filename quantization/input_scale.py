"""Scales of a linear's input channels, and how the producer of the input takes their inverse.

``y = W x = (W · s) (x / s)``: the columns of W are multiplied by ``s`` before rounding, and ``1/s`` goes into the norm
or linear that produces x.

K  input channels    s  [K], positive
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tapeout.number_format import FloatArray
from tapeout.portable_graph import FoldTarget


@dataclass(frozen=True)
class InputScale:
    """A scale per input channel and where it came from; ``values`` of ones is the identity."""

    values: FloatArray  # [K]
    label: str

    @property
    def is_identity(self) -> bool:
        return self.label == "identity"


def identity(columns: int) -> InputScale:
    return InputScale(np.ones(columns, np.float32), "identity")


def producer_scale(scale: FloatArray, fold_target: FoldTarget) -> FloatArray:
    """What the sink's channels are divided by: one value per producer channel.

    Under grouped queries each value head feeds ``repeat`` query heads, so its scale occurs ``repeat`` times in ``s``.
    """
    if fold_target.repeat == 1:
        return scale
    return scale.reshape(-1, fold_target.repeat, fold_target.head_size)[:, 0].reshape(-1)


def absorb(weight: FloatArray, scale: FloatArray, fold_target: FoldTarget) -> FloatArray:
    """The sink's weight with ``1/s`` folded in: a norm's ``[K]``, or a linear's ``[N, K']`` along its outputs."""
    divisor = producer_scale(scale, fold_target)
    if fold_target.kind == "norm":
        return ((weight + np.float32(fold_target.offset)) / divisor - np.float32(fold_target.offset)).astype(np.float32)
    start, end = fold_target.rows or (0, weight.shape[0])
    folded = weight.copy()
    folded[start:end] /= divisor[:, None]
    return folded


def absorb_bias(bias: FloatArray, scale: FloatArray, fold_target: FoldTarget) -> FloatArray:
    """The bias that is added to the same channels, divided likewise."""
    start, end = (fold_target.rows or (0, bias.shape[0])) if fold_target.kind == "linear" else (0, bias.shape[0])
    folded = bias.copy()
    folded[start:end] /= producer_scale(scale, fold_target)
    return folded


def tie(values: np.ndarray, fold_target: FoldTarget | None) -> np.ndarray:
    """``[K]`` averaged over the consumer heads that share one producer head, as their scale must be equal."""
    if fold_target is None or fold_target.repeat == 1:
        return values
    heads = values.reshape(-1, fold_target.repeat, fold_target.head_size)
    return np.broadcast_to(heads.mean(axis=1, keepdims=True), heads.shape).reshape(-1)


def normalize(scale: np.ndarray) -> FloatArray:
    """Centred on one, so that folding changes magnitudes as little as possible."""
    return (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
