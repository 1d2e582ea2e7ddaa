"""What calibration measured, read back layer by layer (calibration.py says what the files hold).

K  input channels of a group      H, D  KV heads and head size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from safetensors import safe_open

from quantization import kv_cache
from quantization.calibration import SAMPLES_FILE, Calibration, CalibrationSample, sample_hash, statistics_file
from quantization.rounding import FloatArray
from tapeout.artifact import Artifact
from tapeout.errors import QuantizationError
from tapeout.portable_graph import LinearGroup
from tapeout.recipe import KVCache


@dataclass(frozen=True)
class Statistics:
    """Of one group's inputs."""

    gram: FloatArray  # [K, K]
    holdout: FloatArray  # [K, K]
    mean_abs: FloatArray  # [K]
    max_abs: FloatArray  # [K]


def read_statistics(calibration: Artifact[Calibration], group: LinearGroup) -> Statistics:
    with safe_open(calibration.folder / statistics_file(group.name), framework="numpy") as file:
        gram, holdout, mean_abs, max_abs = (
            file.get_tensor(f"{group.name}.{part}") for part in ("gram", "gram_holdout", "mean_abs", "max_abs")
        )
    width = group.in_features
    if gram.shape != (width, width) or not all(np.isfinite(part).all() for part in (gram, holdout, mean_abs, max_abs)):
        raise QuantizationError(
            f"statistics of {group.name} are {list(gram.shape)} or not finite",
            expected=f"finite Gram matrices {[width, width]}",
            remedy="run `dvc repro calibrate`",
        )
    return Statistics(gram, holdout, mean_abs, max_abs)


def every_channel_alike(columns: int) -> Statistics:
    """Of inputs that are one channel at a time, as those of an embedding are."""
    alike = np.eye(columns, dtype=np.float32)
    return Statistics(alike, alike, np.ones(columns, np.float32), np.ones(columns, np.float32))


def kv_scales(
    layer: str, calibration: Artifact[Calibration], settings: KVCache, value_scale: FloatArray | None = None
) -> dict[str, FloatArray]:
    """``layers.N.k_scale`` and ``.v_scale``, ``[H, D]``; ``value_scale`` is what value channels were divided by.

    Not for a cache in float.
    """
    with safe_open(calibration.folder / statistics_file(f"{layer}.qkv"), framework="numpy") as file:
        keys, values = file.get_tensor(f"{layer}.k_pair_absmax"), file.get_tensor(f"{layer}.v_absmax")
    if value_scale is not None:
        values = values / value_scale.reshape(values.shape)
    bits = kv_cache.BITS[settings.dtype]
    return {
        f"{layer}.k_scale": kv_cache.scales(keys, settings.granularity, bits=bits, name=f"{layer} keys"),
        f"{layer}.v_scale": kv_cache.scales(values, settings.granularity, bits=bits, name=f"{layer} values"),
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
