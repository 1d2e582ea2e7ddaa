"""Sensitivity: what each scheme costs in quality, unit by unit, with everything else in float."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tapeout.artifact import Frozen, ParentTypes, Record


class UnitSensitivity(Frozen):
    """Mean KL(float, changed) in nats per position, by scheme; one that changes nothing has 0.

    ``experts``: what of it each expert makes, where a plan may give each bits of its own (expert_bits.py).
    """

    name: str
    groups: tuple[str, ...]
    kl: dict[str, float]
    experts: dict[str, tuple[float, ...]] = Field(default={})


class Sensitivity(Record):
    artifact_type: ClassVar[str] = "Sensitivity"
    schema_version: ClassVar[int] = 3  # 3: of each expert
    remedy: ClassVar[str] = "run `dvc repro sensitivity`"
    parent_types: ClassVar[ParentTypes] = {"graph": ("PortableGraph",), "calibration": ("Calibration",)}

    asked: bool  # False: the plan is written out, so nothing was measured
    samples: tuple[str, ...] = ()  # hashes of the calibration samples it was measured on; all of them were held out
    positions: int = 0  # in all samples together, whose distributions were compared
    units: tuple[UnitSensitivity, ...] = ()
    embeddings: dict[str, float] = Field(default={})  # of the embedding and lm_head together, by their scheme
    kv_cache: dict[str, float] = Field(default={})  # by how it is kept
