"""What calibration measured, read back layer by layer (calibration.py says what the files hold).

K  input channels of a group      B, k  diagonal blocks of a Gram matrix, and channels of each: K = B k
H, D  KV heads and head size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from quantization import kv_cache
from quantization.calibration import (
    SAMPLES_FILE,
    Calibration,
    CalibrationSample,
    gram_blocks,
    layer_file,
    sample_hash,
    statistics_file,
)
from tapeout.artifact import Artifact
from tapeout.errors import QuantizationError
from tapeout.number_format import FloatArray
from tapeout.portable_graph import LinearGroup
from tapeout.recipe import KVCache

Array = NDArray[Any]
_STEPS = np.float32(32767)  # of a correlation of one
_NO_SIZE = 1e-15  # of a channel; two that are smaller have no correlation that float32 could compute
_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Statistics:
    """Of one group's inputs."""

    gram: FloatArray  # [B, k, k]
    holdout: FloatArray  # [B, k, k]
    mean_abs: FloatArray  # [K]
    max_abs: FloatArray  # [K]

    def tensors(self, group: str) -> dict[str, Array]:
        """As they lie in a statistics file."""
        found: dict[str, Array] = {f"{group}.mean_abs": self.mean_abs, f"{group}.max_abs": self.max_abs}
        for name, gram in (("gram", self.gram), ("gram_holdout", self.holdout)):
            found[f"{group}.{name}"], found[f"{group}.{name}_power"] = pack_gram(gram)
        return found


def pack_gram(gram: FloatArray) -> tuple[NDArray[np.int16], FloatArray]:
    """Correlations above the diagonals of ``[B, k, k]``, row by row, in steps of 1 / 32767; and the diagonals ``[K]``.

    A quarter of the bytes of float32. Errors of 1.5e-5 of a correlation are a thousandth of GPTQ's damping. Below the
    diagonal nothing is read.
    """
    packed = [_pack_block(block) for block in gram]
    return np.stack([correlations for correlations, _ in packed]), np.concatenate([power for _, power in packed])


def unpack_gram(packed: NDArray[np.int16], power: FloatArray) -> FloatArray:
    """``[B, k, k]`` from what :func:`pack_gram` made of it."""
    return np.stack([_unpack_block(*block) for block in zip(packed, np.split(power, len(packed)), strict=True)])


def _pack_block(gram: FloatArray) -> tuple[NDArray[np.int16], FloatArray]:
    power = np.diag(gram).astype(np.float32)
    size = np.sqrt(power)
    inverse = np.divide(1, size, out=np.zeros_like(size), where=size > _NO_SIZE)
    packed = np.empty(len(gram) * (len(gram) - 1) // 2, np.int16)
    start = 0
    for row in range(len(gram) - 1):
        correlation = gram[row, row + 1 :] * (inverse[row] * inverse[row + 1 :])
        end = start + len(correlation)
        packed[start:end] = np.rint(np.clip(correlation, -1, 1) * _STEPS)
        start = end
    return packed, power


def _unpack_block(packed: NDArray[np.int16], power: FloatArray) -> FloatArray:
    size, columns = np.sqrt(power), len(power)
    gram = np.empty((columns, columns), np.float32)
    start = 0
    for row in range(columns):
        end = start + columns - row - 1
        np.multiply(packed[start:end], size[row + 1 :], out=gram[row, row + 1 :])
        gram[row, row + 1 :] *= size[row] / _STEPS
        gram[row, row] = power[row]
        start = end
    for first in range(0, columns, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, columns)
        block = gram[first:last, first:last]
        block[:] = np.triu(block) + np.triu(block, 1).T
        gram[last:, first:last] = gram[first:last, last:].T
    return gram


def read_statistics(calibration: Artifact[Calibration], group: LinearGroup, expert: int | None = None) -> Statistics:
    """``expert``: of a group of experts, whose inputs are its own.

    :class:`QuantizationError` for statistics of another width, and for values that are not finite.
    """
    with safe_open(calibration.folder / statistics_file(group.name), framework="numpy") as file:

        def read(part: str) -> Array:
            name = f"{group.name}.{part}"
            return file.get_tensor(name) if expert is None else file.get_slice(name)[expert]

        vectors = {part: read(part) for part in ("gram_power", "gram_holdout_power", "mean_abs", "max_abs")}
        wrong = [part for part, vector in vectors.items() if vector.shape != (group.in_features,)]
        if wrong or not all(np.isfinite(vector).all() for vector in vectors.values()):
            raise QuantizationError(
                f"statistics of {group.name} are {list(vectors[(wrong or ['gram_power'])[0]].shape)} or not finite",
                expected=f"finite statistics of {group.in_features} channels",
                remedy="run `dvc repro calibrate`",
            )
        return Statistics(
            unpack_gram(read("gram"), vectors["gram_power"]),
            unpack_gram(read("gram_holdout"), vectors["gram_holdout_power"]),
            vectors["mean_abs"],
            vectors["max_abs"],
        )


def every_channel_alike(columns: int) -> Statistics:
    """Of inputs that are one channel at a time, as those of an embedding are."""
    blocks = gram_blocks(columns)
    alike = np.tile(np.eye(columns // blocks, dtype=np.float32), (blocks, 1, 1))
    return Statistics(alike, alike, np.ones(columns, np.float32), np.ones(columns, np.float32))


def kv_scales(
    layer: int, calibration: Artifact[Calibration], settings: KVCache, value_scale: FloatArray | None = None
) -> dict[str, FloatArray]:
    """``layers.N.k_scale`` and ``.v_scale``, ``[H, D]``; ``value_scale`` is what value channels were divided by.

    Not for a cache in float.
    """
    with safe_open(calibration.folder / layer_file(layer), framework="numpy") as file:
        keys, values = (file.get_tensor(f"layers.{layer}.{part}") for part in ("k_pair_absmax", "v_absmax"))
    if value_scale is not None:
        values = values / value_scale.reshape(values.shape)
    return {
        kv_cache.scale_name(layer, part): kv_cache.scales(
            largest, settings.granularity, dtype=settings.dtype, name=f"layers.{layer} {part}s"
        )
        for part, largest in (("key", keys), ("value", values))
    }


def held_out(calibration: Artifact[Calibration], samples: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The held-out ones of the calibration samples, as token ids, in order. :class:`QuantizationError` for others."""
    lines = (calibration.folder / SAMPLES_FILE).read_text().splitlines()
    described = [CalibrationSample.model_validate_json(line) for line in lines]
    cut = [sample[: calibration.record.tokens_per_sample] for sample in samples]
    if [sample_hash(sample) for sample in cut] != [sample.sample_hash for sample in described]:
        raise QuantizationError(
            f"{len(samples)} samples that are not the {len(described)} of {calibration.folder}",
            expected="the samples that were calibrated on, tokenized as they were then",
            remedy="run `dvc repro calibrate`",
        )
    return [sample for sample, known in zip(cut, described, strict=True) if known.holdout]
